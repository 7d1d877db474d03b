//! The agent of one node: looks at the node's gated pods, decides, and hands warm-ups to [`super::job`].

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use groundcrew_core::config::Config;
use groundcrew_core::feature::Feature;
use groundcrew_core::warmup::state::Write;
use groundcrew_core::warmup::{InHand, Verdict, decide, over};
use k8s_openapi::api::coordination::v1::Lease;
use kube::Client;
use kube::api::{Api, PostParams};
use kube::core::DeserializeGuard;
use prometheus_client::registry::Registry;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

pub use super::agents::check_node_name;
use super::agents::{LABEL, LABEL_VALUE, lease_name};
use super::metrics::{Metrics, Outcome as Counted};
use super::share::Share;
use super::{Facts, Pod, job, reference};
use crate::run::Context;
use crate::runtime::apply::{self, Outcome, Write as Change, WriteError};
use crate::runtime::cache::{self, Cache, Changes, Feed, Key};
use crate::runtime::lease::{LeaseSettings, identity, own_pod};
use crate::runtime::queue::Next;

/// Decisions are cheap and writes are short: enough that one slow write holds nobody up.
const WORKERS: usize = 16;
const CALL: Duration = Duration::from_secs(5);

/// A warm-up of this process.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub uid: String,
    pub containers: Vec<String>,
    pub address: SocketAddr,
    pub cancel: CancellationToken,
}

/// Takes a warm-up out of the agent's hands when it ends, even in a panic: else its pod would stay in them for ever.
struct LetGo {
    agent: Arc<Agent>,
    key: Key,
}

impl Drop for LetGo {
    fn drop(&mut self) {
        self.agent.jobs().remove(&self.key);
        self.agent.changes.mark(self.key.clone());
    }
}

#[derive(Debug)]
pub(super) struct Agent {
    pub node: String,
    pub context: Context,
    pub cache: Arc<Cache<Facts>>,
    pub changes: Arc<Changes>,
    pub share: Share,
    pub metrics: Metrics,
    jobs: Mutex<HashMap<Key, Held>>,
    /// The version each pod has after our last write: what the cache shows before that is the past.
    written: Mutex<HashMap<Key, (String, u64)>>,
}

/// The Lease of a node's agent: it says that the agent lives, and keeps a second one from doing the same work.
#[must_use]
pub fn lease(config: &Config, namespace: &str, node: &str) -> LeaseSettings {
    let gone = config.warmup.agent_timeout;
    LeaseSettings {
        // One that waits since the last renewal has it before the leader gives the node up. A container that is restarted
        // does not see that renewal, and comes in time because it follows on its own pod.
        pod: own_pod(),
        duration: gone * 5 / 6,
        step_down: gone * 2 / 3,
        renew_every: gone / 4,
        labels: [(LABEL.to_owned(), LABEL_VALUE.to_owned())].into(),
        ..LeaseSettings::new(namespace, lease_name(node), identity())
    }
}

/// Makes the Lease if it is not there. Nobody can hold one that never was, so it need not be waited out.
pub async fn prepare_lease(client: Client, settings: &LeaseSettings) {
    let leases: Api<Lease> = Api::namespaced(client, &settings.namespace);
    let lease = settings.name.as_str();
    match timeout(CALL, leases.create(&PostParams::default(), &settings.vacant())).await {
        Ok(Ok(_)) => info!(lease, "lease created"),
        Ok(Err(kube::Error::Api(status))) if status.code == 409 => {}
        Ok(Err(error)) => warn!(lease, %error, "the lease could not be created"),
        Err(_) => warn!(lease, "the lease could not be created in time"),
    }
}

fn gated(pod: Pod) -> Option<Facts> {
    let facts = Facts::of(pod);
    facts.seen().is_gated().then_some(facts)
}

/// `lease` is cancelled when the last write is out and the node may be somebody else's.
pub fn start(context: &Context, node: &str, registry: &mut Registry, lease: CancellationToken) {
    let pods: Api<DeserializeGuard<Pod>> = Api::all(context.clients.watch.clone());
    let cache = Cache::new("pods of this node with a warm-up gate");
    let changes = cache.subscribe();
    let feed = Feed { fields: Some(format!("spec.nodeName={node}")), ..context.feed() };
    context.follow(&cache, cache::fill(Arc::clone(&cache), pods, feed, gated));
    let settings = &context.config.warmup;
    let share = Share::new(settings.max_concurrent, settings.max_rps);
    context.tasks.spawn(context.stopping.clone().run_until_cancelled_owned(share.clone().keep()));
    let agent = Arc::new(Agent {
        node: node.to_owned(),
        context: context.clone(),
        cache,
        changes: Arc::clone(&changes),
        share,
        metrics: Metrics::register(registry),
        jobs: Mutex::default(),
        written: Mutex::default(),
    });
    context.tasks.spawn(context.stopping.clone().run_until_cancelled_owned(watch_over(Arc::clone(&agent))));
    context.tasks.spawn(drain(Arc::clone(&agent), context.stopping.clone(), lease));
    let mut queue = context.queue(Feature::Warmup);
    queue.workers = WORKERS;
    context.tasks.spawn(queue.run(changes, move |key| {
        let agent = Arc::clone(&agent);
        async move { agent.reconcile(key).await }
    }));
}

impl Agent {
    fn jobs(&self) -> MutexGuard<'_, HashMap<Key, Held>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn written(&self) -> MutexGuard<'_, HashMap<Key, (String, u64)>> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a warm-up of the pod is in hand. One whose pod, containers or address are no more is told to end.
    fn in_hand(&self, key: &Key) -> bool {
        let Some(held) = self.jobs().get(key).cloned() else { return false };
        let facts = self.cache.get(key).filter(|facts| facts.uid == held.uid);
        let in_hand = InHand { containers: &held.containers, address: held.address };
        let why = facts.map(|facts| over(&facts.seen(), in_hand));
        if why != Some(None) && !held.cancel.is_cancelled() {
            debug!(pod = %key, why = ?why.flatten(), "no longer to be warmed");
            held.cancel.cancel();
        }
        true
    }

    /// Gather, decide, apply.
    async fn reconcile(self: Arc<Self>, key: Key) -> Result<Next, WriteError> {
        // The job marks the key when it has left.
        if self.in_hand(&key) {
            return Ok(Next::Change);
        }
        let Some(facts) = self.cache.get(&key) else {
            self.written().remove(&key);
            return Ok(Next::Change);
        };
        if !self.is_fresh(&key, &facts) {
            return Ok(Next::Change);
        }
        let now = (self.context.clock)();
        let longest = self.context.config.warmup.max_queue_wait;
        match decide(&facts.seen(), longest, now, fastrand::f64()) {
            Verdict::Leave(why) => debug!(?why, "left alone"),
            Verdict::Wait { until } => {
                let wait = Duration::try_from(until.duration_since(now)).unwrap_or_default();
                return Ok(Next::After(wait));
            }
            Verdict::Shut(write) => return self.say(&key, &facts, &write).await,
            Verdict::Conclude(write) => {
                let next = self.say(&key, &facts, &write).await?;
                if next == Next::Change {
                    self.context.events.warning(reference(&key, &facts.uid), "WarmupFailed", write.message.clone());
                    self.metrics.ended(&key.namespace, Counted::of(write.reason), 0, None);
                }
                return Ok(next);
            }
            Verdict::Warm(job) => {
                let held = Held {
                    uid: facts.uid.clone(),
                    containers: job.attempt.containers.clone(),
                    address: job.address,
                    cancel: CancellationToken::new(),
                };
                self.jobs().insert(key.clone(), held.clone());
                let hand = LetGo { agent: Arc::clone(&self), key: key.clone() };
                self.context.tasks.spawn(async move { job::run(&hand.agent, &hand.key, &held, *job).await });
                // It may have changed between the look and the hand.
                self.in_hand(&key);
            }
        }
        Ok(Next::Change)
    }

    /// A decision that is a write: bound to the version it was made on.
    async fn say(&self, key: &Key, facts: &Facts, write: &Write) -> Result<Next, WriteError> {
        match self.write(key, facts, write, true).await? {
            Outcome::Done(_) => {
                info!(pod = %key, reason = %write.reason, message = write.message, "warm-up condition written");
                Ok(Next::Change)
            }
            Outcome::Gone => Ok(Next::Change),
            // What it conflicted with comes by the watch, and with it the next look.
            _ => Ok(Next::After(Duration::from_secs(1))),
        }
    }

    /// One write of condition and annotation, remembered so that nothing older is decided on.
    pub(super) async fn write(
        &self,
        key: &Key,
        facts: &Facts,
        write: &Write,
        same_version: bool,
    ) -> Result<Outcome, WriteError> {
        let seen = facts.seen();
        let open_now = seen.condition().map(|condition| condition.status == "True");
        let version = same_version.then_some(facts.version.as_str());
        let patch = write.patch(&facts.uid, version, open_now, (self.context.clock)());
        let target = apply::pod(&key.namespace, &key.name, &facts.uid);
        let outcome = self.context.writer.write(Feature::Warmup, &target, &Change::StatusPatch(patch)).await?;
        if let Outcome::Done(Some(version)) = &outcome
            && let Ok(version) = version.parse()
        {
            self.written().insert(key.clone(), (facts.uid.clone(), version));
        }
        Ok(outcome)
    }

    /// Whether the cache has caught up with our own last write.
    pub(super) fn is_fresh(&self, key: &Key, facts: &Facts) -> bool {
        let mut written = self.written();
        let Some((uid, version)) = written.get(key) else { return true };
        let behind = *uid == facts.uid && facts.version.parse().is_ok_and(|seen: u64| seen < *version);
        if !behind {
            written.remove(key);
        }
        !behind
    }

    /// Waits until nothing is under way any more.
    async fn drained(&self) {
        while !self.jobs().is_empty() {
            sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Ends warm-ups whose pods are no more at once, whether or not this agent may write: requests to an address that somebody
/// else has by now are the worst it could do.
async fn watch_over(agent: Arc<Agent>) {
    let changes = agent.cache.subscribe();
    loop {
        agent.in_hand(&changes.next().await);
    }
}

/// Lets the last writes out before the lease is given back.
async fn drain(agent: Arc<Agent>, stopping: CancellationToken, lease: CancellationToken) {
    stopping.cancelled().await;
    let _ = timeout(CALL, agent.drained()).await;
    lease.cancel();
}
