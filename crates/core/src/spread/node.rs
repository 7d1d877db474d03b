//! What kind of capacity a node is, and whether a pod could go there.

use k8s_openapi::api::core::v1::PodSpec;

use crate::config::NodeLabels;
use crate::keys::Lookup;
use crate::quantity;
use crate::selector::{Labels, Placement, Selector, Tainted, Toleration, tolerated};

use super::Class;

/// How the clouds mark capacity where the configured labels are absent.
const KNOWN: [(&str, &str, Class); 9] = [
    ("karpenter.sh/capacity-type", "spot", Class::Spot),
    ("karpenter.sh/capacity-type", "on-demand", Class::OnDemand),
    ("eks.amazonaws.com/capacityType", "SPOT", Class::Spot),
    ("eks.amazonaws.com/capacityType", "ON_DEMAND", Class::OnDemand),
    ("cloud.google.com/gke-spot", "true", Class::Spot),
    ("cloud.google.com/gke-preemptible", "true", Class::Spot),
    ("cloud.google.com/gke-provisioning", "spot", Class::Spot),
    ("kubernetes.azure.com/scalesetpriority", "spot", Class::Spot),
    ("kubernetes.azure.com/scalesetpriority", "regular", Class::OnDemand),
];

/// A node with one of these is on its way out.
const LEAVING: [&str; 10] = [
    "karpenter.sh/disrupted",
    // Before Karpenter 1.0.
    "karpenter.sh/disruption",
    "ToBeDeletedByClusterAutoscaler",
    "node.kubernetes.io/out-of-service",
    "node.cloudprovider.kubernetes.io/shutdown",
    "aws-node-termination-handler/spot-itn",
    "aws-node-termination-handler/scheduled-maintenance",
    "aws-node-termination-handler/asg-lifecycle-termination",
    "aws-node-termination-handler/rebalance-recommendation",
    "cloud.google.com/impending-node-termination",
];

/// The class of a node; what says nothing counts as on-demand, which is never too optimistic.
pub fn class_of(labels: &impl Lookup, names: &NodeLabels) -> Class {
    let is = |(key, value): &(String, String)| labels.value(key) == Some(value.as_str());
    if is(&names.spot) {
        return Class::Spot;
    }
    if is(&names.on_demand) {
        return Class::OnDemand;
    }
    let known = KNOWN.iter().find(|(key, value, _)| labels.value(key) == Some(*value));
    known.map_or(Class::OnDemand, |(_, _, class)| *class)
}

/// The label that stands for a class in a pod's node selector.
#[must_use]
pub fn label_of(class: Class, names: &NodeLabels) -> (&str, &str) {
    let (key, value) = match class {
        Class::Spot => &names.spot,
        Class::OnDemand => &names.on_demand,
    };
    (key, value)
}

/// The class a pod was given, read from its node selector.
pub fn assigned(selector: &impl Lookup, names: &NodeLabels) -> Option<Class> {
    Class::ALL.into_iter().find(|class| {
        let (key, value) = label_of(*class, names);
        selector.value(key) == Some(value)
    })
}

/// Processor time in thousandths and memory in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    pub cpu: i64,
    pub memory: i64,
    pub pods: i64,
}

impl Amount {
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        let Self { cpu, memory, pods } = other;
        Self {
            cpu: self.cpu.saturating_add(cpu),
            memory: self.memory.saturating_add(memory),
            pods: self.pods.saturating_add(pods),
        }
    }

    fn fits_in(self, other: Self) -> bool {
        self.cpu <= other.cpu && self.memory <= other.memory && self.pods <= other.pods
    }

    fn max(self, other: Self) -> Self {
        Self { cpu: self.cpu.max(other.cpu), memory: self.memory.max(other.memory), pods: self.pods.max(other.pods) }
    }

    /// From a list of resources; what cannot be read counts as nothing.
    pub fn of(resources: &impl Lookup) -> Self {
        let read = |name: &str| resources.value(name).and_then(|text| quantity::parse(text).ok());
        Self {
            cpu: read("cpu").and_then(|q| q.millis()).unwrap_or(0),
            memory: read("memory").and_then(|q| q.units()).unwrap_or(0),
            pods: read("pods").and_then(|q| q.units()).unwrap_or(0),
        }
    }

    /// What a pod asks for: the containers together, or the largest plain init container.
    pub fn of_containers<L: Lookup>(
        containers: impl Iterator<Item = Option<L>>,
        init: impl Iterator<Item = (bool, Option<L>)>,
    ) -> Self {
        let one = |requests: Option<L>| requests.map(|r| Self::of(&r)).unwrap_or_default();
        let mut running = containers.map(one).fold(Self::default(), Self::plus);
        let mut largest = Self::default();
        for (sidecar, requests) in init {
            let amount = one(requests);
            if sidecar {
                running = running.plus(amount);
            } else {
                largest = largest.max(amount);
            }
        }
        Self { pods: 1, ..running.max(largest) }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taint {
    pub key: String,
    pub value: String,
    pub effect: String,
}

impl Tainted for Taint {
    fn key(&self) -> &str {
        &self.key
    }
    fn value(&self) -> &str {
        &self.value
    }
    fn effect(&self) -> &str {
        &self.effect
    }
}

/// What decisions know of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    pub name: String,
    pub labels: Labels,
    pub taints: Vec<Taint>,
    pub unschedulable: bool,
    pub ready: bool,
    pub ending: bool,
    pub allocatable: Amount,
}

impl Node {
    /// Its pods will be gone soon, whoever does it.
    #[must_use]
    pub fn is_leaving(&self) -> bool {
        self.unschedulable || self.ending || self.taints.iter().any(|t| LEAVING.contains(&t.key.as_str()))
    }

    /// Whether the pod could be scheduled here as `class`, with `used` of the node taken.
    #[must_use]
    pub fn takes(&self, needs: &Needs, class: Class, used: Amount) -> bool {
        let placement = match class {
            Class::Spot => &needs.on_spot,
            Class::OnDemand => &needs.on_demand,
        };
        let repels = |t: &&Taint| matches!(t.effect.as_str(), "NoSchedule" | "NoExecute");
        self.ready
            && !self.is_leaving()
            && placement.allows(&self.name, &self.labels)
            && self.taints.iter().filter(repels).all(|t| tolerated(&needs.tolerations, t))
            && needs.amount.plus(used).fits_in(self.allocatable)
    }
}

/// What a workload's pods need of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    on_spot: Placement,
    on_demand: Placement,
    tolerations: Vec<Toleration>,
    amount: Amount,
    /// No two of the workload's pods may share a node.
    apart: bool,
}

impl Needs {
    /// From the pod template, with the class's label in the selector as admission will write it.
    #[must_use]
    pub fn of(template: &PodSpec, labels: &impl Lookup, names: &NodeLabels) -> Self {
        let placed = |class: Class| {
            let (key, value) = label_of(class, names);
            let mut selector = template.node_selector.clone().unwrap_or_default();
            selector.insert(key.to_owned(), value.to_owned());
            Placement::of(&PodSpec {
                node_selector: Some(selector),
                affinity: template.affinity.clone(),
                ..PodSpec::default()
            })
        };
        let requests = |r: &Option<k8s_openapi::api::core::v1::ResourceRequirements>| {
            let quantities = r.as_ref()?.requests.as_ref()?;
            Some(quantities.iter().map(|(name, q)| (name.clone(), q.0.clone())).collect::<Labels>())
        };
        let init = template.init_containers.iter().flatten();
        let amount = Amount::of_containers(
            template.containers.iter().map(|c| requests(&c.resources)),
            init.map(|c| (c.restart_policy.as_deref() == Some("Always"), requests(&c.resources))),
        );
        Self {
            on_spot: placed(Class::Spot),
            on_demand: placed(Class::OnDemand),
            tolerations: template.tolerations.iter().flatten().map(Toleration::from).collect(),
            amount,
            apart: keeps_apart(template, labels),
        }
    }

    /// Whether a node that has a pod of the workload takes no other.
    #[must_use]
    pub const fn apart(&self) -> bool {
        self.apart
    }
}

/// Required anti-affinity against its own labels, per node: the usual way to ask for one pod per node.
fn keeps_apart(template: &PodSpec, labels: &impl Lookup) -> bool {
    let affinity = template.affinity.as_ref().and_then(|a| a.pod_anti_affinity.as_ref());
    let terms = affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
    terms.into_iter().flatten().any(|term| {
        let own_namespace = term.namespace_selector.is_none() && term.namespaces.iter().flatten().next().is_none();
        let selector = term.label_selector.as_ref().and_then(|s| Selector::parse(s).ok());
        term.topology_key == "kubernetes.io/hostname" && own_namespace && selector.is_some_and(|s| s.matches(labels))
    })
}

#[cfg(test)]
mod tests;
