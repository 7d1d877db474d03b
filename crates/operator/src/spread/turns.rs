//! Whose turn it is to move a pod: the workload that has been wrong for longest, within the cluster's cap and pace.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use super::locked;
use crate::runtime::cache::Key;

/// Before anybody goes, all that are wrong have had the time to say so: moves keep those busy who would listen.
const HEARING: Duration = Duration::from_secs(1);
/// Ranks of pods that came without us, and evictions of pods that only wait: 10,000 of them take three minutes.
const WRITES_PER_SECOND: u32 = 50;

#[derive(Debug)]
struct State {
    since: HashMap<Key, Instant>,
    waiting: BTreeSet<(Instant, Key)>,
    /// Workloads that have their turn and may not have written their move down yet.
    held: HashSet<String>,
    moves: Tokens,
    writes: Tokens,
}

/// A bucket that holds what comes in within a second, and one at the least.
#[derive(Debug)]
struct Tokens {
    per_second: f64,
    left: f64,
    filled: Instant,
}

#[derive(Debug)]
pub struct Turns {
    cap: usize,
    state: Mutex<State>,
}

/// Leave to move one pod; counts as a move under way until it is dropped.
#[derive(Debug)]
pub struct Turn<'a> {
    turns: &'a Turns,
    uid: String,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        locked(&self.turns.state).held.remove(&self.uid);
    }
}

impl Turns {
    #[must_use]
    pub fn new(cap: usize, per_second: u32) -> Self {
        // A fresh leader starts with one token: taking over must not speed things up.
        let state = State {
            since: HashMap::new(),
            waiting: BTreeSet::new(),
            held: HashSet::new(),
            moves: Tokens::new(per_second),
            writes: Tokens::new(WRITES_PER_SECOND),
        };
        Self { cap, state: Mutex::new(state) }
    }

    /// Whether it is time for one of the writes that disturb nobody and need no turn.
    pub fn may_write(&self) -> bool {
        locked(&self.state).writes.take()
    }

    /// Asks for a turn; `under_way` tells the workloads with a move that is written down.
    pub fn claim(
        &self,
        key: &Key,
        uid: &str,
        under_way: impl FnOnce() -> HashSet<String>,
        now: Instant,
    ) -> Option<Turn<'_>> {
        let mut state = locked(&self.state);
        let since = *state.since.entry(key.clone()).or_insert(now);
        state.waiting.insert((since, key.clone()));
        // Asked for under the lock, so that no move is missed between being held and being written down.
        let mut busy = under_way();
        busy.extend(state.held.iter().cloned());
        busy.remove(uid);
        let free = self.cap.saturating_sub(busy.len());
        let first = state.waiting.iter().take(free).any(|(_, other)| other == key);
        if now.saturating_duration_since(since) < HEARING || !first || !state.moves.take() {
            return None;
        }
        // Others that have waited less need not wait for this one any more.
        state.waiting.remove(&(since, key.clone()));
        state.held.insert(uid.to_owned());
        Some(Turn { turns: self, uid: uid.to_owned() })
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

impl Tokens {
    fn new(per_second: u32) -> Self {
        Self { per_second: f64::from(per_second), left: 1.0, filled: Instant::now() }
    }

    fn take(&mut self) -> bool {
        let now = Instant::now();
        let grown = self.left + (now - self.filled).as_secs_f64() * self.per_second;
        self.left = grown.min(self.per_second.max(1.0));
        self.filled = now;
        if self.left < 1.0 {
            return false;
        }
        self.left -= 1.0;
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;

    fn key(name: &str) -> Key {
        Key { namespace: "ns".into(), name: name.into() }
    }

    fn at(second: u64) -> Instant {
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        *START + Duration::from_secs(second)
    }

    fn others(count: usize) -> impl FnOnce() -> HashSet<String> {
        move || (0..count).map(|i| format!("other {i}")).collect()
    }

    /// Whether it got a turn, which it then gives back.
    fn claims(turns: &Turns, name: &str, under_way: usize, now: Instant) -> bool {
        turns.claim(&key(name), name, others(under_way), now).is_some()
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_imbalance_goes_first() {
        let turns = Turns::new(1, 100);
        assert!(!claims(&turns, "young", 1, at(20)) && !claims(&turns, "old", 1, at(10)));
        assert!(!claims(&turns, "young", 0, at(30)));
        assert!(claims(&turns, "old", 0, at(30)));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(!claims(&turns, "young", 1, at(31)), "the cap is one");
        assert!(claims(&turns, "young", 0, at(32)));
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_goes_before_the_others_could_ask() {
        let turns = Turns::new(1, 100);
        assert!(!claims(&turns, "quick", 0, at(10)));
        assert!(!claims(&turns, "slow", 0, at(10)));
        assert!(claims(&turns, "quick", 0, at(11)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_counts_before_its_move_is_written_down_and_once_after() {
        let turns = Turns::new(2, 100);
        assert!(["a", "b", "c"].iter().all(|name| !claims(&turns, name, 2, at(0))));
        let first = turns.claim(&key("a"), "a", others(0), at(1)).unwrap();
        tokio::time::advance(Duration::from_secs(1)).await;
        let written = || HashSet::from(["a".to_owned()]);
        let second = turns.claim(&key("b"), "b", written, at(2)).unwrap();
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(turns.claim(&key("c"), "c", written, at(3)).is_none());
        drop(second);
        assert!(turns.claim(&key("c"), "c", written, at(4)).is_some());
        drop(first);
    }

    #[tokio::test(start_paused = true)]
    async fn who_steps_aside_holds_nobody_up_and_keeps_its_place() {
        let turns = Turns::new(1, 100);
        assert!(!claims(&turns, "old", 1, at(10)));
        turns.step_aside(&key("old"));
        assert!(!claims(&turns, "young", 1, at(19)));
        assert!(claims(&turns, "young", 0, at(20)));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(!claims(&turns, "young", 1, at(21)) && !claims(&turns, "old", 1, at(22)));
        assert!(!claims(&turns, "young", 0, at(23)));
        assert!(claims(&turns, "old", 0, at(24)));
    }

    #[tokio::test(start_paused = true)]
    async fn moves_start_at_the_given_pace() {
        let turns = Turns::new(1000, 5);
        let claimed = |now: u64| (0..100).filter(|i| claims(&turns, &i.to_string(), 0, at(now))).count();
        assert_eq!(claimed(0), 0);
        assert_eq!(claimed(1), 1);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(claimed(2), 5);
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!(claimed(3), 5, "idle time is not saved up");
    }

    #[tokio::test(start_paused = true)]
    async fn writes_that_need_no_turn_have_a_pace_of_their_own() {
        let turns = Turns::new(1, 1);
        let written = || (0..100).filter(|_| turns.may_write()).count();
        assert_eq!(written(), 1);
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!(written(), 50);
    }
}
