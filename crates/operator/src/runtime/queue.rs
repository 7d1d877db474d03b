//! Keys in, reconciliations out: a few at once, never two of one key, only while leading.
//!
//! kube's own `Controller` wants its own store and delivers through shared streams; with our caches a loop over a set of
//! dirty keys is shorter than the glue and easier to reason about.

use std::collections::{HashMap, HashSet};
use std::fmt::{self, Debug, Display};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tokio_util::time::{DelayQueue, delay_queue};
use tracing::{Instrument, error, info_span, warn};

use super::cache::{Changes, Key};

const FIRST_RETRY: Duration = Duration::from_millis(250);
const LAST_RETRY: Duration = Duration::from_secs(60);
/// Timers panic beyond two years, and the next 29 February may be eight away.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);
/// A minute of short-lived pods is nothing to remember; looking at all keys more often would be work for nothing.
const TIDY_EVERY: Duration = Duration::from_secs(60);

/// When a key is looked at again without having changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// When it changes.
    Change,
    After(Duration),
}

/// How a queue is run.
#[derive(Clone, Debug)]
pub struct Queue {
    /// The feature, for logs.
    pub name: &'static str,
    pub workers: usize,
    pub leader: watch::Receiver<bool>,
    pub stop: CancellationToken,
    /// See [`Queue::forgetting`].
    pub there: There,
}

/// Whether an object is still there.
#[derive(Clone)]
pub struct There(Arc<dyn Fn(&Key) -> bool + Send + Sync>);

impl Default for There {
    fn default() -> Self {
        Self(Arc::new(|_| true))
    }
}

impl Debug for There {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("There").finish_non_exhaustive()
    }
}

struct State {
    delayed: DelayQueue<Key>,
    timers: HashMap<Key, delay_queue::Key>,
    failures: HashMap<Key, u32>,
    running: HashSet<Key>,
    /// Changed while they ran.
    again: HashSet<Key>,
}

impl Queue {
    /// A replica that does not lead takes no key. Those of objects that came and went in all that time concern nobody:
    /// without this they would pile up until it leads, perhaps never. Not for queues that clean up after what is gone.
    #[must_use]
    pub fn forgetting(self, there: impl Fn(&Key) -> bool + Send + Sync + 'static) -> Self {
        Self { there: There(Arc::new(there)), ..self }
    }

    /// Runs until stopped. Work that is under way then is finished: each write of it has its own deadline.
    pub async fn run<E: Display, W: Future<Output = Result<Next, E>>>(
        mut self,
        changes: Arc<Changes>,
        reconcile: impl Fn(Key) -> W + Sync,
    ) {
        let mut state = State {
            delayed: DelayQueue::new(),
            timers: HashMap::new(),
            failures: HashMap::new(),
            running: HashSet::new(),
            again: HashSet::new(),
        };
        let mut work = FuturesUnordered::new();
        let mut tidy = interval(TIDY_EVERY);
        tidy.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let name = self.name;
        let start = |key: Key| {
            let span = info_span!("reconcile", feature = name, %key);
            let attempt = AssertUnwindSafe(reconcile(key.clone())).catch_unwind();
            async move { (key, attempt.await) }.instrument(span)
        };
        loop {
            let leads = *self.leader.borrow_and_update();
            let free = leads && work.len() < self.workers;
            tokio::select! {
                // In order, so that a run can be replayed.
                biased;
                () = self.stop.cancelled() => break,
                // A leader whose sender is gone stays what it was.
                Ok(()) = self.leader.changed() => {}
                Some((key, result)) = work.next() => self.finish(&mut state, &changes, key, result),
                Some(expired) = state.delayed.next() => {
                    let key = expired.into_inner();
                    state.timers.remove(&key);
                    changes.mark(key);
                }
                key = changes.next(), if free => {
                    if state.running.contains(&key) {
                        state.again.insert(key);
                        continue;
                    }
                    // A change is news: what was to be looked at later is looked at now.
                    if let Some(timer) = state.timers.remove(&key) {
                        state.delayed.remove(&timer);
                    }
                    state.running.insert(key.clone());
                    work.push(start(key));
                }
                _ = tidy.tick(), if !leads => changes.retain(|key| (self.there.0)(key)),
            }
        }
        while work.next().await.is_some() {}
    }

    fn finish<E: Display>(
        &self,
        state: &mut State,
        changes: &Changes,
        key: Key,
        result: Result<Result<Next, E>, Box<dyn std::any::Any + Send>>,
    ) {
        state.running.remove(&key);
        let wait = match result {
            Ok(Ok(next)) => {
                state.failures.remove(&key);
                match next {
                    Next::Change => None,
                    Next::After(wait) => Some(wait),
                }
            }
            Ok(Err(e)) => {
                let wait = self.backoff(state, &key);
                warn!(feature = self.name, %key, error = %e, retry_in = ?wait, "reconciliation failed");
                Some(wait)
            }
            Err(_) => {
                let wait = self.backoff(state, &key);
                error!(feature = self.name, %key, retry_in = ?wait, "reconciliation panicked");
                Some(wait)
            }
        };
        if state.again.remove(&key) {
            changes.mark(key);
        } else if let Some(wait) = wait {
            let timer = state.delayed.insert(key.clone(), wait.min(LONGEST_WAIT));
            state.timers.insert(key, timer);
        }
    }

    fn backoff(&self, state: &mut State, key: &Key) -> Duration {
        let failures = state.failures.entry(key.clone()).or_default();
        *failures = failures.saturating_add(1);
        let grown = FIRST_RETRY.saturating_mul(2_u32.saturating_pow((*failures - 1).min(16)));
        grown.min(LAST_RETRY).mul_f64(0.75 + fastrand::f64() / 2.0)
    }
}

#[cfg(test)]
mod tests;
