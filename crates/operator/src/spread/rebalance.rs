//! Moves by the leader: decided on the caches, decided again on what was read anew, remembered, then made.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use groundcrew_core::feature::Feature;
use groundcrew_core::keys;
use groundcrew_core::spread::rebalance::{PodRef, Seen, decide};
use groundcrew_core::spread::{Class, Kind, Memory, Rule, Verdict, Why, place};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use serde_json::json;
use tokio::time::Instant;
use tracing::{debug, info};

use super::fresh::Fresh;
use super::gather::Snapshot;
use super::objects::WorkloadFacts;
use super::tell::Tell;
use super::turns::Turns;
use super::{Shared, fresh, locked, untagged};
use crate::run::Context;
use crate::runtime::apply::{self, Outcome, Write, WriteError};
use crate::runtime::cache::Key;
use crate::runtime::queue::Next;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Read(#[from] fresh::Error),
    #[error("the write {0}")]
    Write(#[from] WriteError),
    #[error("the pod keeps changing")]
    Conflict,
    #[error("what was read is too old to act on")]
    TooLate,
}

/// Another look while others have their turn.
const TURN: Duration = Duration::from_secs(1);
/// After a refusal; doubles with each.
const BLOCKED: Duration = Duration::from_secs(10);
const BLOCKED_LONGEST: Duration = Duration::from_secs(300);

#[derive(Debug)]
pub struct Rebalancer {
    context: Context,
    shared: Arc<Shared>,
    turns: Turns,
    tell: Tell,
    refusals: Mutex<HashMap<Key, u32>>,
}

/// The workload one reconciliation is about.
struct Subject<'a> {
    tag: &'a Key,
    kind: Kind,
    key: Key,
    facts: Arc<WorkloadFacts>,
    rule: Rule,
}

impl Rebalancer {
    #[must_use]
    pub fn new(context: &Context) -> Self {
        let config = &context.spread.config;
        Self {
            turns: Turns::new(config.max_moves, config.moves_per_second),
            context: context.clone(),
            shared: Arc::clone(&context.spread),
            tell: Tell::new(context.events.clone(), context.spread.enforces),
            refusals: Mutex::default(),
        }
    }

    pub async fn reconcile(&self, tag: &Key) -> Result<Next, Error> {
        let started = Instant::now();
        let Some((kind, key)) = untagged(tag) else { return Ok(Next::Change) };
        // Cooldowns and droughts of an earlier leader must not be overlooked, let alone overwritten.
        if !self.shared.memories.are_known() {
            return Ok(Next::After(TURN));
        }
        let Some(facts) = self.shared.workload(kind, &key) else {
            self.shared.metrics.forget(kind, &key);
            self.forget(tag).await?;
            return Ok(Next::Change);
        };
        let rule = match self.shared.rule(&key.namespace, &facts) {
            Ok(Some(rule)) => rule,
            Ok(None) => {
                self.turns.leave(tag);
                self.shared.metrics.forget(kind, &key);
                return Ok(Next::Change);
            }
            Err(invalid) => {
                self.turns.leave(tag);
                self.shared.metrics.forget(kind, &key);
                self.tell.warn(tag, reference(kind, &key, &facts), "ConfigurationError", &invalid.to_string());
                self.shared.metrics.reconciled(kind, "invalid", started.elapsed());
                return Ok(Next::Change);
            }
        };
        let subject = Subject { tag, kind, key, facts, rule };
        let (result, next) = self.look(&subject).await?;
        self.shared.metrics.reconciled(kind, result, started.elapsed());
        Ok(next)
    }

    fn decide(&self, subject: &Subject<'_>, facts: &WorkloadFacts, snapshot: &Snapshot, turn: bool) -> Verdict {
        let memory = self.shared.memories.get(&facts.uid);
        let now = (self.context.clock)();
        let seen = Seen { workload: &snapshot.workload, pods: &snapshot.pods, memory: &memory, turn };
        let takes = |class| self.shared.target(facts, snapshot, class, now).is_some();
        decide(&subject.rule, self.shared.config.limits, seen, takes, now)
    }

    async fn look(&self, subject: &Subject<'_>) -> Result<(&'static str, Next), Error> {
        let snapshot = self.shared.snapshot(subject.kind, &subject.key, &subject.facts);
        self.shared.metrics.replicas(subject.kind, &subject.key, snapshot.split());
        // Who only observes need not wait for a turn.
        let verdict = self.decide(subject, &subject.facts, &snapshot, !self.shared.enforces);
        debug!(?verdict, "decided");
        if !self.shared.enforces {
            self.tell.observed(subject.tag, &verdict);
            return Ok((name(&verdict), self.next(subject, &verdict)));
        }
        match &verdict {
            Verdict::Rest { why: Why::Turn, .. } | Verdict::Move { .. } => self.try_move(subject).await,
            Verdict::Rest { why, .. } => {
                self.rest(subject, why, &snapshot);
                Ok((why.name(), self.next(subject, &verdict)))
            }
            Verdict::Remember { why, memory } => {
                self.tell_memory(subject, why);
                self.remember(subject, memory).await?;
                // With that in mind the next look may find more to do.
                Ok((why.name(), Next::After(Duration::from_millis(100))))
            }
            Verdict::Rank { pods } => {
                let next = self.rank(subject, pods).await?;
                Ok((name(&verdict), next))
            }
            Verdict::Replace { .. } => self.replace(subject).await,
        }
    }

    /// A move is wanted: takes a turn, reads anew, and moves if the answer is still the same.
    async fn try_move(&self, subject: &Subject<'_>) -> Result<(&'static str, Next), Error> {
        let uid = &subject.facts.uid;
        let now = (self.context.clock)();
        let under_way = || self.shared.memories.in_flight(now);
        let turn = self.turns.claim(subject.tag, uid, under_way, Instant::now());
        let Some(_turn) = turn else { return Ok((Why::Turn.name(), Next::After(TURN))) };
        let Some(fresh) = self.shared.read(&self.context, subject.kind, &subject.key, uid).await? else {
            return Ok(("gone", Next::Change));
        };
        // The rule may have changed with the rest.
        if self.shared.rule(&subject.key.namespace, &fresh.facts).ok().flatten().as_ref() != Some(&subject.rule) {
            return Ok(("changed", Next::After(TURN)));
        }
        let verdict = self.decide(subject, &fresh.facts, &fresh.snapshot, true);
        let result = name(&verdict);
        let Verdict::Move { pod, from, to, memory } = verdict else {
            if let Verdict::Rest { why, .. } = &verdict {
                self.rest(subject, why, &fresh.snapshot);
            }
            return Ok((result, self.next(subject, &verdict)));
        };
        let room = self.shared.hold_room(&fresh.facts, &fresh.snapshot, to, (self.context.clock)());
        let Some(room) = room else { return Ok(("changed", Next::After(TURN))) };
        if !self.shared.nodes_agree(&self.context, &fresh, &pod, &room.node).await? {
            return Ok(("changed", Next::After(TURN)));
        }
        // Asked before it is told: a refusal in earnest would have taken its share of the budget.
        match self.evict(subject, &fresh, &pod, true).await? {
            Outcome::Done(_) => {}
            refusal => return self.refused(subject, refusal),
        }
        let before = self.shared.memories.get(uid);
        if !matches!(self.remember(subject, &memory).await?, Outcome::Done(_)) {
            return Ok(("not_remembered", Next::After(TURN)));
        }
        room.keep();
        // If this fails, whether it happened is unknown: it stays remembered, and is judged by whether the pod is there.
        match self.evict(subject, &fresh, &pod, false).await? {
            Outcome::Done(_) => {
                let note = format!("Evicted pod {:?} from {from}: its replacement goes to {to}", pod.name);
                self.tell.moved(subject.tag, self.reference(subject), note);
                info!(workload = %subject.key, pod = pod.name, %from, %to, "pod evicted");
                locked(&self.refusals).remove(subject.tag);
                Ok((result, Next::After(self.shared.config.limits.cooldown)))
            }
            refusal => {
                self.remember(subject, &before).await?;
                self.refused(subject, refusal)
            }
        }
    }

    fn refused(&self, subject: &Subject<'_>, outcome: Outcome) -> Result<(&'static str, Next), Error> {
        match outcome {
            Outcome::Blocked { retry_after } => {
                self.shared.metrics.blocked(&subject.key.namespace);
                self.turns.step_aside(subject.tag);
                let note = "a PodDisruptionBudget allows no disruption now";
                self.tell.warn(subject.tag, self.reference(subject), "RebalanceBlocked", note);
                Ok(("blocked_by_pdb", Next::After(self.backoff(subject.tag).max(retry_after.unwrap_or_default()))))
            }
            Outcome::Conflict => Err(Error::Conflict),
            _ => Ok(("gone", Next::After(TURN))),
        }
    }

    /// Pending pods hold nobody up: they go one after the other without a turn.
    async fn replace(&self, subject: &Subject<'_>) -> Result<(&'static str, Next), Error> {
        if !self.turns.may_write() {
            return Ok((Why::Turn.name(), Next::After(TURN)));
        }
        let fresh = self.shared.read(&self.context, subject.kind, &subject.key, &subject.facts.uid).await?;
        let Some(fresh) = fresh else { return Ok(("gone", Next::Change)) };
        let verdict = self.decide(subject, &fresh.facts, &fresh.snapshot, false);
        let result = name(&verdict);
        let Verdict::Replace { pod, to } = verdict else { return Ok((result, Next::After(TURN))) };
        match self.evict(subject, &fresh, &pod, false).await? {
            Outcome::Done(_) => {
                if to == Class::OnDemand {
                    self.shared.metrics.fell_back(&subject.key.namespace);
                }
                info!(workload = %subject.key, pod = pod.name, %to, "pod that found no node evicted");
                Ok((result, Next::After(TURN / 4)))
            }
            Outcome::Conflict => Err(Error::Conflict),
            _ => Ok(("gone", Next::After(TURN))),
        }
    }

    async fn evict(&self, subject: &Subject<'_>, fresh: &Fresh, pod: &PodRef, dry_run: bool) -> Result<Outcome, Error> {
        let within = fresh.left().ok_or(Error::TooLate)?;
        let target = apply::pod(&subject.key.namespace, &pod.name, &pod.uid);
        let write = Write::Evict { version: Some(pod.version.clone()), dry_run, within };
        Ok(self.context.writer.write(Feature::Spread, &target, &write).await?)
    }

    async fn remember(&self, subject: &Subject<'_>, memory: &Memory) -> Result<Outcome, Error> {
        Ok(self.shared.memories.write(&self.context, &subject.facts.uid, memory).await?)
    }

    async fn rank(&self, subject: &Subject<'_>, pods: &[(PodRef, u32)]) -> Result<Next, Error> {
        for (pod, rank) in pods {
            if !self.turns.may_write() {
                return Ok(Next::After(TURN));
            }
            let annotations = json!({
                keys::SPREAD_RANK: rank.to_string(),
                keys::DELETION_COST: place::deletion_cost(*rank).to_string(),
            });
            let patch = json!({"metadata": {"annotations": annotations}});
            let write = Write::Merge { version: pod.version.clone(), patch };
            let target = apply::pod(&subject.key.namespace, &pod.name, &pod.uid);
            // A pod that changed comes back with its change.
            self.context.writer.write(Feature::Spread, &target, &write).await?;
        }
        Ok(Next::Change)
    }

    fn rest(&self, subject: &Subject<'_>, why: &Why, snapshot: &Snapshot) {
        let reference = || self.reference(subject);
        match why {
            Why::Balanced => {
                self.turns.leave(subject.tag);
                locked(&self.refusals).remove(subject.tag);
                self.tell.settled(subject.tag, reference(), snapshot.split());
            }
            why if why.is_blocked() => {
                self.turns.step_aside(subject.tag);
                if let Why::Budget(_) = why {
                    self.shared.metrics.blocked(&subject.key.namespace);
                }
                self.tell.warn(subject.tag, reference(), "RebalanceBlocked", &why.to_string());
            }
            _ => {
                self.turns.step_aside(subject.tag);
                if let Some(missing) = self.shared.missing_label(snapshot, (self.context.clock)()) {
                    self.tell.warn(subject.tag, reference(), "ConfigurationError", &missing);
                }
            }
        }
    }

    fn tell_memory(&self, subject: &Subject<'_>, why: &Why) {
        match why {
            Why::Dry => self.tell.warn(subject.tag, self.reference(subject), "SpotFallback", &why.to_string()),
            Why::NoProgress => {
                self.tell.warn(subject.tag, self.reference(subject), "RebalanceBlocked", &why.to_string());
            }
            Why::Return | Why::DroughtOver => info!(workload = %subject.key, "{why}"),
            _ => {}
        }
    }

    /// When to look again.
    fn next(&self, subject: &Subject<'_>, verdict: &Verdict) -> Next {
        let resync = self.context.config.controller.resync_period;
        let Verdict::Rest { why, until } = verdict else { return Next::After(resync) };
        if let Some(until) = until {
            return Next::After(wait(*until, (self.context.clock)()));
        }
        match why {
            Why::Nothing | Why::Balanced | Why::NoProgress => Next::Change,
            Why::Budget(_) => Next::After(self.backoff(subject.tag)),
            Why::Turn => Next::After(TURN),
            _ => Next::After(resync),
        }
    }

    fn backoff(&self, tag: &Key) -> Duration {
        let mut refusals = locked(&self.refusals);
        let count = refusals.entry(tag.clone()).or_default();
        let wait = after_refusals(*count);
        *count = count.saturating_add(1);
        wait
    }

    fn reference(&self, subject: &Subject<'_>) -> ObjectReference {
        reference(subject.kind, &subject.key, &subject.facts)
    }

    /// Forgets workloads that are gone.
    async fn forget(&self, tag: &Key) -> Result<(), Error> {
        self.turns.leave(tag);
        self.tell.forget(tag);
        locked(&self.refusals).remove(tag);
        let mut known = self.shared.memories.known();
        if known.is_empty() || !self.shared.enforces {
            return Ok(());
        }
        for cache in [&self.shared.deployments, &self.shared.stateful_sets] {
            if !*cache.synced().borrow() {
                return Ok(());
            }
            cache.for_each(|_, facts| known.retain(|uid| *uid != facts.uid));
        }
        for uid in known {
            self.shared.memories.write(&self.context, &uid, &Memory::default()).await?;
        }
        Ok(())
    }
}

fn after_refusals(count: u32) -> Duration {
    BLOCKED.saturating_mul(2_u32.saturating_pow(count)).min(BLOCKED_LONGEST)
}

fn wait(until: Timestamp, now: Timestamp) -> Duration {
    // A little later rather than a little early: early would only look again.
    Duration::try_from(until.duration_since(now)).unwrap_or_default() + Duration::from_millis(10)
}

fn name(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Rest { why, .. } | Verdict::Remember { why, .. } => why.name(),
        Verdict::Move { .. } => "moved",
        Verdict::Replace { .. } => "replaced",
        Verdict::Rank { .. } => "ranked",
    }
}

fn reference(kind: Kind, key: &Key, facts: &WorkloadFacts) -> ObjectReference {
    ObjectReference {
        api_version: Some("apps/v1".to_owned()),
        kind: Some(kind.name().to_owned()),
        namespace: Some(key.namespace.clone()),
        name: Some(key.name.clone()),
        uid: Some(facts.uid.clone()),
        ..ObjectReference::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_refusal_doubles_the_wait_up_to_five_minutes() {
        let waits: Vec<u64> = (0..7).map(|count| after_refusals(count).as_secs()).collect();
        assert_eq!(waits, [10, 20, 40, 80, 160, 300, 300]);
        assert_eq!(after_refusals(u32::MAX), BLOCKED_LONGEST);
    }
}
