//! Spot ran dry: who falls back, and when the workload returns.

use std::time::Duration;

use jiff::Timestamp;

use super::{FUTILE, Limits, Pod, Seen, Verdict, Why, candidates, happened, later, live, marks, reference};
use crate::spread::memory::{Drought, Memory};
use crate::spread::{Class, Rule, Split};

/// As long as it takes every admission replica to hear of a drought.
const HEARD: Duration = Duration::from_secs(1);
/// The wait before a return doubles up to this many times.
const DOUBLINGS: u32 = 4;

/// Pods wait for spot in vain.
///
/// Whether on-demand has a node for them is not asked: an autoscaler makes one only for a pod that waits for it.
pub(super) fn dry(rule: &Rule, limits: Limits, seen: Seen<'_>, now: Timestamp) -> Option<Verdict> {
    let last = |p: &&Pod| (p.ordinal.or(p.rank), p.name.clone());
    let pod = seen.pods.iter().filter(|p| overdue(limits, p, Class::Spot, now)).max_by_key(last)?;
    let known = seen.memory.drought.filter(|d| !d.trial);
    let Some(drought) = known else {
        let times = seen.memory.drought.map_or(0, |d| d.times) + 1;
        let drought = Drought { since: now, cap: 0, times, trial: false };
        let mut memory = Memory { drought: Some(drought), moving: None, ..seen.memory.clone() };
        // A trial that cost a pod its place and did not run is a move that did not help.
        if seen.memory.drought.is_some() && seen.memory.moving.as_ref().is_some_and(|m| happened(m, seen.pods)) {
            memory.futile += 1;
            memory.given_up = (memory.futile >= FUTILE).then(|| marks(rule, seen));
        }
        return Some(Verdict::Remember { why: Why::Dry, memory });
    };
    let heard = later(drought.since, HEARD);
    if now < heard {
        return Some(Verdict::Rest { why: Why::Dry, until: Some(heard) });
    }
    Some(Verdict::Replace { pod: reference(pod), to: Class::OnDemand })
}

/// On-demand had no room either: what waits there keeps its workload from resting, so the return begins with it.
pub(super) fn stranded(
    rule: &Rule,
    limits: Limits,
    seen: Seen<'_>,
    takes: &impl Fn(Class) -> bool,
    now: Timestamp,
) -> Option<Verdict> {
    let drought = seen.memory.drought?;
    let spot = live(seen.pods).spot;
    let candidates = candidates(rule, seen, Class::OnDemand);
    let pod = candidates.into_iter().find(|p| overdue(limits, p, Class::OnDemand, now))?;
    if spot >= rule.split(seen.workload.replicas).spot {
        return None;
    }
    if drought.trial {
        return (spot < drought.cap).then(|| Verdict::Replace { pod: reference(pod), to: Class::Spot });
    }
    (now >= returns_at(limits, drought) && takes(Class::Spot)).then(|| try_spot(seen.memory, drought, spot))
}

fn returns_at(limits: Limits, drought: Drought) -> Timestamp {
    later(drought.since, limits.return_after * 2_u32.pow(drought.times.saturating_sub(1).min(DOUBLINGS)))
}

/// One more than there are may go to spot.
fn try_spot(memory: &Memory, drought: Drought, spot: u32) -> Verdict {
    let trial = Drought { cap: spot + 1, trial: true, ..drought };
    Verdict::Remember { why: Why::Return, memory: Memory { drought: Some(trial), ..memory.clone() } }
}

/// Since when a pod finds no node of its class.
fn waits_for(pod: &Pod, class: Class) -> Option<Timestamp> {
    pod.unschedulable_since.filter(|_| pod.class == class && !pod.bound && !pod.terminating && !pod.exempt)
}

/// The class of which a pod has waited for a node for too long.
#[must_use]
pub fn waits_in_vain(limits: Limits, pods: &[Pod], now: Timestamp) -> Option<Class> {
    Class::ALL.into_iter().find(|class| pods.iter().any(|pod| overdue(limits, pod, *class, now)))
}

fn overdue(limits: Limits, pod: &Pod, class: Class, now: Timestamp) -> bool {
    waits_for(pod, class).is_some_and(|since| later(since, limits.fallback_after) <= now)
}

pub(super) fn overdue_at(limits: Limits, pods: &[Pod]) -> Option<Timestamp> {
    pods.iter().filter_map(|p| waits_for(p, Class::Spot)).min().map(|since| later(since, limits.fallback_after))
}

/// The split is what a drought allows: it is over, or one pod is tried, or it goes on.
pub(super) fn goes_on(
    limits: Limits,
    memory: &Memory,
    drought: Drought,
    live: Split,
    wanted: Split,
    takes: &impl Fn(Class) -> bool,
    now: Timestamp,
) -> Verdict {
    if live.spot >= wanted.spot || (drought.trial && live.spot >= drought.cap) {
        return Verdict::Remember { why: Why::DroughtOver, memory: Memory { drought: None, ..memory.clone() } };
    }
    let again = returns_at(limits, drought);
    if drought.trial || now < again {
        return Verdict::Rest { why: Why::Drought, until: (!drought.trial).then_some(again) };
    }
    if memory.given_up.is_some() {
        return Verdict::Rest { why: Why::NoProgress, until: None };
    }
    if !takes(Class::Spot) {
        return Verdict::Rest { why: Why::NoNode(Class::Spot), until: None };
    }
    try_spot(memory, drought, live.spot)
}
