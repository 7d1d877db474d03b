//! Sends one request to one pod: over a connection that is free, or a new one, and never waits longer than allowed.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use groundcrew_core::warmup::rules::Protocol;
use http::uri::Scheme;
use http::{HeaderMap, Version};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::sync::{Mutex as AsyncMutex, Semaphore};

use crate::call::{Call, Expect, Trace};
use crate::connect::{self, Http1, Http2, Opened};
use crate::grpc;
use crate::report::Failure;

/// More of a body is neither read nor needed.
pub const MAX_BODY: usize = 1024 * 1024;
/// Descriptors are the node's; a server that answers nothing must not take them all.
const MAX_CONNECTIONS: usize = 128;

/// Where requests go. Nothing in a request can change it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    pub address: SocketAddr,
    pub wire: Wire,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    Http1,
    /// HTTP/2 from the first byte.
    Http2,
    /// TLS, with HTTP/2 if the server picks it.
    Tls,
}

impl Target {
    #[must_use]
    pub fn new(address: SocketAddr, protocol: Protocol) -> Self {
        let wire = match protocol {
            Protocol::Http => Wire::Http1,
            Protocol::Https => Wire::Tls,
            Protocol::H2c | Protocol::Grpc => Wire::Http2,
        };
        Self { address, wire }
    }

    pub(crate) fn scheme(&self) -> Scheme {
        if self.wire == Wire::Tls { Scheme::HTTPS } else { Scheme::HTTP }
    }
}

/// A response as far as anybody looks at it.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// Empty unless it was asked for.
    pub body: Bytes,
    pub(crate) grpc_status: Option<u16>,
}

/// The connections of one warm-up.
#[derive(Debug)]
pub struct Client {
    target: Target,
    trace: Trace,
    idle: Mutex<Vec<Http1>>,
    /// HTTP/2 carries all requests on one.
    shared: AsyncMutex<Option<Arc<Http2>>>,
    places: Semaphore,
}

impl Client {
    #[must_use]
    pub fn new(target: Target, trace: Trace) -> Self {
        Self {
            target,
            trace,
            idle: Mutex::new(Vec::new()),
            shared: AsyncMutex::new(None),
            places: Semaphore::new(MAX_CONNECTIONS),
        }
    }

    /// Sends it and judges the answer; connecting counts towards the time.
    pub async fn send(&self, call: &Call, within: Duration, keep_body: bool) -> Result<Answer, Failure> {
        let keep_body = keep_body || call.expect == Expect::Serving;
        let answer =
            tokio::time::timeout(within, self.exchange(call, keep_body)).await.unwrap_or(Err(Failure::Timeout))?;
        judge(call.expect, answer)
    }

    async fn exchange(&self, call: &Call, keep_body: bool) -> Result<Answer, Failure> {
        let _place = self.places.acquire().await.map_err(|_| Failure::Closed)?;
        if self.target.wire == Wire::Http2 {
            let connection = self.shared2().await?;
            return self.exchange2(&connection, call, keep_body).await;
        }
        while let Some(connection) = self.take_idle() {
            // A server may close an idle connection at any time; what was not sent goes on a new one.
            if let Some(result) = self.exchange1(connection, call, keep_body).await {
                return result;
            }
        }
        if let Some(connection) = self.shared.lock().await.clone().filter(|shared| !shared.sender.is_closed()) {
            return self.exchange2(&connection, call, keep_body).await;
        }
        match connect::open(&self.target).await? {
            Opened::Http1(connection) => {
                self.exchange1(connection, call, keep_body).await.unwrap_or(Err(Failure::Closed))
            }
            Opened::Http2(connection) => {
                let connection = Arc::new(connection);
                *self.shared.lock().await = Some(connection.clone());
                self.exchange2(&connection, call, keep_body).await
            }
        }
    }

    /// Nothing means that the request never left.
    async fn exchange1(&self, mut connection: Http1, call: &Call, keep_body: bool) -> Option<Result<Answer, Failure>> {
        connection.sender.ready().await.ok()?;
        let request = call.request(&self.target, Version::HTTP_11, &self.trace);
        let response = match connection.sender.try_send_request(request).await {
            Ok(response) => response,
            Err(mut e) => return e.take_message().is_none().then(|| Err(Failure::of_exchange(e.error()))),
        };
        let result = read(response, keep_body).await;
        if let Ok((_, true)) = result {
            self.put_idle(connection);
        }
        Some(result.map(|(answer, _)| answer))
    }

    /// Whoever comes first connects, the others wait for it.
    async fn shared2(&self) -> Result<Arc<Http2>, Failure> {
        let mut shared = self.shared.lock().await;
        if let Some(connection) = shared.as_ref().filter(|connection| !connection.sender.is_closed()) {
            return Ok(connection.clone());
        }
        match connect::open(&self.target).await? {
            Opened::Http2(connection) => Ok(shared.insert(Arc::new(connection)).clone()),
            Opened::Http1(_) => Err(Failure::Protocol),
        }
    }

    async fn exchange2(&self, connection: &Http2, call: &Call, keep_body: bool) -> Result<Answer, Failure> {
        let mut sender = connection.sender.clone();
        sender.ready().await.map_err(|_| Failure::Closed)?;
        let request = call.request(&self.target, Version::HTTP_2, &self.trace);
        let response = sender.send_request(request).await.map_err(|e| Failure::of_exchange(&e))?;
        read(response, keep_body).await.map(|(answer, _)| answer)
    }

    fn take_idle(&self) -> Option<Http1> {
        let mut idle = self.idle.lock().ok()?;
        while let Some(connection) = idle.pop() {
            if !connection.sender.is_closed() {
                return Some(connection);
            }
        }
        None
    }

    fn put_idle(&self, connection: Http1) {
        if let Ok(mut idle) = self.idle.lock() {
            idle.push(connection);
        }
    }
}

/// Reads the body up to the limit; the flag says whether it ended, and with it whether the connection can be used again.
async fn read(response: hyper::Response<Incoming>, keep: bool) -> Result<(Answer, bool), Failure> {
    let status = response.status().as_u16();
    let mut grpc_status = grpc_status(response.headers());
    let mut body = response.into_body();
    let (mut kept, mut length, mut whole) = (BytesMut::new(), 0_usize, true);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| Failure::of_exchange(&e))?;
        if let Some(data) = frame.data_ref() {
            length = length.saturating_add(data.len());
            if keep {
                let room = MAX_BODY.saturating_sub(kept.len()).min(data.len());
                kept.extend_from_slice(data.get(..room).unwrap_or_default());
            }
        } else if let Some(trailers) = frame.trailers_ref() {
            grpc_status = self::grpc_status(trailers).or(grpc_status);
        }
        if length >= MAX_BODY {
            whole = false;
            break;
        }
    }
    Ok((Answer { status, body: kept.freeze(), grpc_status }, whole))
}

fn grpc_status(headers: &HeaderMap) -> Option<u16> {
    headers.get("grpc-status")?.to_str().ok()?.parse().ok()
}

fn judge(expect: Expect, answer: Answer) -> Result<Answer, Failure> {
    let right = match expect {
        Expect::Answer => (200..400).contains(&answer.status),
        Expect::Status(status) => answer.status == status,
        Expect::Grpc | Expect::Serving => answer.status == 200,
    };
    if !right {
        return Err(Failure::Status(answer.status));
    }
    match (expect, answer.grpc_status) {
        (Expect::Answer | Expect::Status(_), _) => Ok(answer),
        (_, None) => Err(Failure::Protocol),
        (Expect::Grpc, Some(0)) => Ok(answer),
        (Expect::Serving, Some(0)) if grpc::says_serving(&answer.body) => Ok(answer),
        (_, Some(0)) => Err(Failure::NotServing),
        (_, Some(code)) => Err(Failure::Grpc(code)),
    }
}
