//! Who may warm up now: a node's places and requests per second, shared between namespaces.
//!
//! Places go to the namespace that holds the fewest. One that holds two or more above another that waits gives one up:
//! its latest warm-up is suspended between two requests and goes on later, so a five-minute warm-up delays its own
//! namespace only. With more namespaces than places they take turns. Nothing idles while someone waits.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// How long a place is kept when each namespace can have at most one.
const TURN: Duration = Duration::from_secs(10);

/// What the agent has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Move<K> {
    Start(K),
    Suspend(K),
    Resume(K),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Waiting,
    Running,
    Suspended,
}

#[derive(Clone, Debug)]
struct Entry<K> {
    key: K,
    place: Place,
    /// When it came to its place; monotonic, from any origin.
    since: Duration,
}

/// One namespace.
#[derive(Clone, Debug)]
struct Line<K> {
    /// In order of arrival.
    entries: Vec<Entry<K>>,
    /// When it last gave a place up, or came: the place goes to whoever has been without for longest, however many wait
    /// behind and however long ago they came.
    since: Duration,
}

/// The places of one node.
#[derive(Clone, Debug)]
pub struct Places<K> {
    max: usize,
    lines: BTreeMap<String, Line<K>>,
}

impl<K: Clone + PartialEq> Places<K> {
    #[must_use]
    pub fn new(max: usize) -> Self {
        Self { max: max.max(1), lines: BTreeMap::new() }
    }

    pub fn add(&mut self, namespace: &str, key: K, now: Duration) {
        let entry = Entry { key, place: Place::Waiting, since: now };
        let line = self.lines.entry(namespace.to_owned()).or_insert(Line { entries: Vec::new(), since: now });
        line.entries.push(entry);
    }

    pub fn remove(&mut self, key: &K, now: Duration) {
        for line in self.lines.values_mut() {
            let Some(index) = line.entries.iter().position(|entry| entry.key == *key) else { continue };
            if line.entries.remove(index).place == Place::Running {
                line.since = now;
            }
        }
        self.lines.retain(|_, line| !line.entries.is_empty());
    }

    #[must_use]
    pub fn running(&self) -> usize {
        self.lines.values().map(Line::held).sum()
    }

    /// Everything that is due now.
    pub fn settle(&mut self, now: Duration) -> Vec<Move<K>> {
        let mut moves = Vec::new();
        while let Some(namespace) = self.next_in_line() {
            if self.running() >= self.max {
                match self.who_gives_up(&namespace, now) {
                    Some(other) => moves.extend(self.give_up(&other, now)),
                    None => break,
                }
            }
            moves.extend(self.take(&namespace, now));
        }
        moves
    }

    /// When a turn ends, if anybody waits for it.
    #[must_use]
    pub fn next_turn(&self) -> Option<Duration> {
        self.next_in_line()?;
        let running = self.lines.values().flat_map(Line::running);
        running.map(|entry| entry.since + TURN).min()
    }

    /// The waiting namespace with the fewest places; of several, the one that has been without for longest.
    fn next_in_line(&self) -> Option<String> {
        let waiting = self.lines.iter().filter(|(_, line)| line.held() < line.entries.len());
        waiting.min_by_key(|(_, line)| (line.held(), line.since)).map(|(name, _)| name.clone())
    }

    fn who_gives_up(&self, namespace: &str, now: Duration) -> Option<String> {
        let own = self.lines.get(namespace).map_or(0, Line::held);
        let (name, line) = self.lines.iter().max_by_key(|(_, line)| (line.held(), line.longest_turn(now)))?;
        let turn_is_over = own == 0 && line.held() == 1 && line.longest_turn(now) >= TURN;
        (name != namespace && (line.held() >= own + 2 || turn_is_over)).then(|| name.clone())
    }

    /// The latest one has least to lose.
    fn give_up(&mut self, namespace: &str, now: Duration) -> Option<Move<K>> {
        let line = self.lines.get_mut(namespace)?;
        let running = line.entries.iter_mut().filter(|entry| entry.place == Place::Running);
        let latest = running.max_by_key(|entry| entry.since)?;
        (latest.place, latest.since) = (Place::Suspended, now);
        line.since = now;
        Some(Move::Suspend(latest.key.clone()))
    }

    fn take(&mut self, namespace: &str, now: Duration) -> Option<Move<K>> {
        let entries = &mut self.lines.get_mut(namespace)?.entries;
        let next = entries.iter_mut().find(|entry| entry.place != Place::Running)?;
        let was = next.place;
        (next.place, next.since) = (Place::Running, now);
        let key = next.key.clone();
        Some(if was == Place::Suspended { Move::Resume(key) } else { Move::Start(key) })
    }
}

impl<K> Line<K> {
    fn running(&self) -> impl Iterator<Item = &Entry<K>> {
        self.entries.iter().filter(|entry| entry.place == Place::Running)
    }

    fn held(&self) -> usize {
        self.running().count()
    }

    fn longest_turn(&self, now: Duration) -> Duration {
        self.running().map(|entry| now.saturating_sub(entry.since)).max().unwrap_or_default()
    }
}

/// Requests per second of one node: a bucket of tokens, handed to waiting namespaces in turn.
#[derive(Debug)]
pub struct Rate<T> {
    per_second: f64,
    tokens: f64,
    filled_at: Duration,
    waiting: BTreeMap<String, VecDeque<T>>,
    /// Whose turn it is; each waiting namespace once.
    turns: VecDeque<String>,
}

impl<T> Rate<T> {
    /// Starts empty but for one request, so that a restart is no burst.
    #[must_use]
    pub fn new(per_second: u32, now: Duration) -> Self {
        let per_second = f64::from(per_second.max(1));
        Self { per_second, tokens: 1.0, filled_at: now, waiting: BTreeMap::new(), turns: VecDeque::new() }
    }

    /// A token at once, when nobody waits for one.
    pub fn try_take(&mut self, now: Duration) -> bool {
        self.fill(now);
        let free = self.turns.is_empty() && self.tokens >= 1.0;
        if free {
            self.tokens -= 1.0;
        }
        free
    }

    pub fn wait(&mut self, namespace: &str, ticket: T) {
        let line = self.waiting.entry(namespace.to_owned()).or_default();
        if line.is_empty() {
            self.turns.push_back(namespace.to_owned());
        }
        line.push_back(ticket);
    }

    /// The next ticket whose token has come.
    pub fn grant(&mut self, now: Duration) -> Option<T> {
        self.fill(now);
        if self.tokens < 1.0 {
            return None;
        }
        let namespace = self.turns.pop_front()?;
        let line = self.waiting.get_mut(&namespace)?;
        let ticket = line.pop_front();
        if line.is_empty() {
            self.waiting.remove(&namespace);
        } else {
            self.turns.push_back(namespace);
        }
        self.tokens -= 1.0;
        ticket
    }

    /// A ticket whose owner is gone costs nothing.
    pub fn give_back(&mut self) {
        self.tokens += 1.0;
    }

    /// When the next token comes, if anybody waits for it.
    #[must_use]
    pub fn next_grant(&self) -> Option<Duration> {
        let lacking = (1.0 - self.tokens).max(0.0) / self.per_second;
        (!self.turns.is_empty()).then(|| self.filled_at + Duration::from_secs_f64(lacking))
    }

    /// A tenth of a second's worth may gather, so that requests planned for one moment are not spread out.
    fn fill(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.filled_at).as_secs_f64();
        self.filled_at = self.filled_at.max(now);
        self.tokens = (self.tokens + passed * self.per_second).min((self.per_second / 10.0).max(1.0));
    }
}

#[cfg(test)]
mod tests;
