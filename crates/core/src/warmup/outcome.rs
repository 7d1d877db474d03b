//! From what a warm-up's requests brought to what the pod says about it.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use super::converge;
use super::rules::FailurePolicy;
use super::state::{Phase, Reason, State, Write};
use crate::{duration, timestamp};

const FIRST_BACKOFF: Duration = Duration::from_secs(1);
/// A gate that stays shut is looked at again at least this often.
pub const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// How one attempt ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Ran(Tally),
    /// Not one request could be sent, and why.
    Unable(String),
}

/// What the load generator counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    pub planned: u32,
    pub sent: u32,
    pub succeeded: u32,
    pub p50: Duration,
    pub p99: Duration,
    /// What ended it before everything was sent.
    pub cut: Option<Cut>,
    /// What went wrong most often, with how often.
    pub failure: Option<String>,
    pub curve: Option<converge::Summary>,
}

/// Why an attempt ended early.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Cut {
    /// It took as long as it may.
    Cap(Duration),
    /// A step of that name did; the others went on.
    Step(String, Duration),
    /// Set aside in favour of others for longer than a pod may wait.
    NoPlace(Duration),
}

/// Why a pod that may wait so long waits no longer.
#[must_use]
pub fn no_place(max_queue_wait: Duration) -> String {
    format!("no place among the warm-ups of this node for {}", duration::text(max_queue_wait))
}

/// An attempt that is under way, or about to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Attempt {
    pub containers: Vec<String>,
    pub number: u32,
    pub starts: u32,
    /// Requests an agent before this one has sent in the same attempt and counted.
    pub sent: u32,
    pub succeeded: u32,
    /// When its wait for a place began; the agent before this one may have waited already.
    pub since: Timestamp,
}

/// What happens when nothing succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnFailure {
    pub policy: FailurePolicy,
    pub retries: u32,
}

impl Attempt {
    fn state(&self, phase: Phase) -> State {
        State {
            containers: self.containers.clone(),
            phase,
            attempt: self.number,
            starts: self.starts,
            sent: 0,
            succeeded: 0,
            next: None,
            since: None,
        }
    }

    #[must_use]
    pub fn queued(&self) -> Write {
        let (sent, succeeded, since) = (self.sent, self.succeeded, Some(self.since));
        let state = State { sent, succeeded, since, ..self.state(Phase::Queued) };
        Write::new(Reason::WarmupQueued, "waiting for a place among the warm-ups of this node", state)
    }

    /// Written before the first request, so that no crash can make it repeat more than once.
    #[must_use]
    pub fn started(&self, what: &str) -> Write {
        let message = format!("attempt {} runs: {what}", self.number);
        Write::new(Reason::WarmupRunning, &message, self.state(Phase::Running))
    }

    /// Written by an agent that stops: the next one goes on where this one was.
    #[must_use]
    pub fn handed_over(&self, sent: u32, succeeded: u32) -> Write {
        let state =
            State { sent: self.sent + sent, succeeded: self.succeeded + succeeded, ..self.state(Phase::HandedOver) };
        let message = format!("attempt {} is handed over after {} requests", self.number, state.sent);
        Write::new(Reason::WarmupRunning, &message, state)
    }

    /// The end of the attempt. `jitter` is drawn from 0..1 by the caller.
    #[must_use]
    pub fn ended(&self, outcome: &Outcome, on_failure: OnFailure, now: Timestamp, jitter: f64) -> Write {
        let cause = match outcome {
            Outcome::Ran(tally) if tally.succeeded + self.succeeded > 0 => {
                return Write::new(Reason::WarmupComplete, &self.completed(tally), self.state(Phase::Done));
            }
            Outcome::Ran(tally) => nothing_succeeded(tally, self.sent),
            Outcome::Unable(why) => why.clone(),
        };
        let may_retry = self.number <= on_failure.retries;
        if on_failure.policy == FailurePolicy::Open && !may_retry {
            return failed_open(&cause, self.state(Phase::Done));
        }
        let delay = backoff(self.number, jitter);
        let next = now.saturating_add(SignedDuration::try_from(delay).unwrap_or_default()).unwrap_or(now);
        let message = format!("{cause}; attempt {} follows at {}", self.number + 1, timestamp::text(next));
        Write::new(Reason::WarmupFailed, &message, State { next: Some(next), ..self.state(Phase::Failed) })
    }

    /// Annotations that do not parse: no attempt is made before they change.
    #[must_use]
    pub fn impossible(&self, cause: &str, policy: FailurePolicy) -> Write {
        match policy {
            FailurePolicy::Open => failed_open(cause, self.state(Phase::Done)),
            FailurePolicy::Closed => {
                let message = format!("{cause}; the next attempt follows when the annotation is changed");
                Write::new(Reason::WarmupFailed, &message, self.state(Phase::Failed))
            }
        }
    }

    fn completed(&self, tally: &Tally) -> String {
        let (sent, succeeded) = (tally.sent + self.sent, tally.succeeded + self.succeeded);
        let share = f64::from(succeeded) * 100.0 / f64::from(sent.max(1));
        let mut text = format!(
            "warmup completed: {succeeded}/{sent} requests succeeded ({share:.1}%), P50={}, P99={}",
            shown(tally.p50),
            shown(tally.p99)
        );
        if let Some(curve) = tally.curve {
            let how = if curve.flattened { "converged" } else { "not yet flat" };
            let (cold, warm) = (shown(curve.cold_p95), shown(curve.warm_p95));
            text.push_str(&format!(", {how}: p95 {cold} cold, {warm} warm, {sent} requests spent"));
        }
        if let Some(cut) = &tally.cut {
            text.push_str(&format!(", {} with {sent} of {} sent", stopped(cut), tally.planned + self.sent));
        }
        text
    }
}

pub(super) fn failed_open(cause: &str, state: State) -> Write {
    Write::new(Reason::WarmupFailedOpen, &format!("Warmup failed but pod marked ready (fail-open): {cause}"), state)
}

fn nothing_succeeded(tally: &Tally, sent_before: u32) -> String {
    let mut text = format!("0/{} requests succeeded", tally.sent + sent_before);
    if let Some(failure) = &tally.failure {
        text.push_str(&format!(": {failure}"));
    }
    if let Some(cut) = &tally.cut {
        text.push_str(&format!(", {}", stopped(cut)));
    }
    text
}

fn stopped(cut: &Cut) -> String {
    match cut {
        Cut::Cap(cap) => format!("stopped by the cap of {}", duration::text(*cap)),
        Cut::Step(name, timeout) => format!("step {name:?} ended by its timeout of {}", duration::text(*timeout)),
        Cut::NoPlace(longest) => format!("stopped: {}", no_place(*longest)),
    }
}

/// 1s, 2s, 4s … up to a minute, of which between half and all is waited.
#[must_use]
pub fn backoff(failures: u32, jitter: f64) -> Duration {
    let doubled = FIRST_BACKOFF.saturating_mul(1 << failures.saturating_sub(1).min(16));
    doubled.min(MAX_BACKOFF).mul_f64(0.5 + jitter.clamp(0.0, 1.0) / 2.0)
}

/// Three or four digits are all anybody reads.
fn shown(latency: Duration) -> String {
    let micros = latency.as_micros() as u64;
    let unit = match micros {
        0..10_000 => 1,
        10_000..1_000_000 => 100,
        _ => 1_000,
    };
    duration::text(Duration::from_micros(micros / unit * unit))
}

#[cfg(test)]
mod tests;
