//! Who is connected, who is busy, and who has to go when it gets crowded.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::metrics::{Closed, Metrics};

/// What one connection is doing. Shared by its task, its requests and the table.
#[derive(Debug)]
pub(super) struct Activity(Mutex<State>);

#[derive(Debug)]
struct State {
    in_flight: usize,
    served: bool,
    idle_since: Instant,
    header_since: Option<Instant>,
}

impl Activity {
    fn new() -> Arc<Self> {
        let state = State { in_flight: 0, served: false, idle_since: Instant::now(), header_since: None };
        Arc::new(Self(Mutex::new(state)))
    }

    pub(super) fn begin(self: &Arc<Self>) -> Flight {
        let mut state = lock(&self.0);
        state.in_flight += 1;
        state.served = true;
        state.header_since = None;
        Flight(Arc::clone(self))
    }

    pub(super) fn busy(&self) -> bool {
        lock(&self.0).in_flight > 0
    }

    fn bytes_arrived(&self) {
        let mut state = lock(&self.0);
        if state.in_flight == 0 {
            state.header_since.get_or_insert_with(Instant::now);
        }
    }

    /// Who never asked anything goes before who did, the longest idle first. Nothing while a request is in flight.
    fn expendable(&self) -> Option<(bool, Instant)> {
        let state = lock(&self.0);
        (state.in_flight == 0).then_some((state.served, state.idle_since))
    }

    fn overdue(&self, idle: Duration, header: Duration) -> Option<Closed> {
        let state = lock(&self.0);
        if state.in_flight > 0 {
            None
        } else if state.header_since.is_some_and(|since| since.elapsed() > header) {
            Some(Closed::slow_header)
        } else {
            (state.idle_since.elapsed() > idle).then_some(Closed::idle)
        }
    }
}

/// One request in flight, until its answer has been handed over or dropped.
#[derive(Debug)]
pub(super) struct Flight(Arc<Activity>);

impl Drop for Flight {
    fn drop(&mut self) {
        let mut state = lock(&self.0.0);
        state.in_flight -= 1;
        state.idle_since = Instant::now();
    }
}

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
    close: Option<oneshot::Sender<()>>,
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
        if table.entries.len() - table.closing >= self.limit && !table.make_room() {
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
    fn make_room(&mut self) -> bool {
        let victim = self
            .entries
            .iter_mut()
            .filter(|(_, entry)| entry.asked.is_none())
            .filter_map(|(_, entry)| entry.activity.expendable().map(|order| (order, entry)))
            .min_by_key(|(order, _)| *order);
        let Some((_, entry)) = victim else { return false };
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
            let _ = close.send(());
        }
    }
}

/// A connection's place in the table; leaves it when dropped, so an aborted or panicked task leaves too.
pub(super) struct Slot {
    id: u64,
    activity: Arc<Activity>,
    asked: oneshot::Receiver<()>,
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

    pub(super) async fn asked_to_close(&mut self) {
        // The sender is dropped only after use or with this slot.
        let _ = (&mut self.asked).await;
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

/// A stream that notes when bytes arrive, so that a header sent drop by drop is noticed.
///
/// Only for HTTP/1.1: on HTTP/2 control frames arrive while no request is on its way.
#[derive(Debug)]
pub(super) struct Watched<S> {
    stream: S,
    activity: Arc<Activity>,
    headers: bool,
}

impl<S> Watched<S> {
    pub(super) fn new(stream: S, activity: Arc<Activity>, headers: bool) -> Self {
        Self { stream, activity, headers }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let result = Pin::new(&mut this.stream).poll_read(cx, buf);
        if this.headers && buf.filled().len() > before {
            this.activity.bytes_arrived();
        }
        result
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// An answer's body that keeps its request in flight until it has been sent.
#[derive(Debug)]
pub(super) struct Tracked {
    body: Body,
    _flight: Flight,
}

impl Tracked {
    pub(super) fn new(body: Body, flight: Flight) -> Self {
        Self { body, _flight: flight }
    }
}

impl HttpBody for Tracked {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.get_mut().body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The guarded values are counters and maps, right after every statement: a panic elsewhere does not spoil them.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
