//! The AdmissionReview on the wire: only the fields that are used, borrowed from the request body.

use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use groundcrew_core::pod::Text;
use json_patch::Patch;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::validate::Judged;

const API_VERSION: &str = "admission.k8s.io/v1";
const KIND: &str = "AdmissionReview";

/// The API server cuts longer warnings off and complains about it.
const WARNING_CHARS: usize = 256;

/// What makes a request no review at all; the API server never sends these.
#[derive(Debug, thiserror::Error)]
pub enum Malformed {
    #[error("the body is not UTF-8")]
    Utf8,
    #[error("the body is not an AdmissionReview: {0}")]
    Json(#[from] serde_json::Error),
    #[error("expected {KIND} of {API_VERSION}, got {kind:?} of {version:?}")]
    Version { kind: String, version: String },
    #[error("the review has no request")]
    NoRequest,
    #[error("the request has no uid")]
    NoUid,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope<'a> {
    #[serde(borrow, default)]
    api_version: Option<Text<'a>>,
    #[serde(borrow, default)]
    kind: Option<Text<'a>>,
    #[serde(borrow, default)]
    request: Option<Request<'a>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Request<'a> {
    #[serde(borrow, default)]
    uid: Option<Text<'a>>,
    #[serde(borrow, default)]
    kind: Option<GroupVersionKind<'a>>,
    #[serde(borrow, default)]
    sub_resource: Option<Text<'a>>,
    #[serde(borrow, default)]
    operation: Option<Text<'a>>,
    #[serde(borrow, default)]
    namespace: Option<Text<'a>>,
    #[serde(default)]
    dry_run: Option<bool>,
    #[serde(borrow, default)]
    object: Option<&'a RawValue>,
}

#[derive(Debug, Deserialize)]
struct GroupVersionKind<'a> {
    #[serde(borrow, default)]
    group: Option<Text<'a>>,
    #[serde(borrow, default)]
    kind: Option<Text<'a>>,
}

/// A well-formed review.
#[derive(Debug)]
pub struct Review<'a>(Request<'a>);

fn text<'t>(text: &'t Option<Text<'_>>) -> &'t str {
    text.as_ref().map_or("", |t| t.as_str())
}

impl<'a> Review<'a> {
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let json = std::str::from_utf8(bytes).map_err(|_| Malformed::Utf8)?;
        let envelope: Envelope<'_> = serde_json::from_str(json)?;
        let (version, kind) = (text(&envelope.api_version), text(&envelope.kind));
        if version != API_VERSION || kind != KIND {
            return Err(Malformed::Version { kind: kind.to_owned(), version: version.to_owned() });
        }
        let request = envelope.request.ok_or(Malformed::NoRequest)?;
        if text(&request.uid).is_empty() {
            return Err(Malformed::NoUid);
        }
        Ok(Self(request))
    }

    #[must_use]
    pub fn uid(&self) -> &str {
        text(&self.0.uid)
    }

    #[must_use]
    pub fn namespace(&self) -> &str {
        text(&self.0.namespace)
    }

    #[must_use]
    pub fn dry_run(&self) -> bool {
        self.0.dry_run.unwrap_or(false)
    }

    /// The object's bytes as received, if this is the creation of that kind of the core group and nothing else.
    #[must_use]
    pub fn created(&self, wanted: &'static str) -> Option<&'a str> {
        self.object(Judged { group: "", kinds: &[wanted], operations: &["CREATE"] })
    }

    /// The object's bytes as received, if this is one of those requests.
    #[must_use]
    pub fn object(&self, judged: Judged<'_>) -> Option<&'a str> {
        let kind = self.0.kind.as_ref()?;
        let is_wanted = judged.kinds.contains(&text(&kind.kind)) && text(&kind.group) == judged.group;
        let asked = judged.operations.contains(&text(&self.0.operation)) && text(&self.0.sub_resource).is_empty();
        let object = self.0.object.map(RawValue::get).filter(|json| *json != "null")?;
        (is_wanted && asked).then_some(object)
    }

    #[must_use]
    pub fn respond(&self, answer: Answer) -> Response {
        respond(self.uid(), answer)
    }
}

fn respond(uid: &str, answer: Answer) -> Response {
    let patch = answer.patch.map(|patch| STANDARD.encode(serde_json::to_vec(&patch).unwrap_or_default()));
    let body = ReviewAnswer {
        api_version: API_VERSION,
        kind: KIND,
        response: ResponseBody {
            uid,
            allowed: answer.refusal.is_none(),
            status: answer.refusal.map(|message| Status { message, code: 403, reason: "Forbidden" }),
            patch_type: patch.is_some().then_some("JSONPatch"),
            patch,
            warnings: answer.warnings,
        },
    };
    // Serialising strings and booleans cannot fail.
    let json = serde_json::to_vec(&body).unwrap_or_default();
    ([(CONTENT_TYPE, "application/json")], json).into_response()
}

/// The answer to JSON that asks nothing.
#[must_use]
pub fn allowed_without_request() -> Response {
    respond("", Answer::allowed())
}

/// What goes back.
#[derive(Debug, Default)]
pub struct Answer {
    pub patch: Option<Patch>,
    pub warnings: Vec<String>,
    /// Only ever set by validation.
    pub refusal: Option<String>,
}

impl Answer {
    #[must_use]
    pub fn allowed() -> Self {
        Self::default()
    }

    #[must_use]
    pub fn warn(mut self, warning: impl Into<String>) -> Self {
        let warning: String = warning.into();
        self.warnings.push(warning.chars().take(WARNING_CHARS).collect());
        self
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ReviewAnswer<'a> {
    api_version: &'a str,
    kind: &'a str,
    response: ResponseBody<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ResponseBody<'a> {
    uid: &'a str,
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Status>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

#[derive(Serialize)]
struct Status {
    message: String,
    code: u16,
    reason: &'static str,
}
