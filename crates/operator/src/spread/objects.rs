//! What is decoded of the cluster's objects, and what is kept of them.

use std::collections::BTreeMap;

use groundcrew_core::config::NodeLabels;
use groundcrew_core::keys::{self, Lookup};
use groundcrew_core::selector::Selector;
use groundcrew_core::spread::node::{self, Amount, Needs, Taint};
use groundcrew_core::spread::rebalance::Workload as Standing;
use groundcrew_core::spread::{Class, Kind, Rule, place, rule};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodSpec as FullPodSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::api::ObjectMeta;
use serde::{Deserialize, Serialize};

type Map = BTreeMap<String, String>;

/// One decoded kind: the fields that are read and nothing else.
macro_rules! decoded {
    ($name:ident, $kind:path, $spec:ty, $status:ty) => {
        #[derive(Clone, Debug, Serialize, Deserialize, kube::Resource)]
        #[resource(inherit = $kind)]
        pub struct $name {
            pub metadata: ObjectMeta,
            #[serde(default)]
            pub spec: Option<$spec>,
            #[serde(default)]
            pub status: Option<$status>,
        }
    };
}

decoded!(Deployment, k8s_openapi::api::apps::v1::Deployment, WorkloadSpec, WorkloadStatus);
decoded!(StatefulSet, k8s_openapi::api::apps::v1::StatefulSet, WorkloadSpec, WorkloadStatus);
decoded!(ReplicaSet, k8s_openapi::api::apps::v1::ReplicaSet, ReplicaSetSpec, Nothing);
decoded!(Pod, k8s_openapi::api::core::v1::Pod, PodSpec, PodStatus);
decoded!(Node, k8s_openapi::api::core::v1::Node, NodeSpec, NodeStatus);
decoded!(Budget, k8s_openapi::api::policy::v1::PodDisruptionBudget, BudgetSpec, BudgetStatus);
decoded!(Namespace, k8s_openapi::api::core::v1::Namespace, Nothing, Nothing);

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Nothing {}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct WorkloadSpec {
    replicas: Option<i32>,
    paused: bool,
    ordinals: Option<Ordinals>,
    pub selector: LabelSelector,
    template: Template,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Ordinals {
    start: u32,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Template {
    metadata: Option<ObjectMeta>,
    spec: Option<FullPodSpec>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct WorkloadStatus {
    observed_generation: i64,
    replicas: u32,
    ready_replicas: u32,
    updated_replicas: u32,
    available_replicas: u32,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ReplicaSetSpec {
    replicas: Option<u32>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodSpec {
    node_name: Option<String>,
    node_selector: Option<Map>,
    containers: Vec<Container>,
    init_containers: Option<Vec<Container>>,
    resources: Option<Resources>,
    overhead: Option<Map>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Container {
    restart_policy: Option<String>,
    resources: Option<Resources>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Resources {
    requests: Option<Map>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PodStatus {
    phase: Option<String>,
    conditions: Option<Vec<Condition>>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Condition {
    #[serde(rename = "type")]
    type_: String,
    status: String,
    reason: Option<String>,
    last_transition_time: Option<Timestamp>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeSpec {
    unschedulable: bool,
    taints: Option<Vec<NodeTaint>>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct NodeTaint {
    key: String,
    value: Option<String>,
    effect: String,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    allocatable: Option<Map>,
    conditions: Option<Vec<Condition>>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct BudgetSpec {
    selector: Option<LabelSelector>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct BudgetStatus {
    observed_generation: i64,
    disruptions_allowed: i32,
}

/// A workload that opted in.
#[derive(Clone, Debug)]
pub struct WorkloadFacts {
    pub uid: String,
    /// Its own window only; the namespace's is added where it is used.
    pub rule: Result<Option<Rule>, rule::Invalid>,
    pub standing: Standing,
    pub needs: Needs,
    pub template_labels: Map,
    pub selector: LabelSelector,
}

pub fn workload(
    kind: Kind,
    meta: ObjectMeta,
    spec: Option<WorkloadSpec>,
    status: Option<WorkloadStatus>,
    names: &NodeLabels,
) -> Option<WorkloadFacts> {
    if !rule::enabled(&meta.annotations, &meta.labels) {
        return None;
    }
    let (spec, status) = (spec.unwrap_or_default(), status.unwrap_or_default());
    let standing = Standing {
        kind,
        ending: meta.deletion_timestamp.is_some(),
        paused: spec.paused,
        generation: meta.generation.unwrap_or(0),
        observed_generation: status.observed_generation,
        replicas: u32::try_from(spec.replicas.unwrap_or(1)).unwrap_or(0),
        current: status.replicas,
        ready: status.ready_replicas,
        updated: status.updated_replicas,
        available: status.available_replicas,
        first_ordinal: spec.ordinals.unwrap_or_default().start,
    };
    let template_labels = spec.template.metadata.and_then(|m| m.labels).unwrap_or_default();
    Some(WorkloadFacts {
        uid: meta.uid.unwrap_or_default(),
        rule: rule::read(&meta.annotations),
        standing,
        needs: Needs::of(&spec.template.spec.unwrap_or_default(), &template_labels, names),
        template_labels,
        selector: spec.selector,
    })
}

/// One revision of a Deployment; a set of nobody's is kept to know that it is not.
#[derive(Clone, Debug)]
pub struct ReplicaSetFacts {
    pub uid: String,
    pub deployment: Option<DeploymentRef>,
    pub replicas: u32,
}

#[derive(Clone, Debug)]
pub struct DeploymentRef {
    pub name: String,
    pub uid: String,
}

pub fn replica_set(object: ReplicaSet) -> Option<ReplicaSetFacts> {
    let owner = controller(&object.metadata).filter(|o| o.kind == "Deployment");
    Some(ReplicaSetFacts {
        deployment: owner.map(|o| DeploymentRef { name: o.name.clone(), uid: o.uid.clone() }),
        replicas: object.spec.and_then(|s| s.replicas).unwrap_or(1),
        uid: object.metadata.uid.unwrap_or_default(),
    })
}

fn controller(meta: &ObjectMeta) -> Option<&k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference> {
    let owners = meta.owner_references.iter().flatten();
    owners.filter(|o| o.api_version.starts_with("apps/")).find(|o| o.controller == Some(true))
}

/// Who made a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    pub stateful: bool,
    pub name: String,
    pub uid: String,
}

/// A pod that has not ended.
#[derive(Clone, Debug)]
pub struct PodFacts {
    pub uid: String,
    pub version: String,
    pub owner: Option<Owner>,
    pub node: Option<String>,
    pub assigned: Option<Class>,
    pub ready: bool,
    pub terminating: bool,
    pub exempt: bool,
    pub unschedulable_since: Option<Timestamp>,
    pub rank: Option<u32>,
    pub own_cost: bool,
    pub ordinal: Option<u32>,
    pub amount: Amount,
}

/// Pods that are nobody's are kept for the room they take.
pub fn pod(object: Pod, names: &NodeLabels) -> Option<PodFacts> {
    let Pod { metadata: meta, spec, status } = object;
    let (spec, status) = (spec.unwrap_or_default(), status.unwrap_or_default());
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return None;
    }
    let owner = controller(&meta).filter(|o| matches!(o.kind.as_str(), "ReplicaSet" | "StatefulSet"));
    let owner = owner.map(|o| Owner { stateful: o.kind == "StatefulSet", name: o.name.clone(), uid: o.uid.clone() });
    let node = spec.node_name.filter(|name| !name.is_empty());
    if owner.is_none() && node.is_none() {
        return None;
    }
    let condition = |name: &str| status.conditions.iter().flatten().find(|c| c.type_ == name);
    let unschedulable = condition("PodScheduled")
        .filter(|c| c.status == "False" && c.reason.as_deref() == Some("Unschedulable"))
        .and_then(|c| c.last_transition_time);
    let rank = meta.annotations.value(keys::SPREAD_RANK).and_then(|text| text.parse().ok());
    let cost = meta.annotations.value(keys::DELETION_COST);
    let ours = rank.map(|rank| place::deletion_cost(rank).to_string());
    let requests = |r: &Option<Resources>| r.as_ref().and_then(|r| r.requests.clone()).unwrap_or_default();
    let init = spec.init_containers.iter().flatten();
    Some(PodFacts {
        uid: meta.uid.clone().unwrap_or_default(),
        version: meta.resource_version.clone().unwrap_or_default(),
        assigned: node::assigned(&spec.node_selector, names),
        ready: condition("Ready").is_some_and(|c| c.status == "True"),
        terminating: meta.deletion_timestamp.is_some(),
        exempt: keys::EXEMPT_FROM_MOVES.iter().any(|(key, value)| meta.annotations.value(key) == Some(*value)),
        unschedulable_since: unschedulable.filter(|_| node.is_none()),
        rank,
        own_cost: cost.is_some() && cost != ours.as_deref(),
        ordinal: owner.as_ref().filter(|o| o.stateful).and_then(|o| ordinal(&o.name, meta.name.as_deref()?)),
        amount: Amount::of_pod(
            spec.containers.iter().map(|c| requests(&c.resources)),
            init.map(|c| (c.restart_policy.as_deref() == Some("Always"), requests(&c.resources))),
            &requests(&spec.resources),
            &spec.overhead.unwrap_or_default(),
        ),
        owner,
        node,
    })
}

/// The number at the end of a StatefulSet pod's name.
#[must_use]
pub fn ordinal(set: &str, pod: &str) -> Option<u32> {
    pod.strip_prefix(set)?.strip_prefix('-')?.parse().ok()
}

pub fn node(object: Node) -> node::Node {
    let Node { metadata: meta, spec, status } = object;
    let (spec, status) = (spec.unwrap_or_default(), status.unwrap_or_default());
    let taint = |t: NodeTaint| Taint { key: t.key, value: t.value.unwrap_or_default(), effect: t.effect };
    node::Node {
        name: meta.name.unwrap_or_default(),
        labels: meta.labels.unwrap_or_default(),
        taints: spec.taints.unwrap_or_default().into_iter().map(taint).collect(),
        unschedulable: spec.unschedulable,
        ready: status.conditions.iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True"),
        ending: meta.deletion_timestamp.is_some(),
        allocatable: Amount::of(&status.allocatable.unwrap_or_default()),
    }
}

/// A disruption budget.
#[derive(Clone, Debug)]
pub struct BudgetFacts {
    pub name: String,
    /// `None` where it cannot be read: then it is taken to select everything.
    selector: Option<Selector>,
    /// As observed for its newest generation; less is none.
    allowed: bool,
}

impl BudgetFacts {
    pub fn selects(&self, labels: &impl Lookup) -> bool {
        self.selector.as_ref().is_none_or(|s| s.matches(labels))
    }

    #[must_use]
    pub const fn allows(&self) -> bool {
        self.allowed
    }
}

/// A budget without a selector selects nothing.
pub fn budget(object: Budget) -> Option<BudgetFacts> {
    let selector = object.spec.and_then(|s| s.selector)?;
    let status = object.status.unwrap_or_default();
    let observed = status.observed_generation >= object.metadata.generation.unwrap_or(0);
    Some(BudgetFacts {
        name: object.metadata.name.unwrap_or_default(),
        selector: Selector::parse(&selector).ok(),
        allowed: observed && status.disruptions_allowed > 0,
    })
}

/// A namespace in which workloads are split.
#[derive(Clone, Debug, PartialEq)]
pub struct NamespaceFacts {
    pub window: Result<Option<groundcrew_core::cron::Window>, rule::Invalid>,
}

/// In an exempt namespace nobody places pods, so nobody may move them either.
pub fn namespace(object: &Namespace, selector: &Selector, exempt: &[String]) -> Option<NamespaceFacts> {
    let meta = &object.metadata;
    let ours = selector.matches(&meta.labels) && !exempt.iter().any(|name| Some(name) == meta.name.as_ref());
    ours.then(|| NamespaceFacts { window: rule::window(&meta.annotations) })
}
