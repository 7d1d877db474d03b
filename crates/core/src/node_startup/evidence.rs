//! Which of a rule's needs are not met, and what stands in the way of each.

use std::fmt;

use serde::Serialize;

use super::facts::{DaemonPod, DaemonSetFacts, Named};
use super::rule::{Need, ReadyBy, Rule, Rules};
use super::taint::Taint;
use super::{Origin, Seen};

/// A need that is not met.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Unmet {
    /// Nobody carries the init label anywhere.
    NoInitDaemonSet,
    MissingDaemonSet {
        daemon_set: Named,
    },
    /// Its template does not tolerate the very taint it is meant to lift.
    CannotTolerate {
        daemon_set: Named,
        taint: String,
    },
    /// A taint that others lift sooner or later.
    BlockedByTaint {
        daemon_set: Named,
        taint: String,
    },
    NoPod {
        daemon_set: Named,
    },
    NotReady {
        daemon_set: Named,
        pod: String,
    },
    NotAnnotated {
        daemon_set: Named,
        pod: String,
    },
    /// The cloud has not finished labelling the node, so who should run there is not known yet.
    Unlabelled,
    Condition {
        kind: String,
        want: String,
        have: Option<String>,
    },
    Expression {
        text: String,
        error: Option<String>,
    },
    RuleBroken {
        error: String,
    },
}

impl Unmet {
    /// Who is waited for, where it is a DaemonSet.
    #[must_use]
    pub fn daemon_set(&self) -> Option<&Named> {
        match self {
            Self::MissingDaemonSet { daemon_set }
            | Self::CannotTolerate { daemon_set, .. }
            | Self::BlockedByTaint { daemon_set, .. }
            | Self::NoPod { daemon_set }
            | Self::NotReady { daemon_set, .. }
            | Self::NotAnnotated { daemon_set, .. } => Some(daemon_set),
            _ => None,
        }
    }
}

impl fmt::Display for Unmet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoInitDaemonSet => f.write_str("no init DaemonSet exists"),
            Self::MissingDaemonSet { daemon_set } => write!(f, "DaemonSet {daemon_set} does not exist"),
            Self::CannotTolerate { daemon_set, taint } => {
                write!(f, "DaemonSet {daemon_set} does not tolerate {taint}, so its pod can never start here")
            }
            Self::BlockedByTaint { daemon_set, taint } => {
                write!(f, "DaemonSet {daemon_set} waits until the taint {taint} is gone")
            }
            Self::NoPod { daemon_set } => write!(f, "DaemonSet {daemon_set} has no live pod here"),
            Self::NotReady { daemon_set, pod } => write!(f, "pod {pod} of DaemonSet {daemon_set} is not ready"),
            Self::NotAnnotated { daemon_set, pod } => {
                write!(f, "pod {pod} of DaemonSet {daemon_set} has not been annotated ready")
            }
            Self::Unlabelled => f.write_str("the cloud provider has not initialized the node"),
            Self::Condition { kind, want, have } => {
                write!(f, "condition {kind} is {}, not {want}", have.as_deref().unwrap_or("absent"))
            }
            Self::Expression { text, error: None } => write!(f, "the expression is false: {text}"),
            Self::Expression { text, error: Some(error) } => write!(f, "the expression failed ({error}): {text}"),
            Self::RuleBroken { error } => write!(f, "the rule cannot be followed: {error}"),
        }
    }
}

/// Keys of taints that are lifted by the node's own start. A pod that does not tolerate one is late, not unwanted.
const PASSING: [&str; 6] = [
    "node.kubernetes.io/",
    "node.cloudprovider.kubernetes.io/",
    "startup-taint.cluster-autoscaler.kubernetes.io/",
    "ignore-taint.cluster-autoscaler.kubernetes.io/",
    "karpenter.sh/unregistered",
    "readiness.k8s.io/",
];
/// How CNI and CSI agents name the taint they lift themselves.
const PASSING_END: &str = "/agent-not-ready";
const CLOUD_UNINITIALIZED: &str = "node.cloudprovider.kubernetes.io/uninitialized";

/// Everything that still stands between the node and the rule's release.
#[must_use]
pub fn unmet(rules: &Rules, rule: &Rule, seen: &Seen<'_>) -> Vec<Unmet> {
    let mut unmet: Vec<Unmet> = rule.needs.iter().flat_map(|need| unmet_need(rules, rule, need, seen)).collect();
    // One sentence about the node, however many DaemonSets it leaves in doubt.
    let mut said = false;
    unmet.retain(|unmet| *unmet != Unmet::Unlabelled || !std::mem::replace(&mut said, true));
    unmet
}

fn unmet_need(rules: &Rules, rule: &Rule, need: &Need, seen: &Seen<'_>) -> Vec<Unmet> {
    let judge = Judge { rules, rule, seen };
    match need {
        Need::InitPods { labels, namespaces } => {
            let wanted = |namespace: &String| namespaces.is_empty() || namespaces.contains(namespace);
            let is_init = |ds: &DaemonSetFacts| wanted(&ds.named.namespace) && labels.matches(&ds.labels);
            let is_evidence = |pod: &DaemonPod| wanted(&pod.named.namespace) && labels.matches(&*pod.labels);
            judge.init_pods(is_init, is_evidence)
        }
        Need::DaemonSet(named) => match seen.daemon_sets.iter().find(|ds| ds.named == *named && !ds.deleting) {
            None => vec![Unmet::MissingDaemonSet { daemon_set: named.clone() }],
            Some(ds) => judge.daemon_set(ds, |_| true).into_iter().collect(),
        },
        Need::AllDaemonSets => {
            let counts = |ds: &&DaemonSetFacts| !ds.deleting && !ds.untolerated(seen.node).any(|t| judge.is_startup(t));
            seen.daemon_sets.iter().filter(counts).filter_map(|ds| judge.daemon_set(ds, |_| true)).collect()
        }
        Need::Condition { kind, status } => {
            let have = seen.node.conditions.get(kind);
            let met = have == Some(status);
            let unmet = || Unmet::Condition { kind: kind.clone(), want: status.clone(), have: have.cloned() };
            (!met).then(unmet).into_iter().collect()
        }
        Need::Expression(expression) => {
            let text = || expression.text().to_owned();
            match expression.holds(seen) {
                Ok(true) => Vec::new(),
                Ok(false) => vec![Unmet::Expression { text: text(), error: None }],
                Err(failed) => vec![Unmet::Expression { text: text(), error: Some(failed.to_string()) }],
            }
        }
        Need::Broken(error) => vec![Unmet::RuleBroken { error: error.clone() }],
    }
}

struct Judge<'a> {
    rules: &'a Rules,
    rule: &'a Rule,
    seen: &'a Seen<'a>,
}

impl Judge<'_> {
    /// Every init DaemonSet that should run here, and every init pod here whose DaemonSet is not known (yet).
    fn init_pods(
        &self,
        is_init: impl Fn(&DaemonSetFacts) -> bool,
        is_evidence: impl Fn(&DaemonPod) -> bool,
    ) -> Vec<Unmet> {
        let init: Vec<&DaemonSetFacts> =
            self.seen.daemon_sets.iter().filter(|ds| !ds.deleting && is_init(ds)).collect();
        let strays: Vec<&DaemonPod> = self.strays().filter(|pod| is_evidence(pod)).collect();
        if init.is_empty() && strays.is_empty() {
            return vec![Unmet::NoInitDaemonSet];
        }
        let of_sets = init.iter().filter_map(|ds| self.daemon_set(ds, &is_evidence));
        let of_strays = strays.iter().filter_map(|stray| {
            let siblings: Vec<&DaemonPod> =
                strays.iter().copied().filter(|other| other.owner_uid == stray.owner_uid).collect();
            self.pods(&Named::new(&stray.named.namespace, &stray.owner), &siblings)
        });
        let mut unmet: Vec<Unmet> = of_sets.chain(of_strays).collect();
        unmet.dedup();
        unmet
    }

    /// Live pods here of a DaemonSet that no cache holds: gone with its pods left behind, or too new.
    fn strays(&self) -> impl Iterator<Item = &DaemonPod> {
        let known = |pod: &DaemonPod| self.seen.daemon_sets.iter().any(|ds| ds.uid == pod.owner_uid);
        self.seen.pods.iter().filter(move |pod| pod.lives_on(self.seen.node) && !known(pod))
    }

    /// `None` when the DaemonSet need not run here, or has a ready pod here.
    fn daemon_set(&self, ds: &DaemonSetFacts, is_evidence: impl Fn(&DaemonPod) -> bool) -> Option<Unmet> {
        let node = self.seen.node;
        if !ds.selects(node) {
            let unlabelled = ds.may_select_later(node) && node.taints.iter().any(|t| t.key == CLOUD_UNINITIALIZED);
            let wanted = unlabelled && ds.untolerated(node).all(|t| self.passes(t));
            return wanted.then_some(Unmet::Unlabelled);
        }
        let daemon_set = || ds.named.clone();
        let own = |pod: &&DaemonPod| pod.owner_uid == ds.uid && pod.lives_on(node) && is_evidence(pod);
        let pods: Vec<&DaemonPod> = self.seen.pods.iter().filter(own).collect();
        let blocking: Vec<&Taint> = ds.untolerated(node).collect();
        // A taint that stays means: not on this node. Its pod, if any, is a leftover.
        if blocking.iter().any(|t| !self.passes(t)) {
            return None;
        }
        let unmet = self.pods(&ds.named, &pods)?;
        // With a pod here the question is the pod's readiness; without one, what keeps it from coming.
        if !pods.is_empty() {
            return Some(unmet);
        }
        let name = |t: &&&Taint| format!("{}:{}", t.key, t.effect);
        if let Some(taint) = blocking.iter().find(|t| self.stays_with_rule(t)) {
            return Some(Unmet::CannotTolerate { daemon_set: daemon_set(), taint: name(&taint) });
        }
        if let Some(taint) = blocking.first() {
            return Some(Unmet::BlockedByTaint { daemon_set: daemon_set(), taint: name(&taint) });
        }
        Some(unmet)
    }

    fn pods(&self, daemon_set: &Named, pods: &[&DaemonPod]) -> Option<Unmet> {
        let done = |pod: &&DaemonPod| pod.annotated || (pod.ready && self.rule.ready_by == ReadyBy::Any);
        if pods.iter().any(done) {
            return None;
        }
        let daemon_set = daemon_set.clone();
        Some(match (pods.first(), self.rule.ready_by) {
            (None, _) => Unmet::NoPod { daemon_set },
            (Some(pod), ReadyBy::Any) => Unmet::NotReady { daemon_set, pod: pod.named.name.clone() },
            (Some(pod), ReadyBy::Annotation) => Unmet::NotAnnotated { daemon_set, pod: pod.named.name.clone() },
        })
    }

    fn is_startup(&self, taint: &Taint) -> bool {
        self.rules.rules.iter().any(|rule| rule.taint.is(taint))
    }

    /// Will be gone one day without anybody's decision.
    fn passes(&self, taint: &Taint) -> bool {
        PASSING.iter().any(|start| taint.key.starts_with(start))
            || taint.key.ends_with(PASSING_END)
            || self.is_startup(taint)
    }

    /// Stays at least as long as this rule's own taint: its own, or that of a later phase.
    fn stays_with_rule(&self, taint: &Taint) -> bool {
        let phase = |rule: &Rule| match rule.origin {
            Origin::BuiltIn { phase } => Some(phase),
            Origin::Custom => None,
        };
        let later = |other: &Rule| matches!((phase(self.rule), phase(other)), (Some(own), Some(its)) if its >= own);
        self.rule.taint.is(taint) || self.rules.rules.iter().any(|other| later(other) && other.taint.is(taint))
    }
}
