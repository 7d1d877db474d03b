//! Whether one pod should make way so that its replacement lands on the other class, and if not, why not.
//!
//! ```text
//! spot dry? ─► stable? ─► last move judged ─► split right? ─► given up? ─► cooldown ─► window ─► candidate ─► node ─► budget ─► turn ─► Move
//! ```
//!
//! Every "no" is a [`Why`]; the first that applies is the answer. `decide` is asked twice per move, on the caches and on
//! what was read anew, and only a move that both name is made.

use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;

use super::memory::{Memory, Moving, fingerprint};
use super::place::{Peer, reorder};
use super::{Class, Kind, Rule, Split};

mod drought;
mod why;
pub use drought::waits_in_vain;
pub use why::{Budgets, Unstable, Why};

/// Times that the configuration sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub cooldown: Duration,
    pub fallback_after: Duration,
    pub return_after: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { cooldown: seconds(10), fallback_after: seconds(60), return_after: seconds(600) }
    }
}

/// A workload as its own object tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    pub kind: Kind,
    pub ending: bool,
    pub paused: bool,
    pub generation: i64,
    pub observed_generation: i64,
    pub replicas: u32,
    pub current: u32,
    pub ready: u32,
    pub updated: u32,
    pub available: u32,
    /// The ordinal of a StatefulSet's first pod.
    pub first_ordinal: u32,
}

/// One pod of the workload; pods that ended are left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    pub name: String,
    pub uid: String,
    pub version: String,
    /// Of the node it is bound to, or else the class it was given.
    pub class: Class,
    pub bound: bool,
    pub ready: bool,
    pub terminating: bool,
    /// Its node is on its way out.
    pub leaving: bool,
    pub exempt: bool,
    pub unschedulable_since: Option<Timestamp>,
    pub rank: Option<u32>,
    /// The user chose the deletion cost.
    pub own_cost: bool,
    pub ordinal: Option<u32>,
    pub budgets: Budgets,
}

/// What the decision may look at.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    pub workload: &'a Workload,
    pub pods: &'a [Pod],
    pub memory: &'a Memory,
    /// Whether the cluster's cap leaves room and nobody has waited longer.
    pub turn: bool,
}

/// Which pod, and in which version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PodRef {
    pub name: String,
    pub uid: String,
    pub version: String,
}

/// What should happen to the workload, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Verdict {
    /// Nothing, until something changes or `until` comes.
    Rest { why: Why, until: Option<Timestamp> },
    /// Only what is remembered changes.
    Remember { why: Why, memory: Memory },
    /// Remember, then evict; the replacement is admitted to the other class.
    Move { pod: PodRef, from: Class, to: Class, memory: Memory },
    /// A pod that waits for its class in vain makes way for one of the other.
    Replace { pod: PodRef, to: Class },
    /// The order of removal is not that of the split.
    Rank { pods: Vec<(PodRef, u32)> },
}

/// A move that did not help may have had bad luck; two had not.
const FUTILE: u32 = 2;

/// Decides for one workload. `takes` tells whether some node of a class would take its pods.
pub fn decide(rule: &Rule, limits: Limits, seen: Seen<'_>, takes: impl Fn(Class) -> bool, now: Timestamp) -> Verdict {
    let Seen { workload, pods, memory, .. } = seen;
    if workload.ending || workload.replicas == 0 {
        return forget(memory, Why::Nothing);
    }
    if let Some(verdict) =
        drought::dry(rule, limits, seen, now).or_else(|| drought::stranded(rule, limits, seen, &takes, now))
    {
        return verdict;
    }
    if let Some(unstable) = unstable(workload, pods) {
        return Verdict::Rest { why: Why::Unstable(unstable), until: drought::overdue_at(limits, pods) };
    }
    let live = live(pods);
    let wanted = rule.split(workload.replicas);
    let marks = marks(rule, seen);
    let cooling = memory.moved.map(|at| later(at, limits.cooldown)).filter(|until| now < *until);
    let memory = judge(memory, pods, excess(wanted, memory, live), &marks, cooling.is_some());
    if let Some(until) = cooling {
        return keep(seen.memory, memory, Verdict::Rest { why: Why::Cooldown, until: Some(until) });
    }
    let allowed = allowed(wanted, &memory, live);
    let verdict = match Class::ALL.into_iter().find(|class| live.of(*class) > allowed.of(*class)) {
        None => settled(rule, limits, seen, &takes, now, &memory, wanted),
        Some(from) => step(rule, seen, &takes, now, &memory, from, live.of(from) - allowed.of(from)),
    };
    keep(seen.memory, memory, verdict)
}

/// What a move or a rest leaves to remember.
fn keep(before: &Memory, after: Memory, verdict: Verdict) -> Verdict {
    match verdict {
        Verdict::Rest { why, .. } | Verdict::Remember { why, .. } if after != *before && !is_new(&verdict) => {
            Verdict::Remember { why, memory: after }
        }
        other => other,
    }
}

fn is_new(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Remember { .. })
}

fn forget(memory: &Memory, why: Why) -> Verdict {
    if memory.is_empty() {
        return Verdict::Rest { why, until: None };
    }
    Verdict::Remember { why, memory: Memory::default() }
}

/// The pods that will stay, by class.
fn live(pods: &[Pod]) -> Split {
    let mut split = Split::default();
    pods.iter().filter(|p| !p.terminating && !p.leaving).for_each(|p| split.add(p.class));
    split
}

/// A drought asks for no more on spot, and takes away nothing that runs there.
fn allowed(wanted: Split, memory: &Memory, live: Split) -> Split {
    let spot = wanted.spot.min(memory.spot_cap().map_or(u32::MAX, |cap| cap.max(live.spot)));
    Split { spot, on_demand: wanted.total() - spot }
}

/// How many pods are on the wrong class.
fn excess(wanted: Split, memory: &Memory, live: Split) -> u32 {
    let allowed = allowed(wanted, memory, live);
    Class::ALL.iter().map(|c| live.of(*c).saturating_sub(allowed.of(*c))).sum()
}

fn later(at: Timestamp, by: Duration) -> Timestamp {
    at.checked_add(by).unwrap_or(Timestamp::MAX)
}

fn unstable(workload: &Workload, pods: &[Pod]) -> Option<Unstable> {
    let Workload { replicas, current, ready, updated, available, .. } = *workload;
    let alive = pods.iter().filter(|p| !p.terminating).count();
    if workload.paused {
        Some(Unstable::Paused)
    } else if workload.observed_generation < workload.generation {
        Some(Unstable::Unobserved)
    } else if updated != replicas || current != replicas {
        Some(Unstable::Rollout)
    } else if ready != replicas || available != replicas {
        Some(Unstable::Unavailable)
    } else if pods.iter().any(|p| p.terminating) || usize::try_from(replicas) != Ok(alive) {
        Some(Unstable::Pods)
    } else if pods.iter().any(|p| !p.ready || !p.bound) {
        Some(Unstable::Unready)
    } else {
        None
    }
}

fn happened(moving: &Moving, pods: &[Pod]) -> bool {
    pods.iter().all(|pod| pod.uid != moving.pod)
}

/// Did the last move help? One that did not happen, because its eviction got lost, tells nothing.
fn judge(memory: &Memory, pods: &[Pod], excess: u32, marks: &str, cooling: bool) -> Memory {
    let mut judged = memory.clone();
    // A pod that is still seen so soon may be about to go.
    if cooling && !judged.moving.as_ref().is_some_and(|m| happened(m, pods)) {
        return judged;
    }
    if let Some(before) = judged.moving.take().filter(|m| happened(m, pods)) {
        judged.futile = if excess < before.excess { 0 } else { judged.futile + 1 };
        if judged.futile >= FUTILE {
            judged.given_up = Some(marks.to_owned());
        }
    }
    // Something changed: there is hope again.
    if judged.given_up.as_deref().is_some_and(|given_up| given_up != marks) {
        judged.given_up = None;
        judged.futile = 0;
    }
    if !cooling {
        judged.moved = None;
    }
    judged
}

/// What would give hope after moves that did not help: another rule or size, or a pod that we admitted since.
///
/// In a drought our own pods tell nothing: each trial that fails admits some.
fn marks(rule: &Rule, seen: Seen<'_>) -> String {
    let telling = |p: &&Pod| p.rank.is_some() && seen.memory.drought.is_none();
    let mut admitted: Vec<&str> = seen.pods.iter().filter(telling).map(|p| p.uid.as_str()).collect();
    admitted.sort_unstable();
    let size = format!("{} {}", seen.workload.generation, seen.workload.replicas);
    let rule = rule.text();
    fingerprint([rule.as_str(), size.as_str()].into_iter().chain(admitted))
}

/// One pod of `from` is to make way.
fn step(
    rule: &Rule,
    seen: Seen<'_>,
    takes: &impl Fn(Class) -> bool,
    now: Timestamp,
    memory: &Memory,
    from: Class,
    excess: u32,
) -> Verdict {
    let rest = |why| Verdict::Rest { why, until: None };
    let to = from.other();
    if memory.given_up.is_some() {
        return rest(Why::NoProgress);
    }
    if let Some(crate::cron::Opening::Closed { opens }) = rule.window.as_ref().map(|w| w.at(now)) {
        return Verdict::Rest { why: Why::Window, until: opens };
    }
    let candidates = candidates(rule, seen, from);
    if candidates.is_empty() {
        return rest(Why::Exempt);
    }
    if !takes(to) {
        return rest(Why::NoNode(to));
    }
    let Some(pod) = candidates.iter().find(|pod| pod.budgets == Budgets::Allow) else {
        let budgets = candidates.first().map(|pod| pod.budgets.clone()).unwrap_or_default();
        return rest(Why::Budget(budgets));
    };
    if !seen.turn {
        return rest(Why::Turn);
    }
    let moving = Some(Moving { pod: pod.uid.clone(), excess });
    let memory = Memory { moved: Some(now), moving, ..memory.clone() };
    Verdict::Move { pod: reference(pod), from, to, memory }
}

/// Pods whose replacement would be of the other class, best first.
fn candidates<'a>(rule: &Rule, seen: Seen<'a>, from: Class) -> Vec<&'a Pod> {
    let rank = |pod: &Pod| match (seen.workload.kind, pod.ordinal) {
        (Kind::StatefulSet, Some(ordinal)) => ordinal.checked_sub(seen.workload.first_ordinal).map(|index| index + 1),
        _ => pod.rank,
    };
    // A StatefulSet's replacement gets its class by ordinal, so only an ordinal of the other class is of use.
    let helps = |pod: &&Pod| {
        seen.workload.kind == Kind::Deployment || rank(pod).is_some_and(|r| rule.share.class_of(r) != from)
    };
    let movable = |p: &&Pod| p.class == from && !p.leaving && !p.exempt;
    let mut candidates: Vec<&Pod> = seen.pods.iter().filter(movable).filter(helps).collect();
    let last = |pod: &Pod| rank(pod).unwrap_or(u32::MAX);
    candidates.sort_by(|a, b| last(b).cmp(&last(a)).then_with(|| a.name.cmp(&b.name)));
    candidates
}

/// The split is what it may be: nothing to move, but perhaps a drought to end or ranks to mend.
fn settled(
    rule: &Rule,
    limits: Limits,
    seen: Seen<'_>,
    takes: &impl Fn(Class) -> bool,
    now: Timestamp,
    memory: &Memory,
    wanted: Split,
) -> Verdict {
    if let Some(drought) = memory.drought {
        return drought::goes_on(limits, memory, drought, live(seen.pods), wanted, takes, now);
    }
    let pods = match seen.workload.kind {
        Kind::Deployment => misranked(rule, seen),
        Kind::StatefulSet => Vec::new(),
    };
    if pods.is_empty() {
        return Verdict::Rest { why: Why::Balanced, until: None };
    }
    Verdict::Rank { pods }
}

fn misranked(rule: &Rule, seen: Seen<'_>) -> Vec<(PodRef, u32)> {
    if seen.pods.iter().any(|p| p.own_cost) {
        return Vec::new();
    }
    let peers: Vec<Peer> = seen.pods.iter().map(|p| Peer { class: p.class, rank: p.rank }).collect();
    let changes = reorder(rule.share, &peers);
    changes.into_iter().filter_map(|(at, rank)| Some((reference(seen.pods.get(at)?), rank))).collect()
}

fn reference(pod: &Pod) -> PodRef {
    PodRef { name: pod.name.clone(), uid: pod.uid.clone(), version: pod.version.clone() }
}

#[cfg(test)]
mod tests;
