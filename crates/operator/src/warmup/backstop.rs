//! The leader's part: gates that stay shut though nobody works on them are opened.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use groundcrew_core::feature::Feature;
use groundcrew_core::keys;
use groundcrew_core::warmup::backstop::{self, Verdict};
use groundcrew_core::warmup::state::Reason;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use kube::core::DeserializeGuard;
use prometheus_client::registry::Registry;
use tokio::time::Instant;
use tracing::{info, warn};

use super::agents::{self, Agents};
use super::metrics::{Metrics, Outcome as Counted};
use super::{Facts, Pod, farewell, reference};
use crate::run::Context;
use crate::runtime::apply::{self, Outcome, Write, WriteError};
use crate::runtime::cache::{self, Cache, Key};
use crate::runtime::queue::Next;

/// A gate is looked at again this often at least: an agent's silence changes nothing that is watched.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_millis(500);

/// What of a pod's record counts as progress, and since when it has been so.
#[derive(Debug)]
struct Sight {
    uid: String,
    record: Option<String>,
    due: bool,
    since: Instant,
}

#[derive(Debug)]
struct Backstop {
    cache: Arc<Cache<Facts>>,
    agents: Agents,
    leases: Api<Lease>,
    sights: Mutex<HashMap<Key, Sight>>,
    metrics: Metrics,
    context: Context,
}

/// Only shut gates are remembered: on a quiet cluster none.
fn shut(pod: Pod) -> Option<Facts> {
    let facts = Facts::of(pod);
    let seen = facts.seen();
    (seen.is_gated() && !seen.is_open() && !seen.is_ending()).then_some(facts)
}

pub(super) fn start(context: &Context, registry: &mut Registry) {
    let pods: Api<DeserializeGuard<Pod>> = Api::all(context.clients.watch.clone());
    let cache = Cache::new("pods whose warm-up gate is shut");
    let changes = cache.subscribe();
    context.follow(&cache, cache::fill(Arc::clone(&cache), pods, context.feed(), shut));
    let waiting = Arc::clone(&cache);
    let agents = agents::follow(context);
    let forgetting = farewell::forget_lost_agents(context.clone(), agents.clone());
    context.tasks.spawn(context.stopping.clone().run_until_cancelled_owned(forgetting));
    let backstop = Arc::new(Backstop {
        cache,
        agents,
        leases: Api::namespaced(context.clients.read.clone(), &context.namespace),
        sights: Mutex::default(),
        metrics: Metrics::register(registry),
        context: context.clone(),
    });
    let queue = context.queue(Feature::Warmup).forgetting(move |key| waiting.get(key).is_some());
    context.tasks.spawn(queue.run(changes, move |key| {
        let backstop = Arc::clone(&backstop);
        async move { backstop.reconcile(&key).await }
    }));
}

impl Backstop {
    async fn reconcile(&self, key: &Key) -> Result<Next, WriteError> {
        let Some(facts) = self.cache.get(key) else {
            self.sights.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
            return Ok(Next::Change);
        };
        let now = (self.context.clock)();
        let mut verdict = self.decide(key, &facts, now);
        if matches!(&verdict, Verdict::Open(write) if write.reason == Reason::AgentUnavailable) {
            let node = facts.spec.node_name.as_deref().unwrap_or_default();
            if !self.agents.ask(&self.leases, node).await {
                return Ok(Next::After(RETRY));
            }
            verdict = self.decide(key, &facts, now);
        }
        let write = match verdict {
            Verdict::Leave(backstop::Why::Closed | backstop::Why::NotReady) => return Ok(Next::After(LOOK_AGAIN)),
            Verdict::Leave(_) => return Ok(Next::Change),
            Verdict::LookAgain { after } => return Ok(Next::After(after.min(LOOK_AGAIN))),
            Verdict::Open(write) => write,
        };
        // Bound to the version: an agent that comes back at this moment wins.
        let patch = write.patch(&facts.uid, Some(&facts.version), Some(false), now);
        let target = apply::pod(&key.namespace, &key.name, &facts.uid);
        match self.context.writer.write(Feature::Warmup, &target, &Write::StatusPatch(patch)).await? {
            Outcome::Done(_) => {
                warn!(pod = %key, reason = %write.reason, message = write.message, "the leader opened a gate");
                let pod = reference(key, &facts.uid);
                self.context.events.warning(pod, "WarmupFailed", write.message);
                self.metrics.ended(&key.namespace, Counted::of(write.reason), 0, None);
                Ok(Next::Change)
            }
            Outcome::Gone => Ok(Next::Change),
            other => {
                info!(pod = %key, ?other, "the gate could not be opened yet");
                Ok(Next::After(RETRY))
            }
        }
    }

    fn decide(&self, key: &Key, facts: &Facts, now: Timestamp) -> Verdict {
        let unchanged_for = self.unchanged_for(key, facts);
        let longest = self.context.config.warmup.max_queue_wait;
        let node = facts.spec.node_name.as_deref().unwrap_or_default();
        let led_for = self.context.leadership.led_for();
        self.agents.of(node, led_for, |agent| backstop::decide(&facts.seen(), agent, unchanged_for, longest, now))
    }

    /// On our own clock, so that neither a restart of ours nor another clock opens a gate early.
    fn unchanged_for(&self, key: &Key, facts: &Facts) -> Duration {
        let record = facts.annotations.get(keys::WARMUP_STATE).cloned();
        let due = facts.seen().due().is_ok();
        let mut sights = self.sights.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |sight: &Sight| sight.uid == facts.uid && sight.record == record && sight.due == due;
        if !sights.get(key).is_some_and(same) {
            let sight = Sight { uid: facts.uid.clone(), record, due, since: Instant::now() };
            sights.insert(key.clone(), sight);
        }
        sights.get(key).map_or(Duration::ZERO, |sight| sight.since.elapsed())
    }
}
