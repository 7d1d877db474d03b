//! From caches to what a decision may look at.

use std::collections::HashMap;
use std::sync::Arc;

use groundcrew_core::keys::Lookup;
use groundcrew_core::spread::node::Amount;
use groundcrew_core::spread::rebalance::{Budgets, Pod, Workload};
use groundcrew_core::spread::{Class, Kind, Split};
use jiff::{SignedDuration, Timestamp};

use super::objects::{BudgetFacts, PodFacts, WorkloadFacts};
use super::{Shared, locked};
use crate::runtime::cache::Key;

/// The room taken on nodes, summed up now and then.
#[derive(Debug, Default)]
pub struct Room {
    at: Option<Timestamp>,
    used: Arc<HashMap<String, Amount>>,
}

/// Sums older than this are made anew.
const ROOM_KEPT: SignedDuration = SignedDuration::from_secs(1);

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
        self.budgets.for_each(|at, budget| {
            if at.namespace == key.namespace {
                budgets.push(Arc::clone(budget));
            }
        });
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
        self.replica_sets.for_each(|at, set| {
            if set.deployment_uid == facts.uid && at.namespace == key.namespace {
                uids.push(set.uid.clone());
            }
        });
        uids
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

    /// A node of the class that would take one more of the workload's pods.
    pub(super) fn target(
        &self,
        facts: &WorkloadFacts,
        snapshot: &Snapshot,
        class: Class,
        now: Timestamp,
    ) -> Option<String> {
        let used = self.used(now);
        let shared = |node: &str| facts.needs.apart() && snapshot.nodes.values().any(|taken| taken == node);
        let (mut found, nothing) = (None, Amount::default());
        self.nodes.for_each(|key, node| {
            if found.is_none() {
                let used = used.get(&key.name).unwrap_or(&nothing);
                found = (node.takes(&facts.needs, class, used) && !shared(&key.name)).then(|| key.name.clone());
            }
        });
        found
    }

    fn used(&self, now: Timestamp) -> Arc<HashMap<String, Amount>> {
        let mut room = locked(&self.room);
        if room.at.is_none_or(|at| now.duration_since(at) >= ROOM_KEPT) {
            let mut used: HashMap<String, Amount> = HashMap::new();
            self.pods.for_each(|_, pod| {
                if let Some(node) = &pod.node {
                    used.entry(node.clone()).or_default().add(&pod.amount);
                }
            });
            *room = Room { at: Some(now), used: Arc::new(used) };
        }
        Arc::clone(&room.used)
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
