//! One warm-up from the queue to its last write.
//!
//! Guarantees: a start is on the pod before the first request is sent; a conflict repeats a write and never a request;
//! cancelling, or the end of the process, closes every connection at once.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use groundcrew_core::duration;
use groundcrew_core::warmup::outcome::{OnFailure, Outcome as Ended, no_place};
use groundcrew_core::warmup::scenario::Scenario;
use groundcrew_core::warmup::state::{Reason, Write};
use groundcrew_core::warmup::{Job, rules::Mode};
use groundcrew_load::call::Trace;
use groundcrew_load::engine::Progress;
use groundcrew_load::warm::{self, Work, warm};
use kube::api::Api;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::agent::{Agent, Held};
use super::crd::WarmupConfig;
use super::metrics::Outcome as Counted;
use super::share::Seat;
use super::{Facts, reference};
use crate::runtime::apply::Outcome;
use crate::runtime::cache::Key;

/// What comes at once needs no record of waiting for it.
const QUEUED_AFTER: Duration = Duration::from_secs(1);
const CALL: Duration = Duration::from_secs(5);
/// How long a read is tried while nobody answers at all.
const API_AWAY: Duration = Duration::from_secs(60);
/// Conflicts after which a start no longer insists on the version: somebody writes this pod all the time.
const PATIENCE: u32 = 5;

pub(super) async fn run(agent: &Arc<Agent>, key: &Key, held: &Held, job: Job) {
    let one = One { agent, key, held, job: &job };
    let reference = reference(key, &held.uid);
    agent.context.events.normal(reference.clone(), "WarmupQueued", format!("attempt {}", job.attempt.number));
    let queued = Instant::now();
    let seat = agent.share.join(&key.namespace, job.patience);
    let stopping = &agent.context.stopping;
    let begun = tokio::select! {
        begun = one.recorded(seat.begins()) => begun,
        () = held.cancel.cancelled() => return,
        () = stopping.cancelled() => return,
    };
    agent.metrics.queued(&key.namespace, queued.elapsed());
    let (outcome, took, sent) = if begun {
        let scenario = match &job.rules.config {
            Some(name) => tokio::select! {
                scenario = one.recorded(one.scenario(name)) => Some(scenario),
                () = held.cancel.cancelled() => return,
                () = stopping.cancelled() => return,
            },
            None => None,
        };
        match scenario.transpose() {
            Err(why) => (Ended::Unable(why), None, 0),
            Ok(scenario) => {
                if !one.started(scenario.as_ref()).await {
                    return;
                }
                let started = Instant::now();
                let progress = Progress::default();
                match one.warm(&seat, scenario.as_ref(), &progress).await {
                    Some(outcome) => (outcome, Some(started.elapsed()), progress.sent()),
                    None => {
                        info!(pod = %key, sent = progress.sent(), "warm-up cancelled");
                        return agent.metrics.ended(&key.namespace, Counted::cancelled, progress.sent(), None);
                    }
                }
            }
        }
    } else {
        (Ended::Unable(no_place(agent.context.config.warmup.max_queue_wait)), None, 0)
    };
    drop(seat);
    one.finish(&outcome, took, sent).await;
}

struct One<'a> {
    agent: &'a Arc<Agent>,
    key: &'a Key,
    held: &'a Held,
    job: &'a Job,
}

impl One<'_> {
    /// Waits; if that takes long, the pod says so meanwhile, or the leader would think that nobody looks after it.
    async fn recorded<T>(&self, wait: impl Future<Output = T>) -> T {
        let mut wait = pin!(wait);
        if let Ok(over) = timeout(QUEUED_AFTER, wait.as_mut()).await {
            return over;
        }
        let queued = self.job.attempt.queued();
        let enough = CancellationToken::new();
        let waiting = async {
            let over = wait.await;
            enough.cancel();
            over
        };
        // A write that is under way is waited for, so that it cannot overtake that of the start.
        let (over, _) = tokio::join!(waiting, self.settle_until(&enough, &queued, false));
        over
    }

    /// Records the start; false when the pod is not to be warmed after all.
    async fn started(&self, scenario: Option<&Scenario>) -> bool {
        let write = self.job.attempt.started(&describe(self.job, scenario));
        let recorded = tokio::select! {
            recorded = self.settle(&write, true) => recorded,
            () = self.held.cancel.cancelled() => false,
            () = self.agent.context.stopping.cancelled() => false,
        };
        if recorded {
            let reference = reference(self.key, &self.held.uid);
            self.agent.context.events.normal(reference, "WarmupStarted", write.message);
        }
        recorded
    }

    /// Nothing when it was cancelled, or handed over.
    async fn warm(&self, seat: &Seat, scenario: Option<&Scenario>, progress: &Progress) -> Option<Ended> {
        let Job { attempt, rules, address, .. } = self.job;
        let trace = Trace::new(fastrand::u128(..));
        let work = Work {
            address: *address,
            rules,
            scenario,
            sent_before: attempt.sent,
            trace,
            precise: true,
            max_queue_wait: self.agent.context.config.warmup.max_queue_wait,
        };
        let namespace = &self.key.namespace;
        self.agent.metrics.active(namespace, &self.agent.node, 1);
        let cancel = CancellationToken::new();
        let ended = tokio::select! {
            biased;
            () = self.held.cancel.cancelled() => None,
            () = self.agent.context.stopping.cancelled() => None,
            ended = warm(work, seat, &cancel, progress) => Some(ended),
        };
        self.agent.metrics.active(namespace, &self.agent.node, -1);
        if let Some(warm::Ended::With(outcome)) = ended {
            return Some(outcome);
        }
        // A scenario cannot go on in the middle and a curve not without its past; both begin again, once.
        let resumable = scenario.is_none() && rules.mode != Mode::Converge;
        if self.agent.context.stopping.is_cancelled() && !self.held.cancel.is_cancelled() && resumable {
            let write = attempt.handed_over(progress.sent(), progress.succeeded());
            let _ = timeout(Duration::from_secs(3), self.settle(&write, false)).await;
        }
        None
    }

    async fn finish(&self, outcome: &Ended, took: Option<Duration>, sent: u32) {
        let rules = &self.job.rules;
        let on_failure = OnFailure { policy: rules.failure_policy, retries: rules.retries };
        let now = (self.agent.context.clock)();
        let write = self.job.attempt.ended(outcome, on_failure, now, fastrand::f64());
        // The count is of what was sent, whether or not the pod still is there to be told.
        self.agent.metrics.ended(&self.key.namespace, Counted::of(write.reason), sent, took);
        // Not given up when it is cancelled: what cancels it may be this very write, seen before it was answered.
        if !self.settle(&write, false).await {
            return;
        }
        let reference = reference(self.key, &self.held.uid);
        let events = &self.agent.context.events;
        if write.reason == Reason::WarmupComplete {
            info!(pod = %self.key, message = write.message, "warm-up complete");
            events.normal(reference, "WarmupCompleted", write.message);
        } else {
            warn!(pod = %self.key, reason = %write.reason, message = write.message, "warm-up failed");
            events.warning(reference, "WarmupFailed", write.message);
        }
    }

    /// Writes until it is written, or the pod or its gate is no longer ours. `bound` asks for an unchanged pod at first.
    async fn settle(&self, write: &Write, bound: bool) -> bool {
        self.settle_until(&CancellationToken::new(), write, bound).await
    }

    /// The same, while it is wanted.
    async fn settle_until(&self, enough: &CancellationToken, write: &Write, bound: bool) -> bool {
        let mut failures = 0_u32;
        while !enough.is_cancelled() {
            let Some(facts) = self.current() else { return self.is_written(write) };
            match self.agent.write(self.key, &facts, write, bound && failures < PATIENCE).await {
                Ok(Outcome::Done(_)) => return true,
                Ok(Outcome::Gone) => return false,
                Ok(other) => {
                    if self.agent.context.stopping.is_cancelled() && other == Outcome::NotLeader {
                        return false;
                    }
                }
                Err(error) => warn!(pod = %self.key, %error, "the condition could not be written yet"),
            }
            failures = failures.saturating_add(1);
            let pause = Duration::from_millis(20 << failures.min(7));
            enough.run_until_cancelled(sleep(pause.mul_f64(0.5 + fastrand::f64()))).await;
        }
        false
    }

    /// Whether it was written after all, though the answer got lost.
    fn is_written(&self, write: &Write) -> bool {
        let facts = self.agent.cache.get(self.key).filter(|facts| facts.uid == self.held.uid);
        facts.is_some_and(|facts| write.is_known(&facts.seen()))
    }

    /// The pod as it is now, if it still waits for these containers to be warmed.
    fn current(&self) -> Option<Arc<Facts>> {
        let facts = self.agent.cache.get(self.key)?;
        let seen = facts.seen();
        let same = facts.uid == self.held.uid && seen.still_runs(&self.held.containers);
        (same && !seen.is_ending() && !seen.is_open()).then_some(facts)
    }

    async fn scenario(&self, name: &str) -> Result<Scenario, String> {
        let failed = |why: &str| format!("WarmupConfig {name:?} {why}");
        let found = self.config(name).await.map_err(|why| failed(&format!("could not be read: {why}")))?;
        let config = found.ok_or_else(|| failed("does not exist in the pod's namespace"))?;
        Scenario::read(&config.spec.0).map_err(|e| failed(&format!("is not valid: {e}")))
    }

    /// An API server that is away says nothing about the config, and without it no gate could be opened anyway.
    async fn config(&self, name: &str) -> Result<Option<WarmupConfig>, String> {
        let client = self.agent.context.clients.read.clone();
        let configs: Api<WarmupConfig> = Api::namespaced(client, &self.key.namespace);
        let given_up = Instant::now() + API_AWAY;
        loop {
            match timeout(CALL, configs.get_opt(name)).await {
                Ok(Ok(found)) => return Ok(found),
                Ok(Err(e)) if is_final(&e) || Instant::now() >= given_up => return Err(e.to_string()),
                Err(_) if Instant::now() >= given_up => return Err("no answer in time".to_owned()),
                Ok(Err(_)) | Err(_) => sleep(Duration::from_millis(500)).await,
            }
        }
    }
}

/// Whether asking again would bring the same.
fn is_final(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => status.code < 500 && status.code != 429,
        kube::Error::SerdeError(_) => true,
        _ => false,
    }
}

/// What the condition says while it runs.
fn describe(job: &Job, scenario: Option<&Scenario>) -> String {
    let Job { rules, address, .. } = job;
    if let (Some(scenario), Some(name)) = (scenario, &rules.config) {
        return format!("{} requests of WarmupConfig {name:?} to {address}", scenario.planned());
    }
    let (n, over) = (rules.requests, duration::text(rules.duration));
    match rules.mode {
        Mode::Paced => format!("{n} {} requests over {over} to {address}", rules.protocol),
        Mode::Asap => format!("{n} {} requests back to back to {address}", rules.protocol),
        Mode::Converge => format!("{} requests to {address} until latency is flat, at most {over}", rules.protocol),
    }
}
