//! Whose turn it is to move a pod: the workload that has been wrong for longest, within the cluster's cap and pace.

use std::collections::{BTreeSet, HashMap};
use std::sync::Mutex;

use jiff::Timestamp;
use tokio::time::Instant;

use super::locked;
use crate::runtime::cache::Key;

#[derive(Debug)]
struct State {
    since: HashMap<Key, Timestamp>,
    waiting: BTreeSet<(Timestamp, Key)>,
    tokens: f64,
    filled: Instant,
}

#[derive(Debug)]
pub struct Turns {
    cap: usize,
    per_second: f64,
    state: Mutex<State>,
}

impl Turns {
    #[must_use]
    pub fn new(cap: usize, per_second: u32) -> Self {
        // A fresh leader starts with one token: taking over must not speed things up.
        let state = State { since: HashMap::new(), waiting: BTreeSet::new(), tokens: 1.0, filled: Instant::now() };
        Self { cap, per_second: f64::from(per_second), state: Mutex::new(state) }
    }

    /// Asks for a turn while `in_flight` moves are under way.
    pub fn claim(&self, key: &Key, in_flight: usize, now: Timestamp) -> bool {
        let mut state = locked(&self.state);
        let since = *state.since.entry(key.clone()).or_insert(now);
        state.waiting.insert((since, key.clone()));
        let free = self.cap.saturating_sub(in_flight);
        let first = state.waiting.iter().take(free).any(|(_, other)| other == key);
        if !first || !state.take_token(self.per_second) {
            return false;
        }
        // Others that have waited less need not wait for this one any more.
        state.waiting.remove(&(since, key.clone()));
        true
    }

    /// The workload does not want to move any more.
    pub fn leave(&self, key: &Key) {
        let mut state = locked(&self.state);
        if let Some(since) = state.since.remove(key) {
            state.waiting.remove(&(since, key.clone()));
        }
    }

    /// It cannot move now; it keeps its place but holds nobody up.
    pub fn step_aside(&self, key: &Key) {
        let mut state = locked(&self.state);
        if let Some(since) = state.since.get(key).copied() {
            state.waiting.remove(&(since, key.clone()));
        }
    }
}

impl State {
    fn take_token(&mut self, per_second: f64) -> bool {
        let now = Instant::now();
        let grown = self.tokens + (now - self.filled).as_secs_f64() * per_second;
        self.tokens = grown.min(per_second.max(1.0));
        self.filled = now;
        if self.tokens < 1.0 {
            return false;
        }
        self.tokens -= 1.0;
        true
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn key(name: &str) -> Key {
        Key { namespace: "ns".into(), name: name.into() }
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_imbalance_goes_first() {
        let turns = Turns::new(1, 100);
        assert!(!turns.claim(&key("young"), 1, at(20)) && !turns.claim(&key("old"), 1, at(10)));
        assert!(!turns.claim(&key("young"), 0, at(30)));
        assert!(turns.claim(&key("old"), 0, at(30)));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(!turns.claim(&key("young"), 1, at(31)), "the cap is one");
        assert!(turns.claim(&key("young"), 0, at(32)));
    }

    #[tokio::test(start_paused = true)]
    async fn who_steps_aside_holds_nobody_up_and_keeps_its_place() {
        let turns = Turns::new(1, 100);
        assert!(!turns.claim(&key("old"), 1, at(10)));
        turns.step_aside(&key("old"));
        assert!(turns.claim(&key("young"), 0, at(20)));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(!turns.claim(&key("young"), 1, at(21)) && !turns.claim(&key("old"), 1, at(22)));
        assert!(!turns.claim(&key("young"), 0, at(23)));
        assert!(turns.claim(&key("old"), 0, at(24)));
    }

    #[tokio::test(start_paused = true)]
    async fn moves_start_at_the_given_pace() {
        let turns = Turns::new(1000, 5);
        let claimed = |from: i64| (0..100).filter(|i| turns.claim(&key(&format!("{from}-{i}")), 0, at(from))).count();
        assert_eq!(claimed(1), 1);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(claimed(2), 5);
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!(claimed(3), 5, "idle time is not saved up");
    }
}
