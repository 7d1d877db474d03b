//! Who is connected, and who has to go when it gets crowded.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::activity::{Activity, Turn, lock};
use super::metrics::{Closed, Metrics};

/// All open connections.
#[derive(Clone)]
pub(super) struct Connections {
    table: Arc<Mutex<Table>>,
    limit: usize,
    metrics: Metrics,
}

#[derive(Default)]
struct Table {
    last_id: u64,
    closing: usize,
    entries: HashMap<u64, Entry>,
}

struct Entry {
    activity: Arc<Activity>,
    /// Taken when the connection is asked to close.
    close: Option<oneshot::Sender<Closed>>,
    asked: Option<(Closed, Instant)>,
    abort: Option<AbortHandle>,
}

impl Connections {
    pub(super) fn new(limit: usize, metrics: Metrics) -> Self {
        Self { table: Arc::default(), limit, metrics }
    }

    /// A place for one more, made by sending away the most expendable if need be.
    pub(super) fn enter(&self) -> Option<Slot> {
        let mut table = lock(&self.table);
        if table.entries.len() - table.closing >= self.limit && !table.make_room(self.limit) {
            self.metrics.refused();
            return None;
        }
        // Those who are slow to leave may be a quarter more, then the slowest is cut off.
        if table.closing > self.limit / 4 {
            table.abort_slowest();
        }
        table.last_id += 1;
        let id = table.last_id;
        let (close, asked) = oneshot::channel();
        let activity = Activity::new();
        table
            .entries
            .insert(id, Entry { activity: Arc::clone(&activity), close: Some(close), asked: None, abort: None });
        self.metrics.opened();
        Some(Slot { id, activity, asked, ended: Closed::error, connections: self.clone() })
    }

    pub(super) fn set_abort(&self, id: u64, abort: AbortHandle) {
        if let Some(entry) = lock(&self.table).entries.get_mut(&id) {
            entry.abort = Some(abort);
        }
    }

    pub(super) fn sweep(&self, idle: Duration, header: Duration) {
        lock(&self.table).close_where(|activity| activity.overdue(idle, header));
    }

    pub(super) fn close_all(&self) {
        lock(&self.table).close_where(|_| Some(Closed::shutdown));
    }

    pub(super) fn abort_all(&self) {
        for entry in lock(&self.table).entries.values_mut() {
            if let Some(abort) = entry.abort.take() {
                abort.abort();
            }
        }
    }

    fn leave(&self, id: u64, ended: Closed) {
        let mut table = lock(&self.table);
        let Some(entry) = table.entries.remove(&id) else { return };
        if entry.asked.is_some() {
            table.closing -= 1;
        }
        self.metrics.closed(entry.asked.map_or(ended, |(reason, _)| reason));
    }
}

impl Table {
    /// Half of the places are for those who have asked something before: beyond it, who keeps us waiting longest goes;
    /// else the one idle longest, for else newcomers would push each other out before they could ask anything.
    fn make_room(&mut self, limit: usize) -> bool {
        let (mut waited_for, mut theirs, mut idle) = (0, None, None);
        let turns = self.entries.iter().filter(|(_, entry)| entry.asked.is_none());
        for (id, turn) in turns.map(|(id, entry)| (*id, entry.activity.turn())) {
            match turn {
                Turn::Ours => {}
                Turn::Theirs(since) => {
                    waited_for += 1;
                    theirs = Some(theirs.map_or((since, id), |oldest| (since, id).min(oldest)));
                }
                Turn::Idle(since) => idle = Some(idle.map_or((since, id), |oldest| (since, id).min(oldest))),
            }
        }
        let victim = if waited_for > limit / 2 { theirs.or(idle) } else { idle.or(theirs) };
        let Some(entry) = victim.and_then(|(_, id)| self.entries.get_mut(&id)) else { return false };
        entry.ask(Closed::made_room);
        self.closing += 1;
        true
    }

    fn abort_slowest(&mut self) {
        let slowest = self
            .entries
            .values_mut()
            .filter(|entry| entry.abort.is_some())
            .filter_map(|entry| entry.asked.map(|(_, since)| (since, entry)))
            .min_by_key(|(since, _)| *since);
        if let Some((_, entry)) = slowest
            && let Some(abort) = entry.abort.take()
        {
            abort.abort();
        }
    }

    fn close_where(&mut self, overdue: impl Fn(&Activity) -> Option<Closed>) {
        for entry in self.entries.values_mut().filter(|entry| entry.asked.is_none()) {
            if let Some(reason) = overdue(&entry.activity) {
                entry.ask(reason);
                self.closing += 1;
            }
        }
    }
}

impl Entry {
    fn ask(&mut self, reason: Closed) {
        self.asked = Some((reason, Instant::now()));
        if let Some(close) = self.close.take() {
            // Its task may be ending at this moment; then there is no one to tell.
            let _ = close.send(reason);
        }
    }
}

/// A connection's place in the table; leaves it when dropped, so an aborted or panicked task leaves too.
pub(super) struct Slot {
    id: u64,
    activity: Arc<Activity>,
    asked: oneshot::Receiver<Closed>,
    ended: Closed,
    connections: Connections,
}

impl Slot {
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn activity(&self) -> Arc<Activity> {
        Arc::clone(&self.activity)
    }

    pub(super) async fn asked_to_close(&mut self) -> Closed {
        // The sender is dropped only after use or with this slot.
        (&mut self.asked).await.unwrap_or(Closed::shutdown)
    }

    pub(super) fn ended(&mut self, reason: Closed) {
        self.ended = reason;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.connections.leave(self.id, self.ended);
    }
}
