//! The accept loop, of the webhook over TLS and of probes in the clear: no caller, however slow or idle, keeps the next review waiting.
//!
//! ```text
//! accept ──► a slot (or a slow or idle one makes room) ──► handshake ──► HTTP/1.1 or HTTP/2 ──► router
//!                           ▲
//!             sweeper: idle too long, header too slow
//! ```
//!
//! # Guarantees
//! - A newcomer gets in unless every connection has a whole request that is not answered yet. Who keeps us waiting, with
//!   the first request, the rest of a body or the taking of an answer, goes before who is merely idle, once such peers
//!   have half of the places.
//! - Memory is bounded by [`Limits::connections`], whatever arrives.
//! - An error of `accept` never ends the loop; [`serve`] returns within [`Limits::drain`] after `shutdown`.
//!
//! # Assumptions
//! The router bounds the size of a body and the time it takes; a request that arrived whole is never cut off here.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;
use tracing::{Instrument, debug, warn};

use self::activity::{Activity, Arriving, Tracked, Watched};
use self::connections::{Connections, Slot};
pub use self::metrics::{Closed, Failure, Metrics};
use super::tls::ServingCert;

mod activity;
mod connections;
mod metrics;
#[cfg(test)]
mod tests;

/// What one server takes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Open connections, handshakes included. An API server needs one or two.
    pub connections: usize,
    pub handshake: Duration,
    /// From the first byte of an HTTP/1.1 header to its last.
    pub header: Duration,
    /// Longer than the 90 s after which the API server closes, so that it never meets a connection we just closed.
    pub idle: Duration,
    /// How long a connection asked to close may take to say goodbye.
    pub linger: Duration,
    /// How long requests in flight may take after `shutdown`.
    pub drain: Duration,
    /// Requests at once on one HTTP/2 connection.
    pub streams: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 512,
            handshake: Duration::from_secs(5),
            header: Duration::from_secs(5),
            idle: Duration::from_secs(120),
            linger: Duration::from_secs(1),
            drain: Duration::from_secs(8),
            streams: 250,
        }
    }
}

/// After an accept that failed for want of descriptors: long enough for one to be freed, too short to be noticed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// HTTP/2 peers that vanished without a word are found after this plus [`PING_TIMEOUT`].
const PING_EVERY: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// Streams reset by the peer before we looked at them; more is an attack (rapid reset).
const RESET_STREAMS: usize = 20;
/// The API server's headers take a few hundred bytes.
const HEADER_BYTES: u32 = 16 * 1024;
/// Unread bytes a peer may have on its way in one request: a 3 MB review takes a few round trips more.
const STREAM_WINDOW: u32 = 256 * 1024;
/// The same for a whole connection. A multiple of it, or one body nobody reads yet would hold up all others.
const CONNECTION_WINDOW: u32 = 16 * STREAM_WINDOW;

/// Lets the process hold as many descriptors as it is allowed to; the default soft limit of 1024 is soon used up.
pub fn raise_descriptor_limit() -> io::Result<u64> {
    rlimit::increase_nofile_limit(u64::MAX)
}

/// Serves `router` over TLS until `shutdown`, then lets requests in flight finish.
pub async fn serve(
    listener: TcpListener,
    tls: Arc<ServingCert>,
    router: Router,
    limits: Limits,
    shutdown: CancellationToken,
    metrics: Metrics,
) -> Result<(), rustls::Error> {
    let acceptor = TlsAcceptor::from(Arc::new(tls.server_config()?));
    accept(listener, Server::new(Some(acceptor), router, limits, metrics), shutdown).await;
    Ok(())
}

/// The same over plain HTTP/1.1, for probes and metrics.
pub async fn serve_plain(listener: TcpListener, router: Router, limits: Limits, shutdown: CancellationToken) {
    accept(listener, Server::new(None, router, limits, Metrics::default()), shutdown).await;
}

async fn accept(listener: TcpListener, server: Server, shutdown: CancellationToken) {
    let limits = server.limits;
    let server = Arc::new(server);
    let tasks = TaskTracker::new();
    let mut sweep = tokio::time::interval(sweep_interval(&limits));
    sweep.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = shutdown.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok((socket, _)) => server.admit(socket, &tasks),
                Err(error) => {
                    warn!(%error, "cannot accept a connection, trying again");
                    sleep(ACCEPT_PAUSE).await;
                }
            },
            _ = sweep.tick() => server.connections.sweep(limits.idle, limits.header),
        }
    }
    drop(listener);
    server.connections.close_all();
    tasks.close();
    if timeout(limits.drain, tasks.wait()).await.is_err() {
        warn!(connections = tasks.len(), "requests still in flight at the end of the drain time are cut off");
        server.connections.abort_all();
    }
}

/// Often enough for the shortest of the times it guards.
fn sweep_interval(limits: &Limits) -> Duration {
    (limits.idle.min(limits.header) / 8).clamp(Duration::from_millis(10), Duration::from_secs(1))
}

fn http(limits: &Limits) -> auto::Builder<TokioExecutor> {
    let mut http = auto::Builder::new(TokioExecutor::new());
    http.http1()
        .timer(TokioTimer::new())
        // hyper's own timer also runs on an idle keep-alive connection, and would close it under the client's hands.
        .header_read_timeout(None)
        .max_buf_size(64 * 1024);
    http.http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_TIMEOUT)
        .max_concurrent_streams(limits.streams)
        .max_pending_accept_reset_streams(RESET_STREAMS)
        .max_local_error_reset_streams(RESET_STREAMS)
        .max_header_list_size(HEADER_BYTES)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW);
    http
}

struct Server {
    /// Absent means plain HTTP.
    acceptor: Option<TlsAcceptor>,
    http: auto::Builder<TokioExecutor>,
    router: Router,
    limits: Limits,
    connections: Connections,
    metrics: Metrics,
}

impl Server {
    fn new(acceptor: Option<TlsAcceptor>, router: Router, limits: Limits, metrics: Metrics) -> Self {
        let connections = Connections::new(limits.connections, metrics.clone());
        Self { acceptor, http: http(&limits), router, limits, connections, metrics }
    }

    fn admit(self: &Arc<Self>, socket: TcpStream, tasks: &TaskTracker) {
        let Some(slot) = self.connections.enter() else { return };
        let id = slot.id();
        let server = Arc::clone(self);
        let task = tasks.spawn(async move { server.attend(socket, slot).await }.in_current_span());
        self.connections.set_abort(id, task.abort_handle());
    }

    /// One connection from handshake to goodbye. The slot is freed when this ends, however it ends.
    async fn attend(&self, socket: TcpStream, mut slot: Slot) {
        // Answers are small and awaited: never wait to fill a packet.
        let _ = socket.set_nodelay(true);
        let Some(acceptor) = &self.acceptor else { return self.converse(socket, false, slot).await };
        let stream = tokio::select! {
            stream = self.handshake(acceptor, socket) => stream,
            _ = slot.asked_to_close() => return,
        };
        match stream {
            Ok(stream) => {
                let h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                self.converse(stream, h2, slot).await;
            }
            Err(failure) => {
                self.metrics.handshake_failed(failure);
                slot.ended(Closed::handshake);
            }
        }
    }

    async fn handshake(&self, acceptor: &TlsAcceptor, socket: TcpStream) -> Result<TlsStream<TcpStream>, Failure> {
        match timeout(self.limits.handshake, acceptor.accept(socket)).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(error)) => {
                debug!(%error, "TLS handshake failed");
                Err(Failure::of(&error))
            }
            Err(_) => Err(Failure::timeout),
        }
    }

    async fn converse<S>(&self, stream: S, h2: bool, mut slot: Slot)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let http = if h2 { self.http.clone().http2_only() } else { self.http.clone().http1_only() };
        let activity = slot.activity();
        let io = TokioIo::new(Watched::new(stream, activity.clone(), !h2));
        let service = service_fn(|request| answer(self.router.clone(), request, activity.clone()));
        let mut connection = pin!(http.serve_connection(io, service));

        tokio::select! {
            result = connection.as_mut() => {
                return slot.ended(if result.is_ok() { Closed::peer } else { Closed::error });
            }
            reason = slot.asked_to_close() => {
                // Nothing of it will be missed, and its place is wanted now.
                if reason == Closed::made_room && activity.waits_for_peer() {
                    return;
                }
            }
        }
        connection.as_mut().graceful_shutdown();
        tokio::select! {
            _ = connection => {}
            () = silence(&activity, self.limits.linger) => {}
        }
    }
}

/// Ends once no request is in flight: one that slipped in before our goodbye reached the peer is still answered.
async fn silence(activity: &Activity, linger: Duration) {
    loop {
        sleep(linger).await;
        if !activity.busy() {
            return;
        }
    }
}

async fn answer(
    router: Router,
    request: http::Request<Incoming>,
    activity: Arc<Activity>,
) -> Result<http::Response<Tracked>, std::convert::Infallible> {
    let flight = activity.begin();
    let arriving = |body| Body::new(Arriving::new(body, Arc::clone(&flight)));
    let response = router.oneshot(request.map(arriving)).await?;
    Ok(response.map(|body| Tracked::new(body, flight)))
}
