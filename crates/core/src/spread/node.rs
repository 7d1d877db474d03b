//! What kind of capacity a node is, and whether a pod could go there.

use k8s_openapi::api::core::v1::{PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::config::NodeLabels;
use crate::keys::Lookup;
use crate::selector::{Labels, Placement, Selector, Tainted, Toleration, tolerated};

use super::Class;
pub use super::amount::Amount;

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

/// Whether there are nodes of the class, but none with the label that pods ask for: whatever is sent there waits.
pub fn lacks_label<'a, L: Lookup + 'a>(class: Class, nodes: impl Iterator<Item = &'a L>, names: &NodeLabels) -> bool {
    let mut of_class = nodes.filter(|labels| class_of(*labels, names) == class).peekable();
    of_class.peek().is_some() && of_class.all(|labels| assigned(labels, names) != Some(class))
}

/// The class a pod was given, read from its node selector.
pub fn assigned(selector: &impl Lookup, names: &NodeLabels) -> Option<Class> {
    Class::ALL.into_iter().find(|class| {
        let (key, value) = label_of(*class, names);
        selector.value(key) == Some(value)
    })
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
    pub fn takes(&self, needs: &Needs, class: Class, used: &Amount) -> bool {
        let placement = match class {
            Class::Spot => &needs.on_spot,
            Class::OnDemand => &needs.on_demand,
        };
        let repels = |t: &&Taint| matches!(t.effect.as_str(), "NoSchedule" | "NoExecute");
        self.ready
            && !self.is_leaving()
            && placement.allows(&self.name, &self.labels)
            && self.taints.iter().filter(repels).all(|t| tolerated(&needs.tolerations, t))
            && needs.amount.fits(used, &self.allocatable)
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
        let init = template.init_containers.iter().flatten();
        let amount = Amount::of_pod(
            template.containers.iter().map(|c| requests(c.resources.as_ref())),
            init.map(|c| (c.restart_policy.as_deref() == Some("Always"), requests(c.resources.as_ref()))),
            &requests(template.resources.as_ref()),
            &template.overhead.iter().flatten().map(spelled).collect(),
        );
        Self {
            on_spot: placed(Class::Spot),
            on_demand: placed(Class::OnDemand),
            tolerations: template.tolerations.iter().flatten().map(Toleration::from).collect(),
            amount,
            apart: keeps_apart(template, labels),
        }
    }

    /// What one pod asks for.
    #[must_use]
    pub const fn amount(&self) -> &Amount {
        &self.amount
    }

    /// Whether a node that has a pod of the workload takes no other.
    #[must_use]
    pub const fn apart(&self) -> bool {
        self.apart
    }
}

/// What is limited but not requested is requested in full, as the API server will have it in the pod.
fn requests(resources: Option<&ResourceRequirements>) -> Labels {
    let (limits, requests) = (resources.and_then(|r| r.limits.as_ref()), resources.and_then(|r| r.requests.as_ref()));
    limits.into_iter().flatten().chain(requests.into_iter().flatten()).map(spelled).collect()
}

fn spelled((name, quantity): (&String, &Quantity)) -> (String, String) {
    (name.clone(), quantity.0.clone())
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
