//! A new node takes user pods only when its init pods are ready.
//!
//! ```text
//! Node CREATE ──► admission: add the taint          (webhook, or a policy inside the API server)
//!                      │ the taint is the only state
//! node, DaemonSets, ───▼────────────────────────
//! their pods ────► decide(rules, seen, now) ──► Wait │ CannotEver │ Release │ Taint │ Leave
//! ```
//!
//! Nothing else remembers that a node is held: whoever removes the taint has released the node, and a restart of the
//! operator reads the same state the node shows.

use std::fmt;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use json_patch::Patch;
use serde::Serialize;

use crate::duration;
use crate::keys;

pub mod admission;
pub mod deny;
pub mod evidence;
pub mod expression;
pub mod facts;
pub mod guard;
pub mod policy;
pub mod report;
pub mod rule;
pub mod taint;

pub use evidence::Unmet;
pub use facts::{DaemonPod, DaemonSetFacts, Named, NodeFacts};
pub use rule::{Draft, Need, OnTimeout, Origin, ReadyBy, Rule, Rules, Timeout};
pub use taint::{Effect, Mark, Taint, TaintSpec};

/// What the decision may look at.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    pub node: &'a NodeFacts,
    /// All of the cluster; which of them matter is part of the decision.
    pub daemon_sets: &'a [DaemonSetFacts],
    /// The pods that DaemonSets control and that are bound to this node's name.
    pub pods: &'a [DaemonPod],
    /// Somebody's own pods run here: no backfill. See [`counts_as_user_pod`].
    pub user_pods: bool,
}

/// What should happen to one rule's taint on one node, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Verdict {
    Leave(Leave),
    /// Held; look again at `until` even if nothing happens before.
    Wait {
        until: Option<Timestamp>,
        why: Waiting,
    },
    /// Held, and no waiting will help: somebody must change a DaemonSet.
    CannotEver {
        until: Option<Timestamp>,
        unmet: Vec<Unmet>,
    },
    Release(Released),
    /// Missed at birth and idle since.
    Taint,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Leave {
    NotHeld,
    Deleting,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Waiting {
    For(Vec<Unmet>),
    /// Ready, but the shortest hold is not over.
    MinHold,
    /// Ready, but the phase before has not ended.
    EarlierPhase {
        taint: String,
    },
    /// Its time is up and the rule says to keep it.
    TimedOut(Vec<Unmet>),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Released {
    Ready,
    TimedOut(Vec<Unmet>),
    RuleGone,
    /// The rule no longer means this node.
    NotSelected,
}

/// The verdicts of all rules on one node, carried out together in one patch.
#[derive(Clone, Debug)]
pub struct Decision<'r> {
    pub verdicts: Vec<(&'r Rule, Verdict)>,
}

#[must_use]
pub fn decide<'r>(rules: &'r Rules, seen: &Seen<'_>, now: Timestamp) -> Decision<'r> {
    let mut verdicts: Vec<(&Rule, Verdict)> = Vec::with_capacity(rules.rules.len());
    for rule in &rules.rules {
        let earlier = verdicts.iter().find(|(other, verdict)| other.is_built_in() && verdict.holds());
        let earlier = earlier.filter(|_| rule.is_built_in()).map(|(other, _)| &other.taint);
        verdicts.push((rule, decide_rule(rules, rule, earlier, seen, now)));
    }
    Decision { verdicts }
}

fn decide_rule(rules: &Rules, rule: &Rule, earlier: Option<&TaintSpec>, seen: &Seen<'_>, now: Timestamp) -> Verdict {
    let node = seen.node;
    if node.deleting {
        return Verdict::Leave(Leave::Deleting);
    }
    if !node.taints.iter().any(|t| rule.taint.is(t)) {
        return if backfills(rules, rule, seen) { Verdict::Taint } else { Verdict::Leave(Leave::NotHeld) };
    }
    if rule.retired {
        return Verdict::Release(Released::RuleGone);
    }
    if !rule.nodes.matches(&node.labels) {
        return Verdict::Release(Released::NotSelected);
    }
    let since = held_since(rule, node);
    let deadline = deadline(rule, node);
    let unmet = evidence::unmet(rules, rule, seen);
    if unmet.is_empty() {
        return match (earlier, later(since, rule.min_hold)) {
            (Some(taint), _) => Verdict::Wait { until: None, why: Waiting::EarlierPhase { taint: taint.to_string() } },
            (None, end) if end > now => Verdict::Wait { until: Some(end), why: Waiting::MinHold },
            (None, _) => Verdict::Release(Released::Ready),
        };
    }
    match (rule.timeout, deadline) {
        (Some(timeout), Some(deadline)) if deadline <= now => match timeout.then {
            OnTimeout::Release => Verdict::Release(Released::TimedOut(unmet)),
            OnTimeout::Keep => Verdict::Wait { until: None, why: Waiting::TimedOut(unmet) },
        },
        _ if unmet.iter().any(|u| matches!(u, Unmet::CannotTolerate { .. })) => {
            Verdict::CannotEver { until: deadline, unmet }
        }
        _ => Verdict::Wait { until: deadline, why: Waiting::For(unmet) },
    }
}

/// Only the built-in taint is added late: its completion annotation tells who has been through it.
fn backfills(rules: &Rules, rule: &Rule, seen: &Seen<'_>) -> bool {
    let node = seen.node;
    rules.backfill
        && rule.is_built_in()
        && rules.holds_new(rule, &node.labels)
        && !rules.is_stopped(rule)
        && !node.is_control_plane()
        && !node.completed()
        && !seen.user_pods
        // A node between two phases has been through the first.
        && !rules.rules.iter().any(|other| other.is_built_in() && node.taints.iter().any(|t| other.taint.is(t)))
        && !node.taints.iter().any(|t| rule.taint.clashes(t))
}

/// Whether a pod shows that somebody uses its node.
#[must_use]
pub fn counts_as_user_pod(namespace: &str, owner_kind: Option<&str>, finished: bool) -> bool {
    !finished && !matches!(namespace, "kube-system" | "kube-public") && owner_kind != Some("DaemonSet")
}

fn later(since: Timestamp, by: Duration) -> Timestamp {
    // Beyond the calendar means never.
    SignedDuration::try_from(by).ok().and_then(|by| since.checked_add(by).ok()).unwrap_or(Timestamp::MAX)
}

impl Verdict {
    /// The taint is there and stays.
    #[must_use]
    pub fn holds(&self) -> bool {
        matches!(self, Self::Wait { .. } | Self::CannotEver { .. })
    }

    #[must_use]
    pub fn timed_out(&self) -> bool {
        matches!(self, Self::Wait { why: Waiting::TimedOut(_), .. } | Self::Release(Released::TimedOut(_)))
    }

    #[must_use]
    pub fn unmet(&self) -> &[Unmet] {
        match self {
            Self::Wait { why: Waiting::For(unmet) | Waiting::TimedOut(unmet), .. }
            | Self::CannotEver { unmet, .. }
            | Self::Release(Released::TimedOut(unmet)) => unmet,
            _ => &[],
        }
    }

    #[must_use]
    pub fn until(&self) -> Option<Timestamp> {
        match self {
            Self::Wait { until, .. } | Self::CannotEver { until, .. } => *until,
            _ => None,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |unmet: &[Unmet]| unmet.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        match self {
            Self::Leave(Leave::NotHeld) => f.write_str("not held"),
            Self::Leave(Leave::Deleting) => f.write_str("on its way out"),
            Self::Wait { why: Waiting::For(unmet), .. } => f.write_str(&list(unmet)),
            Self::Wait { why: Waiting::MinHold, .. } => f.write_str("ready; the shortest hold is not over"),
            Self::Wait { why: Waiting::EarlierPhase { taint }, .. } => {
                write!(f, "ready; waits for {taint} to go first")
            }
            Self::Wait { why: Waiting::TimedOut(unmet), .. } => write!(f, "timed out and kept: {}", list(unmet)),
            Self::CannotEver { unmet, .. } => write!(f, "cannot ever be ready: {}", list(unmet)),
            Self::Release(Released::Ready) => f.write_str("ready"),
            Self::Release(Released::TimedOut(unmet)) => write!(f, "timed out and released: {}", list(unmet)),
            Self::Release(Released::RuleGone) => f.write_str("released: the rule is gone"),
            Self::Release(Released::NotSelected) => f.write_str("released: the rule no longer selects the node"),
            Self::Taint => f.write_str("missed at birth and idle: held from now on"),
        }
    }
}

impl Decision<'_> {
    /// When to look again although nothing has happened.
    #[must_use]
    pub fn next(&self) -> Option<Timestamp> {
        self.verdicts.iter().filter_map(|(_, verdict)| verdict.until()).min()
    }

    /// The one write, if any. Releases go first: a backfill can wait for the next look.
    #[must_use]
    pub fn patch(&self, node: &NodeFacts, now: Timestamp) -> Option<Patch> {
        let released = || self.verdicts.iter().filter(|(_, v)| matches!(v, Verdict::Release(_)));
        let taints: Vec<&TaintSpec> = released().map(|(rule, _)| &rule.taint).collect();
        let mark = |key| Mark { key, at: now };
        let over = released().any(|(rule, _)| rule.is_built_in())
            && !self.verdicts.iter().any(|(rule, v)| rule.is_built_in() && v.holds());
        let completed = over.then_some(mark(keys::STARTUP_COMPLETED_AT));
        let timed_out = released().any(|(_, v)| v.timed_out()).then_some(mark(keys::STARTUP_TIMED_OUT_AT));
        let marks: Vec<Mark> = completed.into_iter().chain(timed_out).collect();
        let missed = self.verdicts.iter().filter(|(_, v)| *v == Verdict::Taint).map(|(rule, _)| &rule.taint);
        taint::release(node, &taints, &marks).or_else(|| taint::backfill(node, missed, now))
    }
}

/// Since when the rule holds the node: its birth, unless the taint says later.
#[must_use]
pub fn held_since(rule: &Rule, node: &NodeFacts) -> Timestamp {
    let taint = node.taints.iter().find(|t| rule.taint.is(*t));
    taint.and_then(Taint::added).unwrap_or(node.created)
}

/// When the rule's patience with the node ends, if it does.
fn deadline(rule: &Rule, node: &NodeFacts) -> Option<Timestamp> {
    rule.timeout.map(|timeout| later(held_since(rule, node), timeout.after))
}

/// How long a node has been held, in words.
#[must_use]
pub fn held_for(rule: &Rule, node: &NodeFacts, now: Timestamp) -> String {
    let seconds = now.duration_since(held_since(rule, node)).as_secs().try_into().unwrap_or_default();
    duration::text(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests;
