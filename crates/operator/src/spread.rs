//! `spread`: the class of new pods in the admission patch, and moves by the leader.
//!
//! ```text
//! Deployments, StatefulSets ─┐              ┌─► admission: place ─► reservation ─► patch
//! ReplicaSets ─► pods ───────┼─► Shared ────┤
//! nodes, budgets, namespaces ┘              └─► rebalance: gather ─► decide ─► read anew ─► decide ─► remember ─► evict
//! ```

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use groundcrew_core::config::{Config, NodeLabels, SpreadFeature};
use groundcrew_core::feature::Feature;
use groundcrew_core::selector::Selector;
use groundcrew_core::spread::node::Node as NodeFacts;
use groundcrew_core::spread::{Class, Kind, Rule, node, rule};
use kube::api::Api;
use kube::core::DeserializeGuard;
use prometheus_client::registry::Registry;

use crate::admission::registration::{Entry, Namespaces};
use crate::features::Row;
use crate::manifests::{self, SPREAD_MEMORY};
use crate::run::Context;
use crate::runtime::cache::{self, Cache, Changes, Feed, Key};

mod admission;
mod fresh;
mod gather;
mod index;
mod memory;
mod metrics;
mod objects;
mod rebalance;
mod tell;
mod turns;
mod validate;

use index::Index;
use memory::Memories;
use metrics::Metrics;
pub use validate::RuleReader;

use objects::{BudgetFacts, NamespaceFacts, Owner, PodFacts, ReplicaSetFacts, WorkloadFacts};

pub const ROW: Row = Row {
    feature: Feature::Spread,
    enabled: |config| config.spread.enabled,
    permissions: |config| {
        let (read, follow) = (&["get", "list", "watch"], &["list", "watch"]);
        let mut rules = vec![
            manifests::rule("apps", &["deployments", "statefulsets"], read, &[]),
            manifests::rule("apps", &["replicasets"], follow, &[]),
            manifests::rule("", &["nodes"], read, &[]),
            manifests::rule("", &["pods", "namespaces"], follow, &[]),
            manifests::rule("policy", &["poddisruptionbudgets"], follow, &[]),
        ];
        if enforces(&config.spread) {
            rules.push(manifests::rule("", &["pods"], &["patch"], &[]));
            rules.push(manifests::rule("", &["pods/eviction"], &["create"], &[]));
        }
        rules
    },
    own_permissions: || vec![manifests::rule("", &["configmaps"], &["list", "watch", "patch"], &[SPREAD_MEMORY])],
    entries: |_, namespaces| vec![entry(namespaces.clone()), validate::entry(namespaces.clone())],
    crds: Vec::new,
    objects: |_, _, _| Vec::new(),
    admission: |context, registry| {
        context.spread.follow(context, registry);
        Some(Box::new(admission::Placer(Arc::clone(&context.spread))))
    },
    start,
};

fn enforces(config: &SpreadFeature) -> bool {
    config.mode == groundcrew_core::config::SpreadMode::Enforce
}

/// A pod does not tell whether its workload opted in, so each pod of a ReplicaSet or StatefulSet is sent.
fn entry(namespaces: Namespaces) -> Entry {
    let condition = "has(object.metadata.ownerReferences) && object.metadata.ownerReferences.exists(o, \
                     has(o.controller) && o.controller && o.apiVersion.startsWith('apps/') && \
                     o.kind in ['ReplicaSet', 'StatefulSet'])";
    Entry::pod_created(Feature::Spread, condition, namespaces)
}

/// What admission and the rebalancer look at together.
#[derive(Debug)]
pub struct Shared {
    config: SpreadFeature,
    names: NodeLabels,
    selector: Selector,
    deployments: Arc<Cache<WorkloadFacts>>,
    stateful_sets: Arc<Cache<WorkloadFacts>>,
    replica_sets: Arc<Cache<ReplicaSetFacts>>,
    pods: Arc<Cache<PodFacts>>,
    nodes: Arc<Cache<NodeFacts>>,
    budgets: Arc<Cache<BudgetFacts>>,
    namespaces: Arc<Cache<NamespaceFacts>>,
    index: Index,
    memories: Memories,
    metrics: Metrics,
    /// Workloads to look at; their names carry the kind.
    dirty: Arc<Changes>,
    followed: AtomicBool,
    room: Mutex<gather::Room>,
}

impl Shared {
    #[must_use]
    pub fn new(config: &Config) -> Arc<Self> {
        // A selector that makes no sense was refused with the rest of the configuration.
        let selector = config.controller.namespace_selector.as_ref().and_then(|s| Selector::parse(s).ok());
        Arc::new(Self {
            config: config.spread.clone(),
            names: config.node_labels.clone(),
            selector: selector.unwrap_or_default(),
            deployments: Cache::new("deployments to split"),
            stateful_sets: Cache::new("stateful sets to split"),
            replica_sets: Cache::new("replica sets"),
            pods: Cache::new("pods to split"),
            nodes: Cache::new("nodes by class"),
            budgets: Cache::new("disruption budgets"),
            namespaces: Cache::new("namespaces to split in"),
            index: Index::default(),
            memories: Memories::default(),
            metrics: Metrics::default(),
            dirty: Arc::default(),
            followed: AtomicBool::new(false),
            room: Mutex::default(),
        })
    }

    /// Keeps the caches filled and shows the metrics; the second call changes nothing.
    fn follow(self: &Arc<Self>, context: &Context, registry: &mut Registry) {
        if self.followed.swap(true, Ordering::SeqCst) {
            return;
        }
        self.metrics.register(registry);
        self.metrics.follow_leadership(context);
        // Before anything is filled, so that no key is missed.
        self.relay(context);
        let client = &context.clients.watch;
        let names = || self.names.clone();
        macro_rules! fill {
            ($cache:ident, $kind:ty, $feed:expr, $project:expr) => {
                let api: Api<DeserializeGuard<$kind>> = Api::all(client.clone());
                context.follow(&self.$cache, cache::fill(Arc::clone(&self.$cache), api, $feed, $project));
            };
        }
        let own = names();
        fill!(deployments, objects::Deployment, context.feed(), move |o: objects::Deployment| {
            objects::workload(Kind::Deployment, o.metadata, o.spec, o.status, &own)
        });
        let own = names();
        fill!(stateful_sets, objects::StatefulSet, context.feed(), move |o: objects::StatefulSet| {
            objects::workload(Kind::StatefulSet, o.metadata, o.spec, o.status, &own)
        });
        fill!(replica_sets, objects::ReplicaSet, context.feed(), objects::replica_set);
        let own = names();
        fill!(pods, objects::Pod, context.feed(), move |o| objects::pod(o, &own));
        fill!(nodes, objects::Node, context.feed(), |o| Some(objects::node(o)));
        fill!(budgets, objects::Budget, context.feed(), objects::budget);
        let selector = self.selector.clone();
        fill!(namespaces, objects::Namespace, context.feed(), move |o| objects::namespace(&o, &selector));
        self.memories
            .follow(context, Feed { fields: Some(format!("metadata.name={SPREAD_MEMORY}")), ..context.feed() });
    }

    /// Turns what changed into the workloads it concerns.
    fn relay(self: &Arc<Self>, context: &Context) {
        let spawn = |task: std::pin::Pin<Box<dyn Future<Output = ()> + Send>>| {
            context.tasks.spawn(context.stopping.clone().run_until_cancelled_owned(task));
        };
        for (kind, cache) in [(Kind::Deployment, &self.deployments), (Kind::StatefulSet, &self.stateful_sets)] {
            let (changes, dirty) = (cache.subscribe(), Arc::clone(&self.dirty));
            spawn(Box::pin(async move {
                loop {
                    dirty.mark(tagged(kind, changes.next().await));
                }
            }));
        }
        let (changes, shared) = (self.pods.subscribe(), Arc::clone(self));
        spawn(Box::pin(async move {
            loop {
                let key = changes.next().await;
                for owner in shared.index.update(&key, shared.pods.get(&key)) {
                    shared.mark_owner(&key.namespace, &owner);
                }
            }
        }));
        let (changes, shared) = (self.nodes.subscribe(), Arc::clone(self));
        spawn(Box::pin(shared.relay_nodes(changes)));
        let of_namespace: [(Arc<Changes>, Namespaced); 2] =
            [(self.budgets.subscribe(), |key| key.namespace), (self.namespaces.subscribe(), |key| key.name)];
        for (changes, namespace) in of_namespace {
            let shared = Arc::clone(self);
            spawn(Box::pin(async move {
                loop {
                    let namespace = namespace(changes.next().await);
                    shared.mark_all(|key| key.namespace == namespace);
                }
            }));
        }
    }

    /// Heartbeats concern nobody; a node that changes its kind or its mind concerns all.
    async fn relay_nodes(self: Arc<Self>, changes: Arc<Changes>) {
        let mut known = std::collections::HashMap::new();
        loop {
            let key = changes.next().await;
            let node = self.nodes.get(&key);
            let now = node.map(|n| (node::class_of(&n.labels, &self.names), n.is_leaving(), n.ready, n.taints.clone()));
            if now != known.get(&key).cloned() {
                match now {
                    Some(now) => known.insert(key, now),
                    None => known.remove(&key),
                };
                self.mark_all(|_| true);
            }
        }
    }

    fn mark_all(&self, concerned: impl Fn(&Key) -> bool) {
        for (kind, cache) in [(Kind::Deployment, &self.deployments), (Kind::StatefulSet, &self.stateful_sets)] {
            cache.for_each(|key, _| {
                if concerned(key) {
                    self.dirty.mark(tagged(kind, key.clone()));
                }
            });
        }
    }

    fn mark_owner(&self, namespace: &str, owner: &Owner) {
        let own = Key { namespace: namespace.to_owned(), name: owner.name.clone() };
        if owner.stateful {
            if self.stateful_sets.get(&own).is_some() {
                self.dirty.mark(tagged(Kind::StatefulSet, own));
            }
        } else if let Some(set) = self.replica_sets.get(&own) {
            let key = Key { name: set.deployment.clone(), ..own };
            if self.deployments.get(&key).is_some() {
                self.dirty.mark(tagged(Kind::Deployment, key));
            }
        }
    }

    fn workload(&self, kind: Kind, key: &Key) -> Option<Arc<WorkloadFacts>> {
        match kind {
            Kind::Deployment => self.deployments.get(key),
            Kind::StatefulSet => self.stateful_sets.get(key),
        }
    }

    /// The workload's rule with its namespace's window; `None` where it is not for us.
    fn rule(&self, namespace: &str, facts: &WorkloadFacts) -> Result<Option<Rule>, rule::Invalid> {
        let key = Key { namespace: String::new(), name: namespace.to_owned() };
        let Some(around) = self.namespaces.get(&key) else { return Ok(None) };
        let Some(mut rule) = facts.rule.clone()? else { return Ok(None) };
        if rule.window.is_none() {
            rule.window = around.window.clone()?;
        }
        Ok(Some(rule))
    }

    /// Where a pod counts, and whether it is about to leave.
    fn standing(&self, pod: &PodFacts) -> (Class, bool) {
        let given = pod.assigned.unwrap_or(Class::OnDemand);
        let Some(name) = &pod.node else { return (given, false) };
        let key = Key { namespace: String::new(), name: name.clone() };
        // A node that is gone takes its pods along.
        self.nodes.get(&key).map_or((given, true), |n| (node::class_of(&n.labels, &self.names), n.is_leaving()))
    }
}

/// Finds the namespace that a changed object concerns.
type Namespaced = fn(Key) -> String;

const SEPARATOR: char = '/';

fn tagged(kind: Kind, key: Key) -> Key {
    Key { name: format!("{}{SEPARATOR}{}", kind.name(), key.name), ..key }
}

fn untagged(key: &Key) -> Option<(Kind, Key)> {
    let (kind, name) = key.name.split_once(SEPARATOR)?;
    let kind = [Kind::Deployment, Kind::StatefulSet].into_iter().find(|k| k.name() == kind)?;
    Some((kind, Key { namespace: key.namespace.clone(), name: name.to_owned() }))
}

fn start(context: &Context, registry: &mut Registry) {
    let shared = Arc::clone(&context.spread);
    shared.follow(context, registry);
    let rebalancer = Arc::new(rebalance::Rebalancer::new(context));
    let dirty = Arc::clone(&shared.dirty);
    let queue = context.queue(Feature::Spread);
    context.tasks.spawn(queue.run(dirty, move |key| {
        let rebalancer = Arc::clone(&rebalancer);
        async move { rebalancer.reconcile(&key).await }
    }));
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A read that takes longer makes a snapshot too old to act on.
const READ_TIMEOUT: Duration = Duration::from_secs(2);
