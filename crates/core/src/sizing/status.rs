//! What a template's users look like from afar: numbers and two conditions.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::resize::{Kubelet, Leave, Verdict};
use super::shape::Shape;
use super::template::{Amounts, Problem, Resource, Template};

/// The pods of one template, counted by what their verdicts say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    daemon_sets: BTreeSet<String>,
    pods: usize,
    in_progress: usize,
    deferred: usize,
    infeasible: usize,
    unsized_pods: usize,
    restart: usize,
    reasons: BTreeMap<&'static str, usize>,
}

/// The status as it is written, conditions apart from their times.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    pub daemon_sets: usize,
    pub pods: usize,
    pub pods_resizing: usize,
    pub pods_needing_restart: usize,
    /// Why they need it; a pod can have several reasons.
    pub restart_reasons: BTreeMap<&'static str, usize>,
    pub ready: Condition,
    pub resize_pending: Condition,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Condition {
    pub holds: bool,
    pub reason: &'static str,
    pub message: String,
}

impl Tally {
    pub fn daemon_set(&mut self, namespace: &str, name: &str) {
        self.daemon_sets.insert(format!("{namespace}/{name}"));
    }

    pub fn pod(&mut self, verdict: &Verdict) {
        let later = match verdict {
            Verdict::Leave(Leave::Ending) => return,
            Verdict::Leave(Leave::Right) => &[][..],
            Verdict::Leave(Leave::Unsized(why)) => {
                self.unsized_pods += usize::from(why.is_failure());
                &[]
            }
            Verdict::Wait(Kubelet::Deferred, later) => {
                self.deferred += 1;
                later
            }
            Verdict::Wait(_, later) | Verdict::Resize(_, later) => {
                self.in_progress += 1;
                later
            }
            Verdict::TakeBack(_, later) => {
                self.infeasible += 1;
                later
            }
            Verdict::Restart(later) => later,
        };
        self.pods += 1;
        self.restart += usize::from(!later.is_empty());
        for reason in later {
            *self.reasons.entry(reason.name()).or_default() += 1;
        }
    }

    #[must_use]
    pub fn summary(self, template: &Result<Template, Problem>) -> Summary {
        Summary {
            daemon_sets: self.daemon_sets.len(),
            pods: self.pods,
            pods_resizing: self.in_progress + self.deferred + self.infeasible,
            pods_needing_restart: self.restart,
            ready: self.ready(template),
            resize_pending: self.resize_pending(),
            restart_reasons: self.reasons,
        }
    }

    fn ready(&self, template: &Result<Template, Problem>) -> Condition {
        let (holds, reason, message) = match template {
            Err(problem) => (false, "Invalid", problem.to_string()),
            Ok(_) if self.daemon_sets.is_empty() => (true, "Unused", "no DaemonSet names this template".to_owned()),
            Ok(_) if self.unsized_pods > 0 => (
                false,
                "PodsUnsized",
                format!("{} cannot be sized; see the events of their DaemonSets", pods(self.unsized_pods)),
            ),
            Ok(_) => (true, "InUse", format!("sizes {} of {} DaemonSets", pods(self.pods), self.daemon_sets.len())),
        };
        Condition { holds, reason, message }
    }

    fn resize_pending(&self) -> Condition {
        let waiting = self.in_progress + self.deferred + self.infeasible;
        let mut parts = Vec::new();
        for (count, what) in [
            (self.in_progress, "being resized"),
            (self.deferred, "deferred by the kubelet until the node has room"),
            (self.infeasible, "refused by the kubelet, tried again later"),
        ] {
            if count > 0 {
                parts.push(format!("{} {what}", pods(count)));
            }
        }
        if self.restart > 0 {
            let reasons: Vec<_> = self.reasons.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
            parts.push(format!(
                "{} will have the new size after the next restart ({})",
                pods(self.restart),
                reasons.join(", ")
            ));
        }
        let reason = match (waiting, self.restart) {
            (0, 0) => "UpToDate",
            (0, _) => "RestartNeeded",
            _ => "Resizing",
        };
        let message = if parts.is_empty() { "every pod has its size".to_owned() } else { parts.join("; ") };
        Condition { holds: waiting + self.restart > 0, reason, message }
    }
}

fn pods(count: usize) -> String {
    if count == 1 { "1 pod".to_owned() } else { format!("{count} pods") }
}

/// The percentage of a node that its sized pods reserve, for each resource the node reports.
#[must_use]
pub fn load(allocatable: &Amounts, sized: &[&Shape]) -> Amounts {
    let percent = |resource: Resource| {
        let all = allocatable.of(resource).filter(|all| *all > 0)?;
        let reserved: u128 = sized.iter().map(|shape| u128::from(shape.reserves(resource))).sum();
        u64::try_from(reserved * 100 / u128::from(all)).ok()
    };
    Amounts { cpu: percent(Resource::Cpu), memory: percent(Resource::Memory), storage: percent(Resource::Storage) }
}

/// The resource of which most is taken, where that is more than `limit` percent.
#[must_use]
pub fn crowded(load: &Amounts, limit: u64) -> Option<(Resource, u64)> {
    let loads = Resource::ALL.into_iter().filter_map(|resource| load.of(resource).map(|percent| (resource, percent)));
    loads.filter(|(_, percent)| *percent > limit).max_by_key(|(_, percent)| *percent)
}
