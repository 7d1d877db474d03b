//! Carries out what a [`sweep`] found: resizes at a steady pace, statuses, events and numbers.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use groundcrew_core::feature::Feature;
use groundcrew_core::sizing::resize::{self, Reason};
use groundcrew_core::sizing::status::{Condition, Summary};
use jiff::Timestamp;
use json_patch::Patch;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition as ApiCondition, Time};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde_json::json;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use super::crd::{FlexDaemonsetTemplate, TemplateStatus};
use super::facts::{Facts, PodFacts, TemplateFacts, key};
use super::sweep::{Crowd, Failed, Job, Memory, Plan, Refusal, Sent, Settings, sweep};
use crate::run::Context;
use crate::runtime::apply::{self, Outcome, Target, Write, WriteError};
use crate::runtime::cache::{Cache, Changes, Key};

/// Between two passes: what changes together is looked at together.
const GAP: Duration = Duration::from_millis(500);
/// A template that arrives shortly after its DaemonSet is nobody's mistake.
const PATIENCE: Duration = Duration::from_secs(3);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct State {
    state: &'static str,
}

/// What can be seen from outside.
#[derive(Debug, Default)]
pub struct Metrics {
    pods: Family<State, Gauge>,
    crowded: Gauge,
    failing: Gauge,
}

impl Metrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "groundcrew_sizing_pods",
            "Pods that name a template: right, resizing, needs_restart, unsized, ending",
            metrics.pods.clone(),
        );
        registry.register(
            "groundcrew_sizing_crowded_templates",
            "Templates whose pods take part in a node giving more than sizing.warnShare to sized pods",
            metrics.crowded.clone(),
        );
        registry.register(
            "groundcrew_sizing_failing_daemonsets",
            "DaemonSets that name a template and get no sizes",
            metrics.failing.clone(),
        );
        metrics
    }

    /// Another replica leads, and tells what it sees.
    fn clear(&self) {
        self.pods.clear();
        self.crowded.set(0);
        self.failing.set(0);
    }

    fn record(&self, plan: &Plan) {
        for state in ["right", "resizing", "needs_restart", "unsized", "ending"] {
            let count = plan.states.get(state).copied().unwrap_or(0);
            self.pods.get_or_create(&State { state }).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        self.crowded.set(i64::try_from(plan.crowded.len()).unwrap_or(i64::MAX));
        self.failing.set(i64::try_from(plan.failures.len()).unwrap_or(i64::MAX));
    }
}

/// Starts the passes; they happen while this replica leads.
pub fn run(context: &Context, facts: Arc<Facts>, pods: Arc<Cache<PodFacts>>, metrics: Metrics) {
    let changed = Arc::new(Notify::new());
    let all = [facts.templates.subscribe(), facts.daemon_sets.subscribe(), facts.nodes.subscribe(), pods.subscribe()];
    for changes in all {
        let forward = forward(changes, Arc::clone(&changed));
        context.tasks.spawn(context.stopping.clone().run_until_cancelled_owned(forward));
    }
    let keeper = Keeper {
        settings: Settings { resize: context.config.sizing.resize, warn_share: context.config.sizing.warn_share },
        context: context.clone(),
        facts,
        pods,
        metrics,
        memory: Memory::default(),
        pace: Pace::new(context.config.sizing.resizes_per_second),
        failing: HashMap::new(),
        crowded: BTreeMap::new(),
    };
    context.tasks.spawn(context.stopping.clone().run_until_cancelled_owned(keeper.keep(changed)));
}

async fn forward(changes: Arc<Changes>, changed: Arc<Notify>) {
    loop {
        changes.next().await;
        changed.notify_one();
    }
}

/// So many in each second that begins with the first of them.
#[derive(Debug)]
struct Pace {
    per_second: usize,
    began: Option<Instant>,
    taken: usize,
}

impl Pace {
    fn new(per_second: u32) -> Self {
        Self { per_second: usize::try_from(per_second).unwrap_or(usize::MAX), began: None, taken: 0 }
    }

    fn allows(&mut self, now: Instant) -> usize {
        if self.began.is_none_or(|began| now.duration_since(began) >= Duration::from_secs(1)) {
            (self.began, self.taken) = (Some(now), 0);
        }
        self.per_second.saturating_sub(self.taken)
    }

    fn take(&mut self, count: usize) {
        self.taken += count;
    }
}

/// Since when a DaemonSet fails, why, and whether that was said.
struct Failing {
    since: Instant,
    why: String,
    told: bool,
}

struct Keeper {
    settings: Settings,
    context: Context,
    facts: Arc<Facts>,
    pods: Arc<Cache<PodFacts>>,
    metrics: Metrics,
    memory: Memory,
    pace: Pace,
    failing: HashMap<Key, Failing>,
    crowded: BTreeMap<String, Crowd>,
}

impl Keeper {
    async fn keep(mut self, changed: Arc<Notify>) {
        let mut leader = self.context.leadership.watch();
        let (sets, nodes, pods) = (self.facts.daemon_sets.synced(), self.facts.nodes.synced(), self.pods.synced());
        let mut synced = [sets, nodes, pods, self.facts.templates_known.clone()];
        for synced in &mut synced {
            // Half a picture would count pods as unsized.
            let _ = synced.wait_for(|synced| *synced).await;
        }
        let resync = self.context.config.controller.resync_period;
        loop {
            if !*leader.borrow_and_update() {
                self.metrics.clear();
            }
            let _ = leader.wait_for(|leads| *leads).await;
            let unfinished = self.pass().await;
            sleep(GAP).await;
            let next = if unfinished { GAP } else { resync };
            tokio::select! {
                _ = timeout(next, changed.notified()) => {}
                Ok(()) = leader.changed() => {}
            }
        }
    }

    /// Gather, decide, apply. Tells whether something is left to do soon.
    async fn pass(&mut self) -> bool {
        let now = Instant::now();
        let budget = self.pace.allows(now);
        let plan = sweep(&self.facts, &self.pods, &mut self.memory, &self.settings, budget, now);
        self.metrics.record(&plan);
        self.pace.take(plan.jobs.len());
        self.resize(&plan.jobs).await;
        self.report(&plan.templates).await;
        let waiting = self.complain(&plan.failures, now);
        self.warn_of_crowds(plan.crowded);
        plan.held > 0 || waiting
    }

    async fn resize(&mut self, jobs: &[Job]) {
        let context = &self.context;
        let writes = stream::iter(jobs.iter().cloned()).map(|job| async move {
            let target = apply::pod(&job.key.namespace, &job.key.name, &job.pod.uid);
            let write = Write::Resize(resize::spec(&job.changes));
            let result = context.writer.write(Feature::Sizing, &target, &write).await;
            (job, result)
        });
        let results: Vec<_> = writes.buffer_unordered(context.config.controller.workers).collect().await;
        for (job, result) in results {
            self.remember(job, result);
        }
    }

    fn remember(&mut self, job: Job, result: Result<Outcome, WriteError>) {
        let Job { key, pod, changes, take_back, .. } = job;
        let failed = self.memory.failed.remove(&pod.uid);
        match result {
            Ok(Outcome::Done(_)) => {
                info!(pod = %key, take_back, "Resized pod in place");
                if take_back {
                    self.refuse(&pod, resize::now(&pod.shape, &changes), Reason::Infeasible);
                }
                self.memory.sent.insert(pod.uid.clone(), Sent { at: Instant::now(), version: pod.version.clone() });
            }
            Ok(outcome) => tracing::debug!(pod = %key, ?outcome, "not resized"),
            Err(error) if error.is_retryable() => {
                warn!(pod = %key, %error, "a resize failed, tried again");
                // Soon, but not at once: the pace is for others, too.
                let tries = failed.map_or(0, |failed| failed.tries).saturating_add(1);
                let not_before = Instant::now() + resize::retry_soon(tries);
                self.memory.failed.insert(pod.uid.clone(), Failed { tries, not_before });
            }
            Err(error) => {
                warn!(pod = %key, %error, "a resize was refused, tried again later");
                self.refuse(&pod, changes, Reason::Refused);
            }
        }
    }

    fn refuse(&mut self, pod: &PodFacts, changes: Vec<resize::Change>, reason: Reason) {
        let same = self.memory.refused.get(&pod.uid).filter(|refusal| refusal.changes == changes);
        let tries = same.map_or(0, |refusal| refusal.tries).saturating_add(1);
        let not_before = Instant::now() + resize::retry_after(tries);
        self.memory.refused.insert(pod.uid.clone(), Refusal { changes, reason, tries, not_before });
    }

    async fn report(&self, templates: &BTreeMap<String, Summary>) {
        for (name, summary) in templates {
            let Some(template) = self.facts.templates.get(&key("", name)) else { continue };
            let status = status(&template, summary, (self.context.clock)());
            if status == template.status {
                continue;
            }
            let target = Target::of::<FlexDaemonsetTemplate>(None, name, &template.uid);
            let patch: Result<Patch, _> = serde_json::from_value(json!([
                {"op": "test", "path": "/metadata/uid", "value": template.uid},
                {"op": "add", "path": "/status", "value": status},
            ]));
            let Ok(patch) = patch else { continue };
            if let Err(error) = self.context.writer.write(Feature::Sizing, &target, &Write::JsonStatus(patch)).await {
                warn!(template = name, %error, "the template's status could not be written");
            }
        }
    }

    /// Says once what keeps a DaemonSet from its sizes. Tells whether somebody is still given time.
    fn complain(&mut self, failures: &BTreeMap<Key, groundcrew_core::sizing::Why>, now: Instant) -> bool {
        self.failing.retain(|key, _| failures.contains_key(key));
        let mut waiting = false;
        for (key, why) in failures {
            let why = why.to_string();
            let entry = self.failing.entry(key.clone());
            let failing = entry.or_insert_with(|| Failing { since: now, why: why.clone(), told: false });
            if failing.why != why {
                *failing = Failing { since: now, why, told: false };
            }
            if failing.told {
                continue;
            }
            if now.duration_since(failing.since) < PATIENCE {
                waiting = true;
                continue;
            }
            failing.told = true;
            let uid = self.facts.daemon_sets.get(key).map(|set| set.uid.clone());
            let regarding = reference("apps/v1", "DaemonSet", Some(&key.namespace), &key.name, uid);
            warn!(daemon_set = %key, reason = failing.why, "pods are not sized");
            self.context.events.warning(regarding, "SizingFailed", failing.why.clone());
        }
        waiting
    }

    fn warn_of_crowds(&mut self, crowded: BTreeMap<String, Crowd>) {
        let share = self.settings.warn_share;
        for (name, crowd) in crowded.iter().filter(|(name, _)| !self.crowded.contains_key(*name)) {
            let (percent, node, resource) = &crowd.worst;
            let note = format!(
                "sized pods together reserve more than {share} % of {} nodes; the most is {percent} % of the {resource} of {node}",
                crowd.nodes
            );
            let uid = self.facts.templates.get(&key("", name)).map(|template| template.uid.clone());
            let regarding = reference("flexdaemonsets.xai/v1alpha1", "FlexDaemonsetTemplate", None, name, uid);
            self.context.events.warning(regarding, "SizingShareHigh", note);
        }
        self.crowded = crowded;
    }
}

fn reference(
    api_version: &str,
    kind: &str,
    namespace: Option<&str>,
    name: &str,
    uid: Option<String>,
) -> ObjectReference {
    ObjectReference {
        api_version: Some(api_version.to_owned()),
        kind: Some(kind.to_owned()),
        namespace: namespace.map(str::to_owned),
        name: Some(name.to_owned()),
        uid,
        ..ObjectReference::default()
    }
}

/// The status as it should be; a condition that stays keeps its time.
fn status(template: &TemplateFacts, summary: &Summary, now: Timestamp) -> TemplateStatus {
    let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
    let condition = |kind: &str, condition: &Condition| {
        let status = if condition.holds { "True" } else { "False" };
        let before = template.status.conditions.iter().find(|c| c.type_ == kind && c.status == status);
        // Whole seconds: the API server keeps no more, and the comparison must not see a difference.
        let second = Timestamp::from_second(now.as_second()).unwrap_or(now);
        ApiCondition {
            type_: kind.to_owned(),
            status: status.to_owned(),
            reason: condition.reason.to_owned(),
            message: condition.message.clone(),
            observed_generation: template.generation,
            last_transition_time: before.map_or(Time(second), |c| c.last_transition_time.clone()),
        }
    };
    TemplateStatus {
        observed_generation: template.generation,
        daemon_sets: count(summary.daemon_sets),
        pods: count(summary.pods),
        pods_resizing: count(summary.pods_resizing),
        pods_needing_restart: count(summary.pods_needing_restart),
        restart_reasons: summary.restart_reasons.iter().map(|(k, v)| ((*k).to_owned(), count(*v))).collect(),
        conditions: vec![condition("Ready", &summary.ready), condition("ResizePending", &summary.resize_pending)],
    }
}

#[cfg(test)]
mod tests;
