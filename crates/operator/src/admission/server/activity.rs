//! Whose turn it is on a connection: ours while a whole request has no answer yet, else the peer's.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use super::metrics::Closed;

/// What one connection is doing. Shared by its task, its requests and the table.
#[derive(Debug)]
pub(super) struct Activity(Mutex<State>);

#[derive(Debug)]
struct State {
    in_flight: usize,
    /// Of those in flight: arrived whole, and not answered yet. Only these keep the peer waiting for us.
    deciding: usize,
    /// Whether a whole request ever came.
    has_asked: bool,
    /// The last step forward. The beginning of a request is none, unless after others that came whole.
    since: Instant,
    header_since: Option<Instant>,
}

/// Whose turn it is on a connection, and since when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    Ours,
    /// Nothing asked yet, or a request or an answer is on its way and the peer does not send or take it.
    Theirs(Instant),
    Idle(Instant),
}

impl Activity {
    pub(super) fn new() -> Arc<Self> {
        let state = State { in_flight: 0, deciding: 0, has_asked: false, since: Instant::now(), header_since: None };
        Arc::new(Self(Mutex::new(state)))
    }

    pub(super) fn begin(self: &Arc<Self>) -> Arc<Flight> {
        let mut state = lock(&self.0);
        if state.in_flight == 0 && state.has_asked {
            state.since = Instant::now();
        }
        state.in_flight += 1;
        state.header_since = None;
        Arc::new(Flight { activity: Arc::clone(self), stage: Mutex::new(Stage::Arriving) })
    }

    pub(super) fn busy(&self) -> bool {
        lock(&self.0).in_flight > 0
    }

    pub(super) fn waits_for_peer(&self) -> bool {
        matches!(self.turn(), Turn::Theirs(_))
    }

    fn bytes_arrived(&self) {
        let mut state = lock(&self.0);
        if state.in_flight == 0 {
            state.header_since.get_or_insert_with(Instant::now);
        }
    }

    pub(super) fn turn(&self) -> Turn {
        let state = lock(&self.0);
        match *state {
            State { deciding: 1.., .. } => Turn::Ours,
            State { in_flight: 0, has_asked: true, since, .. } => Turn::Idle(since),
            State { since, .. } => Turn::Theirs(since),
        }
    }

    pub(super) fn overdue(&self, idle: Duration, header: Duration) -> Option<Closed> {
        let state = lock(&self.0);
        if state.deciding > 0 {
            None
        } else if state.header_since.is_some_and(|since| since.elapsed() > header) {
            Some(Closed::slow_header)
        } else {
            (state.since.elapsed() > idle).then_some(Closed::idle)
        }
    }
}

/// How far a request is; it only goes forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
pub(super) enum Stage {
    Arriving,
    Deciding,
    Leaving,
}

/// One request in flight, until its answer has been handed over or dropped.
#[derive(Debug)]
pub(super) struct Flight {
    activity: Arc<Activity>,
    stage: Mutex<Stage>,
}

impl Flight {
    pub(super) fn reach(&self, stage: Stage) {
        let mut now = lock(&self.stage);
        if stage <= *now {
            return;
        }
        let mut state = lock(&self.activity.0);
        state.deciding -= usize::from(*now == Stage::Deciding);
        state.deciding += usize::from(stage == Stage::Deciding);
        state.has_asked |= stage == Stage::Deciding;
        state.since = Instant::now();
        *now = stage;
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.reach(Stage::Leaving);
        let mut state = lock(&self.activity.0);
        state.in_flight -= 1;
        state.since = Instant::now();
    }
}

/// A request's body that notes when all of it has come, or nobody wants the rest.
#[derive(Debug)]
pub(super) struct Arriving {
    body: Incoming,
    flight: Arc<Flight>,
}

impl Arriving {
    pub(super) fn new(body: Incoming, flight: Arc<Flight>) -> Self {
        let arriving = Self { body, flight };
        arriving.note_end();
        arriving
    }

    fn note_end(&self) {
        if self.body.is_end_stream() {
            self.flight.reach(Stage::Deciding);
        }
    }
}

impl HttpBody for Arriving {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.get_mut();
        let frame = Pin::new(&mut this.body).poll_frame(cx);
        match frame {
            Poll::Ready(None) => this.flight.reach(Stage::Deciding),
            _ => this.note_end(),
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        self.flight.reach(Stage::Deciding);
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
    _flight: Arc<Flight>,
}

impl Tracked {
    pub(super) fn new(body: Body, flight: Arc<Flight>) -> Self {
        flight.reach(Stage::Leaving);
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
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
