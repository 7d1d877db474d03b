//! The API server behind one that answers some requests itself.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header::{CONTENT_TYPE, HOST, RETRY_AFTER};
use http::{Method, Request, StatusCode, Uri};
use kube::Client;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::cluster::{Cluster, unique};
use crate::kubeconfig;

/// No request that groundcrew makes is larger.
const MAX_BODY: usize = 16 * 1024 * 1024;

/// Which requests are answered here, and with what.
type Rule = dyn Fn(&Method, &Uri) -> Option<StatusCode> + Send + Sync;

struct Shared {
    client: Client,
    rule: Mutex<Option<Arc<Rule>>>,
    refused: AtomicUsize,
}

/// Speaks plain HTTP and acts as the cluster's admin, so that it can look into what a [`Proxy`](crate::Proxy) cannot.
pub struct FaultyApi {
    address: SocketAddr,
    shared: Arc<Shared>,
    server: JoinHandle<()>,
}

impl FaultyApi {
    /// One that passes everything on.
    ///
    /// # Errors
    /// No port is free.
    pub async fn start(cluster: &Cluster) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let client = cluster.connect().await?;
        let shared = Arc::new(Shared { client, rule: Mutex::default(), refused: AtomicUsize::new(0) });
        let router = axum::Router::new().fallback(answer).with_state(Arc::clone(&shared));
        let server = tokio::spawn(async move {
            let _ = axum::serve(listener, router).await;
        });
        Ok(Self { address, shared, server })
    }

    /// From now on requests for which `rule` has a status are answered with it and never reach the API server.
    pub fn refuse(&self, rule: impl Fn(&Method, &Uri) -> Option<StatusCode> + Send + Sync + 'static) {
        *self.shared.rule.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(rule));
    }

    /// Passes everything on again.
    pub fn heal(&self) {
        *self.shared.rule.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// How many requests were answered here.
    #[must_use]
    pub fn refused(&self) -> usize {
        self.shared.refused.load(Ordering::SeqCst)
    }

    /// A kubeconfig that leads here.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn kubeconfig(&self, cluster: &Cluster) -> anyhow::Result<PathBuf> {
        let original = cluster.kubeconfig();
        let directory = original.parent().context("a kubeconfig lies in a directory")?;
        let copy = directory.join(format!("{}.kubeconfig", unique("faulty")));
        kubeconfig::redirect(original, copy, &format!("http://{}", self.address))
    }
}

impl std::fmt::Debug for FaultyApi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FaultyApi").field("address", &self.address).field("refused", &self.refused()).finish()
    }
}

impl Drop for FaultyApi {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn answer(State(shared): State<Arc<Shared>>, request: Request<Body>) -> Response {
    let rule = shared.rule.lock().unwrap_or_else(PoisonError::into_inner).clone();
    if let Some(status) = rule.and_then(|rule| rule(request.method(), request.uri())) {
        shared.refused.fetch_add(1, Ordering::SeqCst);
        return refusal(status);
    }
    forward(&shared.client, request).await.unwrap_or_else(|e| (StatusCode::BAD_GATEWAY, e.to_string()).into_response())
}

/// Refuses as an API server does.
fn refusal(status: StatusCode) -> Response {
    let reason = match status.as_u16() {
        409 => "Conflict",
        429 => "TooManyRequests",
        503 => "ServiceUnavailable",
        504 => "Timeout",
        _ => "InternalError",
    };
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "reason": reason, "message": "refused for a test", "code": status.as_u16(),
    });
    let headers = [(CONTENT_TYPE, "application/json"), (RETRY_AFTER, "1")];
    (status, headers, body.to_string()).into_response()
}

async fn forward(client: &Client, request: Request<Body>) -> anyhow::Result<Response> {
    let (mut head, body) = request.into_parts();
    head.headers.remove(HOST);
    let body = to_bytes(body, MAX_BODY).await?;
    let request = Request::from_parts(head, kube::client::Body::from(body.to_vec()));
    Ok(client.send(request).await?.map(Body::new))
}
