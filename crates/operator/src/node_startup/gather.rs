//! From what the API server sends to the facts a decision looks at.
//!
//! ```text
//! nodes ───────► NodeFacts ─────────────┐
//! DaemonSets ──► DaemonSetFacts ────────┼──► World::seen(node)
//! pods ────────► DaemonPod, by node ────┘
//! ```

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use groundcrew_core::node_startup::facts::{annotated_ready, reports_ready};
use groundcrew_core::node_startup::{DaemonPod, DaemonSetFacts, Named, NodeFacts, Seen, Taint, counts_as_user_pod};
use groundcrew_core::selector::Labels;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use kube::api::ObjectMeta;
use serde::{Deserialize, Serialize};

use crate::runtime::cache::{Cache, Key};

/// What is decoded of a node.
#[derive(Clone, Debug, Serialize, Deserialize, kube::Resource)]
#[resource(inherit = k8s_openapi::api::core::v1::Node)]
pub struct Node {
    metadata: ObjectMeta,
    #[serde(default)]
    spec: Option<NodeSpec>,
    #[serde(default)]
    status: Option<Conditions>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct NodeSpec {
    #[serde(default)]
    taints: Option<Vec<Taint>>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Conditions {
    #[serde(default)]
    conditions: Option<Vec<Condition>>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Condition {
    #[serde(rename = "type")]
    type_: String,
    status: String,
}

/// A longer annotation is somebody's data, not a sign; the key stays, the value is not kept.
const LONGEST_ANNOTATION: usize = 256;

fn created(metadata: &ObjectMeta) -> Timestamp {
    metadata.creation_timestamp.as_ref().map_or(Timestamp::MAX, |time| time.0)
}

pub fn node(node: Node) -> Option<NodeFacts> {
    let created = created(&node.metadata);
    let ObjectMeta { name, uid, labels, annotations, deletion_timestamp, .. } = node.metadata;
    let mut annotations = annotations.unwrap_or_default();
    for value in annotations.values_mut().filter(|value| value.len() > LONGEST_ANNOTATION) {
        *value = String::new();
    }
    let conditions = node.status.unwrap_or_default().conditions.unwrap_or_default();
    Some(NodeFacts {
        name: name?,
        uid: uid?,
        created,
        deleting: deletion_timestamp.is_some(),
        labels: labels.unwrap_or_default(),
        annotations,
        taints: node.spec.unwrap_or_default().taints.unwrap_or_default(),
        conditions: conditions.into_iter().map(|c| (c.type_, c.status)).collect(),
    })
}

/// What is decoded of a DaemonSet.
#[derive(Clone, Debug, Serialize, Deserialize, kube::Resource)]
#[resource(inherit = k8s_openapi::api::apps::v1::DaemonSet)]
pub struct DaemonSet {
    metadata: ObjectMeta,
    spec: DaemonSetSpec,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct DaemonSetSpec {
    template: PodTemplateSpec,
}

pub fn daemon_set(set: DaemonSet) -> Option<DaemonSetFacts> {
    let ObjectMeta { name, namespace, uid, deletion_timestamp, .. } = set.metadata;
    let named = Named::new(namespace?, name?);
    Some(DaemonSetFacts::of(named, uid?, deletion_timestamp.is_some(), &set.spec.template))
}

/// What is decoded of a pod.
#[derive(Clone, Debug, Serialize, Deserialize, kube::Resource)]
#[resource(inherit = k8s_openapi::api::core::v1::Pod)]
pub struct Pod {
    metadata: ObjectMeta,
    #[serde(default)]
    spec: Option<PodSpec>,
    #[serde(default)]
    status: Option<PodStatus>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodSpec {
    #[serde(default)]
    node_name: Option<String>,
    #[serde(default)]
    containers: Vec<Container>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Container {
    name: String,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodStatus {
    #[serde(default)]
    phase: Option<String>,
    #[serde(default)]
    container_statuses: Option<Vec<ContainerStatus>>,
    #[serde(default)]
    conditions: Option<Vec<Condition>>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct ContainerStatus {
    name: String,
    #[serde(default)]
    ready: bool,
}

/// What is kept of a pod that is bound to a node.
#[derive(Clone, Debug)]
pub struct PodFacts {
    pub node: String,
    /// `None`: somebody's own pod, which keeps its node from being idle.
    pub daemon: Option<DaemonPod>,
}

/// `user_pods`: whether anybody asks for those.
pub fn pod(pod: Pod, user_pods: bool, known: &Interned) -> Option<PodFacts> {
    let created = created(&pod.metadata);
    let ObjectMeta { name, namespace, labels, annotations, owner_references, deletion_timestamp, .. } = pod.metadata;
    let (spec, status) = (pod.spec.unwrap_or_default(), pod.status.unwrap_or_default());
    let node = spec.node_name.filter(|node| !node.is_empty())?;
    let (name, namespace) = (name?, namespace?);
    let finished = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
    let owner = owner_references.into_iter().flatten().find(|owner| owner.controller == Some(true));
    let Some(owner) = owner.as_ref().filter(|owner| owner.kind == "DaemonSet") else {
        let kind = owner.as_ref().map(|owner| owner.kind.as_str());
        let counts = user_pods && counts_as_user_pod(&namespace, kind, finished);
        return counts.then_some(PodFacts { node, daemon: None });
    };
    let containers: Vec<&str> = spec.containers.iter().map(|c| c.name.as_str()).collect();
    let reports: Vec<(&str, bool)> =
        status.container_statuses.iter().flatten().map(|c| (c.name.as_str(), c.ready)).collect();
    let pod_ready = status.conditions.iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
    let daemon = DaemonPod {
        named: Named::new(namespace, name),
        owner: owner.name.clone(),
        owner_uid: owner.uid.clone(),
        labels: known.same(labels.unwrap_or_default()),
        created,
        ending: finished || deletion_timestamp.is_some(),
        annotated: annotated_ready(&annotations),
        ready: reports_ready(&containers, &reports, pod_ready),
    };
    Some(PodFacts { node, daemon: Some(daemon) })
}

/// The pods of a DaemonSet all carry the same labels: kept once.
#[derive(Debug, Default)]
pub struct Interned(Mutex<HashSet<Arc<Labels>>>);

impl Interned {
    /// Beyond this, labels nobody uses any more are let go.
    const MANY: usize = 1024;

    fn same(&self, labels: Labels) -> Arc<Labels> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(same) = known.get(&labels) {
            return Arc::clone(same);
        }
        if known.len() >= Self::MANY {
            known.retain(|labels| Arc::strong_count(labels) > 1);
        }
        let labels = Arc::new(labels);
        known.insert(Arc::clone(&labels));
        labels
    }
}

/// Which pods are on which node.
#[derive(Debug, Default)]
pub struct ByNode(Mutex<(PodsOfNode, NodeOfPod)>);

type PodsOfNode = HashMap<String, HashSet<Key>>;
type NodeOfPod = HashMap<Key, String>;

impl ByNode {
    /// Notes where the pod is now; returns the nodes for which that is news.
    pub fn put(&self, pod: &Key, node: Option<&str>) -> Vec<String> {
        let (pods, nodes) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = match node {
            Some(node) => nodes.insert(pod.clone(), node.to_owned()),
            None => nodes.remove(pod),
        };
        if let Some(before) = before.as_ref().filter(|before| Some(before.as_str()) != node)
            && let Some(there) = pods.get_mut(before)
        {
            there.remove(pod);
            if there.is_empty() {
                pods.remove(before);
            }
        }
        if let Some(node) = node {
            pods.entry(node.to_owned()).or_default().insert(pod.clone());
        }
        let mut news: Vec<String> = before.into_iter().chain(node.map(str::to_owned)).collect();
        news.dedup();
        news
    }

    fn on(&self, node: &str) -> Vec<Key> {
        let (pods, _) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pods.get(node).into_iter().flatten().cloned().collect()
    }
}

/// The caches that decisions are made from.
#[derive(Debug)]
pub struct World {
    pub nodes: Arc<Cache<NodeFacts>>,
    pub daemon_sets: Arc<Cache<DaemonSetFacts>>,
    pub pods: Arc<Cache<PodFacts>>,
    pub by_node: ByNode,
}

/// One node's part of the world, owned, so that nothing is locked while a decision is made.
#[derive(Debug)]
pub struct Scene {
    daemon_sets: Arc<[DaemonSetFacts]>,
    pods: Vec<DaemonPod>,
    user_pods: bool,
}

impl Scene {
    #[must_use]
    pub fn seen<'a>(&'a self, node: &'a NodeFacts) -> Seen<'a> {
        Seen { node, daemon_sets: &self.daemon_sets, pods: &self.pods, user_pods: self.user_pods }
    }
}

impl World {
    /// All of the cluster, for one look or for many.
    #[must_use]
    pub fn daemon_sets(&self) -> Arc<[DaemonSetFacts]> {
        let mut sets = Vec::with_capacity(self.daemon_sets.len());
        self.daemon_sets.for_each(|_, set| sets.push((**set).clone()));
        sets.into()
    }

    #[must_use]
    pub fn around(&self, node: &str, daemon_sets: &Arc<[DaemonSetFacts]>) -> Scene {
        let here: Vec<Arc<PodFacts>> = self.by_node.on(node).iter().filter_map(|key| self.pods.get(key)).collect();
        let here: Vec<Arc<PodFacts>> = here.into_iter().filter(|pod| pod.node == node).collect();
        Scene {
            daemon_sets: Arc::clone(daemon_sets),
            user_pods: here.iter().any(|pod| pod.daemon.is_none()),
            pods: here.iter().filter_map(|pod| pod.daemon.clone()).collect(),
        }
    }
}
