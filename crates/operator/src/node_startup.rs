//! `node_startup`: nodes are born with a taint and lose it when their init pods are ready.
//!
//! ```text
//! nodes, pods, DaemonSets, rules ──► caches ──keys──► reconcile: gather → decide → apply     (leader)
//!                                       └──────────► survey: counts, guard, status          (every few seconds)
//! engine: policies or webhook entry, never both
//! ```

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use groundcrew_core::config::{self, Config, Engine};
use groundcrew_core::feature::Feature;
use groundcrew_core::node_startup::report::{Announcement, Reason, announce};
use groundcrew_core::node_startup::{
    DaemonSetFacts, Decision, NodeFacts, Released, Rule, Rules, Verdict, decide, held_since,
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{self as api, ObjectReference};
use k8s_openapi::api::rbac::v1::PolicyRule;
use kube::CustomResourceExt;
use kube::api::Api;
use kube::core::DeserializeGuard;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tracing::{debug, info};

use crate::admission::registration::{Entry, FailurePolicy, Kind, Namespaces, Rule as Requests};
use crate::features::Row;
use crate::manifests::rule;
use crate::run::Context;
use crate::runtime::apply::{self, Outcome, Target, Write, WriteError};
use crate::runtime::cache::{self, Cache, Changes, Key};
use crate::runtime::queue::{Next, Queue};

pub mod admission;
pub mod cleanup;
pub mod crd;
pub mod engine;
pub mod gather;
mod heard;
mod metrics;
mod record;
mod rules;
mod survey;

use crd::NodeStartupRule;
use gather::{ByNode, Interned, World};
use heard::Heard;
use metrics::Metrics;
use record::Record;

pub const ROW: Row = Row {
    feature: Feature::NodeStartup,
    enabled: |config| config.node_startup.enabled,
    permissions,
    own_permissions: Vec::new,
    entries,
    crds: || vec![NodeStartupRule::crd()],
    admission: |_, _| None,
    objects: |_, _, _| Vec::new(),
    start,
};

/// Beyond what [`cleanup`] may do at any time.
fn permissions(_: &Config) -> Vec<PolicyRule> {
    let policies = ["mutatingadmissionpolicies", "mutatingadmissionpolicybindings"];
    vec![
        rule("", &["nodes"], &["get", "watch"], &[]),
        rule("", &["pods"], &["list", "watch"], &[]),
        rule("apps", &["daemonsets"], &["list", "watch"], &[]),
        rule("groundcrew.io", &["nodestartuprules"], &["watch"], &[]),
        rule("groundcrew.io", &["nodestartuprules/status"], &["patch"], &[]),
        // Their names follow the rules' names, which nobody knows beforehand.
        rule("admissionregistration.k8s.io", &policies, &["create", "patch"], &[]),
    ]
}

/// Without the node webhook where the engine is found out later.
fn entries(config: &Config, namespaces: &Namespaces) -> Vec<Entry> {
    let feature = &config.node_startup;
    let node = (feature.engine == Engine::Webhook).then(|| node_entry(config));
    node.into_iter().chain(feature.deny_untolerated.then(|| pod_entry(namespaces.clone()))).collect()
}

fn requests(resource: &'static str, scope: &'static str) -> Vec<Requests> {
    let (groups, versions) = (vec![""], vec!["v1"]);
    vec![Requests { groups, versions, resources: vec![resource], operations: vec!["CREATE"], scope }]
}

pub(crate) fn node_entry(config: &Config) -> Entry {
    Entry {
        feature: Feature::NodeStartup.name(),
        kind: Kind::Mutating,
        path: "/mutate-node",
        rules: requests("nodes", "Cluster"),
        condition: None,
        namespaces: Namespaces::All,
        objects: None,
        failure_policy: match config.node_startup.failure_policy {
            config::FailurePolicy::Fail => FailurePolicy::Fail,
            config::FailurePolicy::Ignore => FailurePolicy::Ignore,
        },
    }
}

fn pod_entry(namespaces: Namespaces) -> Entry {
    Entry {
        feature: Feature::NodeStartup.name(),
        kind: Kind::Validating,
        path: "/validate",
        rules: requests("pods", "Namespaced"),
        condition: Some("has(object.spec.nodeName) && object.spec.nodeName != ''".to_owned()),
        namespaces,
        objects: None,
        failure_policy: FailurePolicy::Ignore,
    }
}

/// The operator must come up on held nodes. Rules of the cluster's own come later, so their keys have to be told: to
/// tolerate everything would put it on cordoned, dedicated and virtual nodes as well.
#[must_use]
pub fn tolerations(config: &Config) -> Vec<api::Toleration> {
    let tolerate = |key: &str| api::Toleration {
        key: Some(key.to_owned()),
        operator: Some("Exists".to_owned()),
        ..api::Toleration::default()
    };
    config.node_startup.tolerated_keys().map(tolerate).collect()
}

/// What admission, the controller and the survey share.
#[derive(Debug)]
pub struct Shared {
    world: World,
    rules: ArcSwap<Rules>,
    record: Record,
    cluster_rules: Arc<Cache<NodeStartupRule>>,
    /// Whether the rules of the cluster's own are known; counts up when they or the guards change.
    version: watch::Sender<Option<u64>>,
    /// Nodes to look at again.
    changes: Arc<Changes>,
    heard: Arc<Heard>,
    /// When it was last said of a node and rule that it is held.
    told: Mutex<HashMap<(String, String), Timestamp>>,
}

impl Shared {
    #[must_use]
    pub fn new(config: &Config) -> Arc<Self> {
        Arc::new(Self {
            world: World {
                nodes: Cache::new("nodes that may start up"),
                daemon_sets: Cache::new("DaemonSets that nodes wait for"),
                pods: Cache::new("pods that nodes wait for"),
                by_node: ByNode::default(),
            },
            rules: ArcSwap::from_pointee(config.node_startup.rules()),
            record: Record::default(),
            cluster_rules: Cache::new("NodeStartupRules"),
            version: watch::Sender::new(None),
            changes: Arc::default(),
            heard: Arc::default(),
            told: Mutex::default(),
        })
    }

    fn rules(&self) -> Arc<Rules> {
        self.rules.load_full()
    }

    fn rules_known(&self) -> bool {
        self.version.borrow().is_some()
    }

    fn news(&self) {
        self.version.send_modify(|version| *version = Some(version.unwrap_or_default() + 1));
    }

    /// What a node waits for changes a few times in its first seconds; once is enough for those.
    fn may_tell(&self, node: &NodeFacts, rule: &Rule, reason: Reason, now: Timestamp) -> bool {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (node.uid.clone(), rule.name.clone());
        if reason == Reason::Completed {
            told.remove(&key);
        }
        if reason != Reason::Held {
            return true;
        }
        if told.len() >= TOLD {
            told.clear();
        }
        let fresh = told.get(&key).is_none_or(|last| now.duration_since(*last).as_secs() >= HELD_AGAIN);
        if fresh {
            told.insert(key, now);
        }
        fresh
    }

    /// Every node that some rule may have to do with.
    fn mark_all(&self) {
        self.world.nodes.for_each(|key, _| self.changes.mark(key.clone()));
    }
}

fn start(context: &Context, registry: &mut Registry) {
    let shared = Arc::clone(&context.node_startup);
    let metrics = Metrics::register(registry);
    follow(context, &shared);
    rules::start(context, &shared);
    engine::start(context, &shared, metrics.clone());
    survey::start(context, &shared, metrics.clone());
    let queue = context.queue(Feature::NodeStartup);
    let queue = Queue { workers: queue.workers.max(AT_ONCE), ..queue };
    let (context, changes) = (context.clone(), Arc::clone(&shared.changes));
    context.tasks.clone().spawn(queue.run(changes, move |key| {
        let (shared, context, metrics) = (Arc::clone(&shared), context.clone(), metrics.clone());
        async move { reconcile(&key, &shared, &context, &metrics).await }
    }));
}

/// Fills the caches and turns their changes into nodes to look at.
fn follow(context: &Context, shared: &Arc<Shared>) {
    let World { nodes, daemon_sets, pods, .. } = &shared.world;
    let client = &context.clients.watch;
    let (node_changes, set_changes, pod_changes) = (nodes.subscribe(), daemon_sets.subscribe(), pods.subscribe());
    let api: Api<DeserializeGuard<gather::Node>> = Api::all(client.clone());
    let heard = Arc::clone(&shared.heard);
    let project = move |node| gather::node(node).inspect(|facts| heard.note(&facts.name));
    context.follow(nodes, cache::fill(Arc::clone(nodes), api, context.feed(), project));
    let api: Api<DeserializeGuard<gather::DaemonSet>> = Api::all(client.clone());
    context.follow(daemon_sets, cache::fill(Arc::clone(daemon_sets), api, context.feed(), gather::daemon_set));
    let api: Api<DeserializeGuard<gather::Pod>> = Api::all(client.clone());
    let (user_pods, interned) = (context.config.node_startup.backfill, Interned::default());
    let heard = Arc::clone(&shared.heard);
    let project = move |pod| {
        gather::pod(pod, user_pods, &interned).inspect(|facts| {
            if facts.daemon.is_some() {
                heard.note(&facts.node);
            }
        })
    };
    context.follow(pods, cache::fill(Arc::clone(pods), api, context.feed(), project));

    let shared = Arc::clone(shared);
    context.tasks.spawn(context.stopping.clone().run_until_cancelled_owned(async move {
        let mut known: HashMap<Key, Arc<DaemonSetFacts>> = HashMap::new();
        loop {
            tokio::select! {
                node = node_changes.next() => shared.changes.mark(node),
                set = set_changes.next() => {
                    // Its status changes with every pod it gets; only its template concerns all nodes.
                    let now = shared.world.daemon_sets.get(&set);
                    let before = match &now {
                        Some(now) => known.insert(set, Arc::clone(now)),
                        None => known.remove(&set),
                    };
                    if before != now {
                        shared.mark_all();
                    }
                }
                pod = pod_changes.next() => {
                    let facts = shared.world.pods.get(&pod);
                    for name in shared.world.by_node.put(&pod, facts.as_ref().map(|facts| facts.node.as_str())) {
                        shared.changes.mark(Key { namespace: String::new(), name });
                    }
                }
            }
        }
    }));
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("the node could not be written: {0}")]
    Write(#[from] WriteError),
    #[error("the node could not be read: {0}")]
    Read(#[from] kube::Error),
    #[error("the node could not be read in time")]
    ReadTimeout,
    #[error("the node's taints keep changing")]
    Contended,
}

/// Seconds between two events that say what a node waits for.
const HELD_AGAIN: i64 = 30;
/// Nodes and rules remembered for that.
const TOLD: usize = 20_000;
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// A release is one small write, and nodes become ready in bursts: none should wait for a few others.
const AT_ONCE: usize = 32;
/// Without leadership, or without all caches, a node is looked at again this soon.
const SOON: Duration = Duration::from_secs(1);

/// Gather, decide, apply.
async fn reconcile(key: &Key, shared: &Arc<Shared>, context: &Context, metrics: &Metrics) -> Result<Next, Error> {
    let heard = shared.heard.take(&key.name);
    let World { nodes, daemon_sets, pods, .. } = &shared.world;
    let synced = *nodes.synced().borrow() && *daemon_sets.synced().borrow() && *pods.synced().borrow();
    if !synced || !shared.rules_known() {
        return Ok(Next::After(SOON));
    }
    let Some(node) = nodes.get(key) else { return Ok(Next::Change) };
    if !shared.rules().concern(&node.taints) {
        return Ok(Next::Change);
    }
    let act = |node: NodeFacts| async move { act(&node, heard, shared, context, metrics).await };
    let outcome = apply::settle((*node).clone(), act, || read(&key.name, context)).await?;
    match outcome {
        Some(Outcome::Conflict) => Err(Error::Contended),
        Some(Outcome::NotLeader) => Ok(Next::After(SOON)),
        _ => Ok(next_look(key, shared, context)),
    }
}

/// When a deadline of the node comes.
fn next_look(key: &Key, shared: &Shared, context: &Context) -> Next {
    let Some(node) = shared.world.nodes.get(key) else { return Next::Change };
    let now = (context.clock)();
    let scene = shared.world.around(&node.name);
    let rules = shared.rules();
    let until = decide(&rules, &scene.seen(&node), now).next();
    until.map_or(Next::Change, |until| {
        let wait = Duration::try_from(until.duration_since(now)).unwrap_or_default();
        // A little later than the deadline, which is counted in whole seconds by others.
        Next::After(wait + Duration::from_millis(10))
    })
}

/// `None` when there is nothing to write.
async fn act(
    node: &NodeFacts,
    heard: Option<Instant>,
    shared: &Shared,
    context: &Context,
    metrics: &Metrics,
) -> Result<Option<Outcome>, Error> {
    let now = (context.clock)();
    let rules = shared.rules();
    let scene = shared.world.around(&node.name);
    let decision = decide(&rules, &scene.seen(node), now);
    let Some(patch) = decision.patch(node, now) else {
        tell(node, &decision, shared, context);
        return Ok(None);
    };
    let target = Target::of::<api::Node>(None, &node.name, &node.uid);
    let outcome = context.writer.write(Feature::NodeStartup, &target, &Write::Json(patch)).await?;
    debug!(node = node.name, ?outcome, "written");
    if let Outcome::Done(_) = outcome {
        tell(node, &decision, shared, context);
        for (rule, verdict) in &decision.verdicts {
            done(node, rule, verdict, heard, context, metrics);
        }
    }
    Ok(Some(outcome))
}

fn done(
    node: &NodeFacts,
    rule: &Rule,
    verdict: &Verdict,
    heard: Option<Instant>,
    context: &Context,
    metrics: &Metrics,
) {
    let now = (context.clock)();
    match verdict {
        Verdict::Release(_) => {
            let held = Duration::try_from(now.duration_since(held_since(rule, node))).unwrap_or_default();
            // A deadline is no event: what it ends was heard of long before.
            let followed = heard.filter(|_| *verdict == Verdict::Release(Released::Ready)).map(|at| at.elapsed());
            metrics.released(&rule.name, verdict, held, followed);
            let release_ms = followed.map(|after| after.as_secs_f64() * 1000.0);
            let (node, rule, taint) = (&node.name, &rule.name, &rule.taint);
            info!(node, rule, %taint, why = %verdict, release_ms, "Removed startup taint");
        }
        Verdict::Taint => {
            info!(node = node.name, rule = rule.name, taint = %rule.taint, why = %verdict, "Adding startup taint");
        }
        _ => {}
    }
}

/// Events; the sender leaves out what it has said already.
fn tell(node: &NodeFacts, decision: &Decision<'_>, shared: &Shared, context: &Context) {
    for (rule, verdict) in &decision.verdicts {
        let Some(Announcement { reason, note }) = announce(rule, node, verdict, (context.clock)()) else { continue };
        if !shared.may_tell(node, rule, reason, (context.clock)()) {
            continue;
        }
        let regarding = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(node.name.clone()),
            uid: Some(node.uid.clone()),
            ..ObjectReference::default()
        };
        match reason.is_warning() {
            true => context.events.warning(regarding, reason.name(), note),
            false => context.events.normal(regarding, reason.name(), note),
        }
    }
}

async fn read(name: &str, context: &Context) -> Result<Option<NodeFacts>, Error> {
    let nodes: Api<gather::Node> = Api::all(context.clients.read.clone());
    let node = timeout(READ_TIMEOUT, nodes.get_opt(name)).await.map_err(|_| Error::ReadTimeout)??;
    Ok(node.and_then(gather::node))
}

#[cfg(test)]
mod tests;
