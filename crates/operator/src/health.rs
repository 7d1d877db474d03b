//! Health and metrics over plain HTTP.
//!
//! `/livez` and `/healthz` say that the process answers, nothing more: a liveness probe that asks the API server
//! restarts every replica exactly when the control plane is in trouble. `/readyz` is derived from what the process
//! has: each cache answered once, a certificate loaded, the socket bound, not on its way out.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::admission::server;

/// What has to be true before traffic may come; cheap to clone.
#[derive(Clone, Debug)]
pub struct Readiness {
    checks: Arc<Mutex<BTreeMap<&'static str, bool>>>,
    ready: watch::Sender<bool>,
}

impl Default for Readiness {
    fn default() -> Self {
        Self { checks: Arc::default(), ready: watch::Sender::new(false) }
    }
}

impl Readiness {
    /// Adds a check that holds once the returned [`Check`] is passed.
    #[must_use]
    pub fn check(&self, name: &'static str) -> Check {
        self.set(name, false);
        Check { name, readiness: self.clone() }
    }

    /// Follows whether every check holds.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<bool> {
        self.ready.subscribe()
    }

    fn set(&self, name: &'static str, holds: bool) {
        let mut checks = self.checks.lock().unwrap_or_else(PoisonError::into_inner);
        checks.insert(name, holds);
        let all = checks.values().all(|holds| *holds);
        self.ready.send_if_modified(|ready| std::mem::replace(ready, all) != all);
    }

    fn missing(&self) -> Vec<&'static str> {
        let checks = self.checks.lock().unwrap_or_else(PoisonError::into_inner);
        checks.iter().filter(|(_, holds)| !**holds).map(|(name, _)| *name).collect()
    }
}

#[derive(Clone, Debug)]
pub struct Check {
    name: &'static str,
    readiness: Readiness,
}

impl Check {
    pub fn pass(&self) {
        self.readiness.set(self.name, true);
    }

    pub fn fail(&self) {
        self.readiness.set(self.name, false);
    }
}

pub fn health_router(readiness: Readiness) -> Router {
    Router::new()
        .route("/healthz", get(async || "ok"))
        .route("/livez", get(async || "ok"))
        .route("/readyz", get(readyz))
        .with_state(readiness)
}

async fn readyz(State(readiness): State<Readiness>) -> Response {
    let missing = readiness.missing();
    if missing.is_empty() {
        return "ok".into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {}\n", missing.join(", "))).into_response()
}

pub fn metrics_router(registry: Arc<Registry>) -> Router {
    Router::new().route("/metrics", get(metrics)).with_state(registry)
}

async fn metrics(State(registry): State<Arc<Registry>>) -> Response {
    let mut text = String::new();
    match encode(&mut text, &registry) {
        Ok(()) => {
            ([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text).into_response()
        }
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, e.to_string()).into_response(),
    }
}

/// Binds; "every address" falls back to IPv4's on machines without IPv6.
pub async fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    match TcpListener::bind(address).await {
        Err(e) if address.is_ipv6() && address.ip().is_unspecified() && e.kind() != ErrorKind::AddrInUse => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await
        }
        bound => bound,
    }
}

/// A node's probes and a few scrapers; anybody in the cluster may connect.
fn limits() -> server::Limits {
    server::Limits { connections: 64, ..server::Limits::default() }
}

/// Binds now, so that a taken port is an error at start, and serves until told to stop.
pub async fn serve(what: &str, address: SocketAddr, router: Router, stop: CancellationToken) -> Result<(), String> {
    let listener = bind(address).await.map_err(|e| format!("cannot bind {what} to {address}: {e}"))?;
    tokio::spawn(server::serve_plain(listener, router, limits(), stop));
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::body::Body;
    use axum::http::Request;
    use http_body_util::BodyExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tower::ServiceExt;

    use super::*;

    async fn get(router: Router, path: &str) -> (StatusCode, String) {
        let response = router.oneshot(Request::get(path).body(Body::empty()).unwrap()).await.unwrap();
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn ready_only_while_every_check_holds() {
        let readiness = Readiness::default();
        let (socket, cache) = (readiness.check("socket"), readiness.check("pod cache"));
        let router = health_router(readiness.clone());
        socket.pass();
        let (status, text) = get(router.clone(), "/readyz").await;
        assert_eq!((status, text.as_str()), (StatusCode::SERVICE_UNAVAILABLE, "not ready: pod cache\n"));
        cache.pass();
        assert_eq!(get(router.clone(), "/readyz").await.0, StatusCode::OK);
        assert!(*readiness.watch().borrow());
        socket.fail();
        assert_eq!(get(router, "/readyz").await.0, StatusCode::SERVICE_UNAVAILABLE);
    }

    #[tokio::test]
    async fn alive_even_while_not_ready() {
        let readiness = Readiness::default();
        let _never = readiness.check("never");
        for path in ["/healthz", "/livez"] {
            assert_eq!(get(health_router(readiness.clone()), path).await.0, StatusCode::OK);
        }
    }

    #[tokio::test]
    async fn idle_connections_and_half_requests_do_not_keep_a_probe_from_its_answer() {
        let port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let stop = CancellationToken::new();
        serve("health", port, health_router(Readiness::default()), stop.clone()).await.unwrap();
        let mut others = Vec::new();
        for at in 0..500 {
            let mut other = TcpStream::connect(port).await.unwrap();
            if at % 2 == 0 {
                // It may have been sent away already.
                let _ = other.write_all(b"POST /livez HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n").await;
            }
            others.push(other);
        }
        let mut probe = TcpStream::connect(port).await.unwrap();
        probe.write_all(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut answer = [0; 15];
        tokio::time::timeout(Duration::from_secs(10), probe.read_exact(&mut answer)).await.unwrap().unwrap();
        assert_eq!(&answer, b"HTTP/1.1 200 OK");
        let mut sink = Vec::new();
        // A silent one: half a request is refused, and hyper closes that one itself.
        let first = others.get_mut(1).unwrap();
        let closed = tokio::time::timeout(Duration::from_secs(10), first.read_to_end(&mut sink)).await;
        assert!(closed.is_ok(), "500 connections are open at once");
        stop.cancel();
    }
}
