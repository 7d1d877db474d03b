//! Every few seconds one look at all nodes together: counts, blockers, and whether tainting must stop.
//!
//! Each replica does it from its own caches, since each may be asked by the API server whether to taint a node.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use groundcrew_core::node_startup::guard::{Guard, History, Outcome};
use groundcrew_core::node_startup::report::{Blockers, Tally, outcome, timed_out_at, would_hold};
use groundcrew_core::node_startup::{NodeFacts, Rules, decide, held_since};
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::ObjectReference;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{info, warn};

use super::metrics::Metrics;
use super::{Shared, record, rules};
use crate::run::Context;

const EVERY: Duration = Duration::from_secs(2);

pub(super) fn start(context: &Context, shared: &Arc<Shared>, metrics: Metrics) {
    let (shared, context) = (Arc::clone(shared), context.clone());
    context.tasks.clone().spawn(context.stopping.clone().run_until_cancelled_owned(async move {
        let mut surveyor = Surveyor { shared, context, metrics, rules: HashMap::new() };
        let mut ticks = interval(EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut leader = surveyor.context.leadership.watch();
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                // A new leader has a record to keep before anybody is tainted.
                Ok(()) = leader.changed() => {}
            }
            surveyor.survey().await;
        }
    }));
}

/// What is remembered of one rule from look to look.
#[derive(Debug, Default)]
struct Memory {
    history: History,
    held: HashSet<String>,
    overdue: HashSet<String>,
    tally: Tally,
    /// This replica has said that tainting is stopped.
    said: bool,
}

impl Memory {
    /// Whoever leads says it once, also one who came to lead only after it had happened.
    fn says_that_it_stopped(&mut self, guard: Guard, leads: bool) -> bool {
        self.said &= !guard.is_open();
        !guard.is_open() && leads && !std::mem::replace(&mut self.said, true)
    }
}

struct Surveyor {
    shared: Arc<Shared>,
    context: Context,
    metrics: Metrics,
    rules: HashMap<String, Memory>,
}

impl Surveyor {
    async fn survey(&mut self) {
        if !self.shared.rules_known() || !*self.shared.world.nodes.synced().borrow() {
            return;
        }
        let rules = self.shared.rules();
        self.rules.retain(|name, _| {
            let kept = rules.rules.iter().any(|rule| rule.name == *name);
            if !kept {
                self.metrics.forget(name);
            }
            kept
        });
        let blockers = self.look(&rules);
        self.metrics.blockers(&blockers);
        self.judge(&rules);
        let leads = self.context.leadership.is_leader();
        if leads {
            let tallies: Vec<(String, Tally)> =
                self.rules.iter().map(|(name, memory)| (name.clone(), memory.tally)).collect();
            record::maintain(&self.shared, &self.context, &tallies).await;
            rules::maintain(&self.shared, &self.context, &rules, &tallies).await;
        }
    }

    /// Nodes that are held, were held at the last look, or were let go not long ago.
    fn look(&mut self, rules: &Rules) -> Blockers {
        let mut nodes: BTreeMap<String, Arc<NodeFacts>> = BTreeMap::new();
        let now = (self.context.clock)();
        let window = SignedDuration::try_from(rules.guard.window).unwrap_or(SignedDuration::MAX);
        let let_down = |node: &NodeFacts| timed_out_at(node).is_some_and(|at| now.duration_since(at) <= window);
        let dry = rules.rules.iter().any(|rule| rule.dry_run);
        self.shared.world.nodes.for_each(|key, node| {
            let held = node.taints.iter().any(|taint| rules.rules.iter().any(|rule| rule.taint.is(taint)));
            let was_held = self.rules.values().any(|memory| memory.held.contains(&node.uid));
            if held || was_held || dry || let_down(node) {
                nodes.insert(key.name.clone(), Arc::clone(node));
            }
        });
        let mut blockers = Blockers::default();
        let daemon_sets = self.shared.world.daemon_sets();
        let before: HashMap<String, HashSet<String>> =
            self.rules.iter_mut().map(|(name, memory)| (name.clone(), std::mem::take(&mut memory.held))).collect();
        self.rules.values_mut().for_each(|memory| memory.tally = Tally::default());
        for node in nodes.values() {
            let scene = self.shared.world.around(&node.name, &daemon_sets);
            let seen = scene.seen(node);
            for (rule, verdict) in decide(rules, &seen, now).verdicts {
                let memory = self.rules.entry(rule.name.clone()).or_default();
                memory.tally.count(&verdict);
                memory.tally.would_hold += u32::from(would_hold(rules, rule, &seen));
                blockers.count(&verdict, held_since(rule, node));
                if verdict.holds() {
                    memory.held.insert(node.uid.clone());
                }
                let held_before = before.get(&rule.name).is_some_and(|held| held.contains(&node.uid))
                    || memory.history.timed_out(&node.uid);
                match outcome(rules, rule, &seen, &verdict, held_before, now) {
                    Some((Outcome::TimedOut, at)) => {
                        memory.history.note(&node.uid, Outcome::TimedOut, at);
                        if memory.overdue.insert(node.uid.clone()) {
                            self.metrics.timed_out(&rule.name);
                        }
                    }
                    Some((Outcome::Ready, at)) => memory.history.note(&node.uid, Outcome::Ready, at),
                    None => {}
                }
            }
        }
        self.forget_the_gone();
        blockers
    }

    /// Uids of nodes that are gone need not be known as overdue; the history keeps what it needs.
    fn forget_the_gone(&mut self) {
        let mut here: HashSet<String> = HashSet::new();
        self.shared.world.nodes.for_each(|_, node| {
            here.insert(node.uid.clone());
        });
        self.rules.values_mut().for_each(|memory| memory.overdue.retain(|uid| here.contains(uid)));
    }

    fn judge(&mut self, rules: &Rules) {
        let now = (self.context.clock)();
        let leads = self.context.leadership.is_leader();
        let mut stopped = BTreeSet::new();
        for rule in &rules.rules {
            let memory = self.rules.entry(rule.name.clone()).or_default();
            let guard = memory.history.judge(&rules.guard, now);
            self.metrics.rule(&rule.name, &memory.tally, guard.is_open());
            match (rules.is_stopped(rule), guard) {
                (false, Guard::Stopped { timed_out, of }) => {
                    warn!(
                        rule = rule.name,
                        timed_out, of, "too many recent nodes timed out: new nodes are not tainted"
                    );
                }
                (true, Guard::Open) => info!(rule = rule.name, "new nodes are tainted again"),
                _ => {}
            }
            let says = memory.says_that_it_stopped(guard, leads);
            let Guard::Stopped { timed_out, of } = guard else { continue };
            stopped.insert(rule.name.clone());
            if says {
                let note = format!("{}: {timed_out} of {of} recent nodes timed out; new ones are not held", rule.name);
                self.context.events.warning(own_namespace(&self.context), "StartupTaintingStopped", note);
            }
        }
        if stopped != rules.stopped {
            self.shared.rules.rcu(|rules| Rules { stopped: stopped.clone(), ..(**rules).clone() });
            self.shared.news();
            // Nodes that were left alone may be taken up by backfill now.
            self.shared.mark_all();
        }
    }
}

/// What is said about all nodes at once.
fn own_namespace(context: &Context) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Namespace".to_owned()),
        name: Some(context.namespace.clone()),
        namespace: Some(context.namespace.clone()),
        ..ObjectReference::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_while_nobody_led_is_said_by_the_next_leader_and_once() {
        let stopped = Guard::Stopped { timed_out: 3, of: 4 };
        let mut memory = Memory::default();
        let looks = [(stopped, false), (stopped, true), (stopped, true), (Guard::Open, true), (stopped, true)];
        assert_eq!(
            looks.map(|(guard, leads)| memory.says_that_it_stopped(guard, leads)),
            [false, true, false, false, true]
        );
    }
}
