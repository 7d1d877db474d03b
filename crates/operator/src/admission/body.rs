//! Request bodies, bounded in size, in time and in how much of them is held at once.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderMap, Request, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use tokio::sync::Semaphore;

/// Bounds of one request body.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Legal reviews reach 3 MB (old and new object of 1.5 MB each), escapes on top.
    pub bytes: usize,
    /// The API server gives up after one second; whoever needs longer is not the API server.
    pub deadline: Duration,
    /// Bodies above `small` take turns, so that many slow writers cannot fill the memory.
    pub small: usize,
    large_slots: Arc<Semaphore>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bytes: 7 << 20,
            deadline: Duration::from_secs(5),
            small: 256 << 10,
            large_slots: Arc::new(Semaphore::new(8)),
        }
    }
}

/// Why a request was not read.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error("expected content type application/json")]
    ContentType,
    #[error("the body is larger than {0} bytes")]
    TooLarge(usize),
    #[error("the body did not arrive in time")]
    TooSlow,
    #[error("the body could not be read")]
    Broken,
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = match self {
            Refusal::ContentType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Refusal::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Refusal::TooSlow => StatusCode::REQUEST_TIMEOUT,
            Refusal::Broken => StatusCode::BAD_REQUEST,
        };
        (status, self.to_string()).into_response()
    }
}

/// Reads a JSON body within the limits.
pub async fn read(request: Request<Body>, limits: &Limits) -> Result<Bytes, Refusal> {
    if !is_json(request.headers()) {
        return Err(Refusal::ContentType);
    }
    // A length that is announced too large is refused before a byte of it is read.
    if announced_length(request.headers()).is_some_and(|length| length > limits.bytes as u64) {
        return Err(Refusal::TooLarge(limits.bytes));
    }
    let collecting = collect(request.into_body(), limits);
    tokio::time::timeout(limits.deadline, collecting).await.unwrap_or(Err(Refusal::TooSlow))
}

async fn collect(mut body: Body, limits: &Limits) -> Result<Bytes, Refusal> {
    let mut bytes = BytesMut::new();
    let mut slot = None;
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| Refusal::Broken)?.into_data() else { continue };
        if bytes.len() + data.len() > limits.bytes {
            return Err(Refusal::TooLarge(limits.bytes));
        }
        if slot.is_none() && bytes.len() + data.len() > limits.small {
            slot = limits.large_slots.acquire().await.ok();
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes.freeze())
}

fn is_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(CONTENT_TYPE).and_then(|v| v.to_str().ok()) else { return false };
    let essence = value.split(';').next().unwrap_or_default();
    essence.trim().eq_ignore_ascii_case("application/json")
}

fn announced_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}
