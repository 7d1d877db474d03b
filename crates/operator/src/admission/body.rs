//! Request bodies, bounded in size, in time and in how much of them is held at once.

use std::time::Duration;

use axum::body::Body;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderMap, Request, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;

use self::budget::{Budget, Share};

mod budget;
#[cfg(test)]
mod tests;

/// Bounds of request bodies.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Legal reviews reach 3 MB (old and new object of 1.5 MB each), escapes on top.
    pub bytes: usize,
    /// The API server gives up after one second; whoever needs longer is not the API server, or on a stalled machine.
    pub deadline: Duration,
    /// Of all bodies together, so that no number of streams fills the memory.
    pub budget: Budget,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bytes: 7 << 20,
            deadline: Duration::from_secs(5),
            // Ten of the largest legal reviews, or two thousand usual ones. A buffer may be twice as large as what is
            // in it, and that is a quarter of the memory the manifests give us.
            budget: Budget::new(32 << 20),
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
    #[error("too many bodies are arriving, and this one takes longest")]
    Crowded,
    #[error("the body could not be read")]
    Broken,
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = match self {
            Refusal::ContentType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Refusal::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Refusal::TooSlow => StatusCode::REQUEST_TIMEOUT,
            Refusal::Crowded => StatusCode::SERVICE_UNAVAILABLE,
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
    let (share, evicted) = limits.budget.enter();
    let collecting = tokio::time::timeout(limits.deadline, collect(request.into_body(), limits, &share));
    tokio::select! {
        biased;
        read = collecting => read.unwrap_or(Err(Refusal::TooSlow)),
        _ = evicted => Err(Refusal::Crowded),
    }
}

async fn collect(mut body: Body, limits: &Limits, share: &Share) -> Result<Bytes, Refusal> {
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| Refusal::Broken)?.into_data() else { continue };
        if bytes.len() + data.len() > limits.bytes {
            return Err(Refusal::TooLarge(limits.bytes));
        }
        if !share.grow(data.len()) {
            return Err(Refusal::Crowded);
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
