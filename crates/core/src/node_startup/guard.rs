//! Stops tainting new nodes when too many of the recent ones never became ready.
//!
//! An autoscaler that sees only nodes it cannot use keeps making more. So when more than a set share of the recent
//! nodes timed out, new ones are left alone until the share is small again: because late nodes became ready after
//! all, or because the bad ones are no longer recent. Then a few nodes are held as a probe, no more than it takes to
//! judge again.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

/// When to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Percent of the recent nodes; 100 or more never stops.
    pub share: u8,
    pub window: Duration,
    /// Fewer than this say nothing.
    pub at_least: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { share: 50, window: Duration::from_secs(30 * 60), at_least: 5 }
    }
}

/// How a node's startup ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Ready,
    TimedOut,
}

/// Whether new nodes are tainted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Guard {
    Open,
    Stopped { timed_out: usize, of: usize },
}

impl Guard {
    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(self, Self::Open)
    }
}

/// The recent outcomes of one rule, by node uid. Remembers deleted nodes: those are what an autoscaler leaves behind.
#[derive(Clone, Debug, Default)]
pub struct History {
    outcomes: BTreeMap<String, (Outcome, Timestamp)>,
    stopped: bool,
}

/// A bound for memory; far more than it takes to see a share.
const REMEMBERED: usize = 4096;

impl History {
    /// Notes how it went, once per node and outcome; a node that becomes ready late has not failed any more.
    pub fn note(&mut self, uid: &str, outcome: Outcome, at: Timestamp) {
        match self.outcomes.get_mut(uid) {
            Some((known, _)) if *known == Outcome::Ready || *known == outcome => {}
            Some(known) => *known = (outcome, at),
            None => {
                self.make_room();
                self.outcomes.insert(uid.to_owned(), (outcome, at));
            }
        }
    }

    /// Whether the node is known to have been let down, and not to have recovered since.
    #[must_use]
    pub fn timed_out(&self, uid: &str) -> bool {
        matches!(self.outcomes.get(uid), Some((Outcome::TimedOut, _)))
    }

    /// Judges by what is recent now. Starting again takes half the share that stopped it, so it does not flutter.
    pub fn judge(&mut self, limits: &Limits, now: Timestamp) -> Guard {
        let window = SignedDuration::try_from(limits.window).unwrap_or(SignedDuration::MAX);
        self.outcomes.retain(|_, (_, at)| now.duration_since(*at) <= window);
        let of = self.outcomes.len();
        let timed_out = self.outcomes.values().filter(|(outcome, _)| *outcome == Outcome::TimedOut).count();
        let share = usize::from(if self.stopped { limits.share / 2 } else { limits.share });
        self.stopped = of >= limits.at_least.max(1) && timed_out * 100 > share * of && limits.share < 100;
        if self.stopped { Guard::Stopped { timed_out, of } } else { Guard::Open }
    }

    fn make_room(&mut self) {
        if self.outcomes.len() < REMEMBERED {
            return;
        }
        let oldest = self.outcomes.iter().min_by_key(|(_, (_, at))| *at).map(|(uid, _)| uid.clone());
        oldest.and_then(|uid| self.outcomes.remove(&uid));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { share: 50, window: Duration::from_secs(600), at_least: 4 };

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_763_000_000 + second).unwrap()
    }

    fn history(ready: usize, timed_out: usize) -> History {
        let mut history = History::default();
        (0..ready).for_each(|i| history.note(&format!("r{i}"), Outcome::Ready, at(0)));
        (0..timed_out).for_each(|i| history.note(&format!("t{i}"), Outcome::TimedOut, at(0)));
        history
    }

    #[test]
    fn half_of_the_nodes_may_time_out_and_no_more() {
        assert_eq!(history(2, 2).judge(&LIMITS, at(1)), Guard::Open);
        assert_eq!(history(2, 3).judge(&LIMITS, at(1)), Guard::Stopped { timed_out: 3, of: 5 });
    }

    #[test]
    fn few_nodes_say_nothing() {
        assert_eq!(history(0, 3).judge(&LIMITS, at(1)), Guard::Open);
        assert_eq!(history(0, 4).judge(&LIMITS, at(1)), Guard::Stopped { timed_out: 4, of: 4 });
    }

    #[test]
    fn late_readiness_heals_but_not_at_the_first_node() {
        let mut history = history(0, 8);
        assert!(!history.judge(&LIMITS, at(1)).is_open());
        (0..5).for_each(|i| history.note(&format!("t{i}"), Outcome::Ready, at(2)));
        assert_eq!(
            history.judge(&LIMITS, at(3)),
            Guard::Stopped { timed_out: 3, of: 8 },
            "37 % is more than half of 50 %"
        );
        history.note("t5", Outcome::Ready, at(4));
        assert_eq!(history.judge(&LIMITS, at(5)), Guard::Open);
    }

    #[test]
    fn time_heals_when_nothing_is_tainted() {
        let mut history = history(0, 8);
        assert!(!history.judge(&LIMITS, at(600)).is_open());
        assert!(history.judge(&LIMITS, at(601)).is_open());
    }

    #[test]
    fn a_ready_node_that_is_seen_overdue_later_has_not_failed() {
        let mut history = history(4, 0);
        (0..4).for_each(|i| history.note(&format!("r{i}"), Outcome::TimedOut, at(1)));
        assert_eq!(history.judge(&LIMITS, at(2)), Guard::Open);
    }

    #[test]
    fn seeing_one_overdue_node_again_does_not_make_it_recent() {
        let mut history = history(0, 8);
        (0..8).for_each(|i| history.note(&format!("t{i}"), Outcome::TimedOut, at(599)));
        assert!(history.judge(&LIMITS, at(601)).is_open());
    }

    #[test]
    fn a_share_of_a_hundred_percent_never_stops() {
        assert_eq!(history(0, 50).judge(&Limits { share: 100, ..LIMITS }, at(1)), Guard::Open);
    }

    #[test]
    fn memory_is_bounded_and_the_oldest_go_first() {
        let mut history = History::default();
        (0..5_000).for_each(|i| history.note(&format!("n{i:05}"), Outcome::Ready, at(i)));
        assert_eq!(history.outcomes.len(), REMEMBERED);
        assert!(!history.outcomes.contains_key("n00000") && history.outcomes.contains_key("n04999"));
    }
}
