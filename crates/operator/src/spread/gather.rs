//! From caches to what a decision may look at.

use std::collections::HashMap;
use std::sync::Arc;

use groundcrew_core::keys::Lookup;
use groundcrew_core::spread::rebalance::{Budgets, Pod, Workload, waits_in_vain};
use groundcrew_core::spread::{Kind, Split, node};
use jiff::Timestamp;

use super::Shared;
use super::objects::{BudgetFacts, PodFacts, WorkloadFacts};
use crate::runtime::cache::Key;

/// One workload at one moment.
#[derive(Debug)]
pub struct Snapshot {
    pub workload: Workload,
    pub pods: Vec<Pod>,
    /// Where each of them runs, by name.
    pub nodes: HashMap<String, String>,
}

impl Snapshot {
    /// What runs where, for people.
    #[must_use]
    pub fn split(&self) -> Split {
        let mut split = Split::default();
        self.pods.iter().filter(|p| !p.terminating).for_each(|p| split.add(p.class));
        split
    }
}

impl Shared {
    /// The workload as the caches have it; its pods are taken to carry the template's labels.
    pub(super) fn snapshot(&self, kind: Kind, key: &Key, facts: &WorkloadFacts) -> Snapshot {
        let mut budgets = Vec::new();
        self.budgets.for_each_in(&key.namespace, |_, budget| budgets.push(Arc::clone(budget)));
        let said = judge(budgets.iter().map(AsRef::as_ref), &facts.template_labels);
        let mut pods = Vec::new();
        for uid in self.revisions(kind, key, facts) {
            pods.extend(self.index.pods(&uid));
        }
        let nodes = pods.iter().filter_map(|(key, pod)| Some((key.name.clone(), pod.node.clone()?))).collect();
        let pods = pods.iter().map(|(key, pod)| self.pod(&key.name, pod, said.clone())).collect();
        Snapshot { workload: facts.standing.clone(), pods, nodes }
    }

    /// The uids that pods of this workload name as their controller.
    pub(super) fn revisions(&self, kind: Kind, key: &Key, facts: &WorkloadFacts) -> Vec<String> {
        if kind == Kind::StatefulSet {
            return vec![facts.uid.clone()];
        }
        let mut uids = Vec::new();
        self.replica_sets.for_each_in(&key.namespace, |_, set| {
            if set.deployment.as_ref().is_some_and(|d| d.uid == facts.uid) {
                uids.push(set.uid.clone());
            }
        });
        uids
    }

    /// What keeps pods of this workload waiting, if it is the label they ask for.
    pub(super) fn missing_label(&self, snapshot: &Snapshot, now: Timestamp) -> Option<String> {
        let class = waits_in_vain(self.config.limits, &snapshot.pods, now)?;
        let mut nodes = Vec::new();
        self.nodes.for_each(|_, node| nodes.push(Arc::clone(node)));
        let (key, value) = node::label_of(class, &self.names);
        node::lacks_label(class, nodes.iter().map(|n| &n.labels), &self.names).then(|| {
            format!("pods wait for a node labelled {key}={value}: there are {class} nodes, but none carries it. See nodeLabels")
        })
    }

    pub(super) fn pod(&self, name: &str, pod: &PodFacts, budgets: Budgets) -> Pod {
        let (class, leaving) = self.standing(pod);
        Pod {
            name: name.to_owned(),
            uid: pod.uid.clone(),
            version: pod.version.clone(),
            class,
            bound: pod.node.is_some(),
            ready: pod.ready,
            terminating: pod.terminating,
            leaving,
            exempt: pod.exempt,
            unschedulable_since: pod.unschedulable_since,
            rank: pod.rank,
            own_cost: pod.own_cost,
            ordinal: pod.ordinal,
            budgets,
        }
    }
}

/// What the budgets say of a pod with these labels.
pub fn judge<'a>(budgets: impl Iterator<Item = &'a BudgetFacts>, labels: &impl Lookup) -> Budgets {
    let selecting: Vec<&BudgetFacts> = budgets.filter(|b| b.selects(labels)).collect();
    match selecting.as_slice() {
        [] => Budgets::Allow,
        [one] if one.allows() => Budgets::Allow,
        [one] => Budgets::Deny(one.name.clone()),
        several => {
            let mut names: Vec<String> = several.iter().map(|b| b.name.clone()).collect();
            names.sort();
            Budgets::Several(names)
        }
    }
}
