//! What the decision may look at: a node, the DaemonSets of the cluster and their pods on that node.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use serde::Serialize;

use crate::keys::{self, Lookup};
use crate::selector::{Labels, Placement, Toleration, tolerated};

use super::taint::Taint;

/// A node, as far as its startup goes.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeFacts {
    pub name: String,
    pub uid: String,
    pub created: Timestamp,
    pub deleting: bool,
    pub labels: Labels,
    pub annotations: Labels,
    pub taints: Vec<Taint>,
    /// Type to status, both as the node reports them.
    pub conditions: Labels,
}

impl NodeFacts {
    #[must_use]
    pub fn is_control_plane(&self) -> bool {
        keys::CONTROL_PLANE.iter().any(|label| self.labels.has(label))
    }

    #[must_use]
    pub fn completed(&self) -> bool {
        self.annotations.setting(keys::STARTUP_COMPLETED_AT).is_some()
    }
}

/// A namespaced name, for sentences and metrics.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Named {
    pub namespace: String,
    pub name: String,
}

impl Named {
    #[must_use]
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl std::fmt::Display for Named {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A DaemonSet, as its controller would look at it for one node.
#[derive(Clone, Debug, PartialEq)]
pub struct DaemonSetFacts {
    pub named: Named,
    pub uid: String,
    pub deleting: bool,
    /// Of the pod template, not of the DaemonSet.
    pub labels: Labels,
    pub node_name: Option<String>,
    pub placement: Placement,
    pub tolerations: Vec<Toleration>,
}

impl DaemonSetFacts {
    #[must_use]
    pub fn of(named: Named, uid: String, deleting: bool, template: &PodTemplateSpec) -> Self {
        let labels = template.metadata.as_ref().and_then(|m| m.labels.clone()).unwrap_or_default();
        let spec = template.spec.as_ref();
        let mut tolerations: Vec<Toleration> =
            spec.and_then(|s| s.tolerations.as_ref()).into_iter().flatten().map(Toleration::from).collect();
        tolerations.extend(added_by_the_controller(spec.and_then(|s| s.host_network).unwrap_or_default()));
        Self {
            named,
            uid,
            deleting,
            labels,
            node_name: spec.and_then(|s| s.node_name.clone()).filter(|name| !name.is_empty()),
            placement: spec.map(Placement::of).unwrap_or_default(),
            tolerations,
        }
    }

    /// Whether name, selector and affinity put a pod of it on the node.
    #[must_use]
    pub fn selects(&self, node: &NodeFacts) -> bool {
        self.node_name.as_ref().is_none_or(|name| *name == node.name) && self.placement.allows(&node.name, &node.labels)
    }

    /// Whether a label that the node does not have yet could change that.
    #[must_use]
    pub fn may_select_later(&self, node: &NodeFacts) -> bool {
        self.node_name.as_ref().is_none_or(|name| *name == node.name)
    }

    /// The taints that keep its pod off the node.
    pub fn untolerated<'a>(&'a self, node: &'a NodeFacts) -> impl Iterator<Item = &'a Taint> {
        let blocks = |t: &&Taint| matches!(t.effect.as_str(), "NoSchedule" | "NoExecute");
        node.taints.iter().filter(blocks).filter(|t| !tolerated(&self.tolerations, *t))
    }
}

/// What the DaemonSet controller lets every daemon pod tolerate.
fn added_by_the_controller(host_network: bool) -> Vec<Toleration> {
    let no_execute = ["not-ready", "unreachable"].map(|key| (key, "NoExecute"));
    let no_schedule =
        ["disk-pressure", "memory-pressure", "pid-pressure", "unschedulable"].map(|key| (key, "NoSchedule"));
    let network = host_network.then_some(("network-unavailable", "NoSchedule"));
    let all = no_execute.into_iter().chain(no_schedule).chain(network);
    all.map(|(key, effect)| Toleration::exists(&format!("node.kubernetes.io/{key}"), effect)).collect()
}

/// A pod that a DaemonSet controls, bound to the node in question.
#[derive(Clone, Debug, PartialEq)]
pub struct DaemonPod {
    pub named: Named,
    /// Of the controlling DaemonSet.
    pub owner: String,
    pub owner_uid: String,
    pub labels: Arc<Labels>,
    pub created: Timestamp,
    /// Being deleted, or Succeeded/Failed.
    pub ending: bool,
    /// Carries the early-ready annotation.
    pub annotated: bool,
    /// All containers ready, and the pod itself.
    pub ready: bool,
}

impl DaemonPod {
    /// Works on this node object: not on its way out, nor left over from an older node of the same name.
    /// Times are in whole seconds, so a pod of the node's first second counts as its own.
    #[must_use]
    pub fn lives_on(&self, node: &NodeFacts) -> bool {
        !self.ending && self.created.as_second() >= node.created.as_second()
    }
}

/// Exactly `true`; `True` or `1` is a mistake that must not open a node.
#[must_use]
pub fn annotated_ready(annotations: &impl Lookup) -> bool {
    annotations.value(keys::STARTUP_READY) == Some("true")
}

/// Every container reports ready, and so does the pod.
#[must_use]
pub fn reports_ready(containers: &[&str], reports: &[(&str, bool)], pod_ready: bool) -> bool {
    let reported = |name: &&str| reports.iter().any(|(reported, ready)| reported == name && *ready);
    pod_ready && containers.iter().all(reported) && reports.iter().all(|(_, ready)| *ready)
}
