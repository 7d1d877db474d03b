//! What a verdict means to people and to the guard: events, counts, outcomes.

use std::collections::BTreeMap;

use jiff::Timestamp;

use crate::keys::{self, Lookup};

use super::evidence;
use super::guard::Outcome;
use super::{Leave, Named, NodeFacts, OnTimeout, Released, Rule, Rules, Seen, Unmet, Verdict, deadline, held_for};

/// An event on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    pub reason: Reason,
    pub note: String,
}

/// The reasons users grep for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    Held,
    Completed,
    TimedOut,
    CannotRun,
}

impl Reason {
    pub const ALL: &'static [Self] = &[Self::Held, Self::Completed, Self::TimedOut, Self::CannotRun];

    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Held => "StartupHeld",
            Self::Completed => "StartupCompleted",
            Self::TimedOut => "StartupTimedOut",
            Self::CannotRun => "InitPodCannotRun",
        }
    }

    #[must_use]
    pub const fn is_warning(&self) -> bool {
        matches!(self, Self::TimedOut | Self::CannotRun)
    }
}

/// What to tell about a verdict; the same reason need not be told twice about one node and rule.
#[must_use]
pub fn announce(rule: &Rule, node: &NodeFacts, verdict: &Verdict, now: Timestamp) -> Option<Announcement> {
    let (taint, name) = (&rule.taint, &rule.name);
    let held = || held_for(rule, node, now);
    let (reason, note) = match verdict {
        Verdict::Leave(_) => return None,
        v if v.timed_out() => (Reason::TimedOut, format!("{name}: after {}: {v}", held())),
        Verdict::CannotEver { .. } => (Reason::CannotRun, format!("{name}: {verdict}")),
        Verdict::Wait { .. } => (Reason::Held, format!("{name}: held by {taint}: {verdict}")),
        Verdict::Taint => (Reason::Held, format!("{name}: {verdict}")),
        Verdict::Release(Released::Ready) => (Reason::Completed, format!("{name}: ready after {}", held())),
        Verdict::Release(_) => (Reason::Completed, format!("{name}: {verdict}")),
    };
    Some(Announcement { reason, note })
}

/// Counts for a rule's status: nodes by how it stands with them, and no names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Nodes that carry the taint now.
    pub held: u32,
    /// Of those, overdue.
    pub timed_out: u32,
    /// Of those, held for a pod that can never start there.
    pub cannot_run: u32,
    /// Nodes that a dry rule would hold now.
    pub would_hold: u32,
}

impl Tally {
    pub fn count(&mut self, verdict: &Verdict) {
        // One that is let go right now still carries it: a rule may not go before that write is made.
        self.held += u32::from(verdict.holds() || matches!(verdict, Verdict::Release(_)));
        self.timed_out += u32::from(verdict.holds() && verdict.timed_out());
        self.cannot_run += u32::from(matches!(verdict, Verdict::CannotEver { .. }));
    }
}

/// Whether a dry rule would hold the node if it had the taint.
#[must_use]
pub fn would_hold(rules: &Rules, rule: &Rule, seen: &Seen<'_>) -> bool {
    rule.dry_run
        && !rule.retired
        && !seen.node.deleting
        && rule.nodes.matches(&seen.node.labels)
        && !evidence::unmet(rules, rule, seen).is_empty()
}

/// Who keeps how many nodes waiting, and since when the first of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Blockers(pub BTreeMap<Named, (u32, Timestamp)>);

impl Blockers {
    pub fn count(&mut self, verdict: &Verdict, since: Timestamp) {
        let mut named: Vec<&Named> = verdict.unmet().iter().filter_map(Unmet::daemon_set).collect();
        named.dedup();
        for named in named.into_iter().filter(|_| verdict.holds()) {
            let (nodes, first) = self.0.entry(named.clone()).or_insert((0, since));
            *nodes += 1;
            *first = since.min(*first);
        }
    }
}

/// How the node's startup under this rule ended, if it has, and when. `held_before`: by this rule, when last looked at,
/// or let go unready by it.
#[must_use]
pub fn outcome(
    rules: &Rules,
    rule: &Rule,
    seen: &Seen<'_>,
    verdict: &Verdict,
    held_before: bool,
    now: Timestamp,
) -> Option<(Outcome, Timestamp)> {
    let marked = |key| seconds(seen.node, key).filter(|_| rule.is_built_in());
    match verdict {
        // When it was due, not when it was seen: a node that stays overdue, or a restart, makes it no more recent.
        v if v.timed_out() => Some((Outcome::TimedOut, deadline(rule, seen.node).unwrap_or(now))),
        Verdict::Release(Released::Ready) => Some((Outcome::Ready, now)),
        Verdict::Leave(Leave::NotHeld) => {
            let is_ready = || evidence::unmet(rules, rule, seen).is_empty();
            match (marked(keys::STARTUP_TIMED_OUT_AT), marked(keys::STARTUP_COMPLETED_AT)) {
                // Let go unready; if it has become ready since, the rule works after all.
                (Some(at), _) if is_ready() => Some((Outcome::Ready, at)),
                (Some(at), _) => Some((Outcome::TimedOut, at)),
                (None, Some(at)) => Some((Outcome::Ready, at)),
                // Rules of the cluster's own leave no mark of theirs.
                (None, None) if held_before => {
                    let releases = rule.timeout.is_some_and(|timeout| timeout.then == OnTimeout::Release);
                    let overdue = deadline(rule, seen.node).filter(|due| releases && *due <= now && !is_ready());
                    Some(overdue.map_or((Outcome::Ready, now), |due| (Outcome::TimedOut, due)))
                }
                (None, None) => None,
            }
        }
        _ => None,
    }
}

/// When the node was let go unready, if it was.
#[must_use]
pub fn timed_out_at(node: &NodeFacts) -> Option<Timestamp> {
    seconds(node, keys::STARTUP_TIMED_OUT_AT)
}

fn seconds(node: &NodeFacts, key: &str) -> Option<Timestamp> {
    Timestamp::from_second(node.annotations.setting(key)?.parse().ok()?).ok()
}
