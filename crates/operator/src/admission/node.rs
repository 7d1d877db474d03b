//! Node creation: the same sandwich as for pods, with one difference the contract asks for: a review without a
//! request is allowed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, StatusCode};
use axum::response::{IntoResponse, Response};
use groundcrew_core::feature::Feature;
use groundcrew_core::node_startup::admission::NodeView;
use json_patch::{Patch, PatchOperation};
use serde_json::Value;
use tracing::{debug, error, info_span, warn};

use super::review::{Answer, Malformed, Review, allowed_without_request};
use super::{Admission, Outcome, body};

/// A feature's part in node admission.
pub trait NodeFeature: Send + Sync {
    fn feature(&self) -> Feature;
    fn review(&self, node: &NodeView<'_>, out: &mut NodeContribution);
}

#[derive(Debug, Default)]
pub struct NodeContribution {
    pub operations: Vec<PatchOperation>,
    pub warnings: Vec<String>,
}

pub(super) async fn mutate_node(State(admission): State<Arc<Admission>>, request: Request<Body>) -> Response {
    let started = tokio::time::Instant::now();
    let (outcome, response) = match body::read(request, &admission.limits).await {
        Ok(bytes) => admission.answer_node(&bytes),
        Err(refusal) => (Outcome::Malformed, refusal.into_response()),
    };
    admission.metrics.record(outcome, started.elapsed());
    response
}

impl Admission {
    fn answer_node(&self, bytes: &[u8]) -> (Outcome, Response) {
        let review = match Review::parse(bytes) {
            Ok(review) => review,
            Err(malformed @ (Malformed::Utf8 | Malformed::Json(_))) => {
                debug!(reason = %malformed, "malformed review");
                return (Outcome::Malformed, (StatusCode::BAD_REQUEST, malformed.to_string()).into_response());
            }
            Err(_) => return (Outcome::Unchanged, allowed_without_request()),
        };
        let span = info_span!("review", uid = review.uid());
        let _entered = span.enter();
        let (outcome, answer) = catch_unwind(AssertUnwindSafe(|| self.decide_node(&review))).unwrap_or_else(|_| {
            error!("admission panicked; the node is allowed unchanged");
            (Outcome::Panicked, Answer::allowed())
        });
        (outcome, review.respond(answer))
    }

    fn decide_node(&self, review: &Review<'_>) -> (Outcome, Answer) {
        let Some(object) = review.created("Node") else { return (Outcome::Unchanged, Answer::allowed()) };
        let node: NodeView<'_> = match serde_json::from_str(object) {
            Ok(node) => node,
            Err(e) => {
                warn!(error = %e, "a node that cannot be read is allowed unchanged");
                let warning = format!("groundcrew: the node was left unchanged, it could not be read: {e}");
                return (Outcome::Unreadable, Answer::allowed().warn(warning));
            }
        };
        let mut wanted = NodeContribution::default();
        for feature in &self.node_features {
            let before = wanted.warnings.len();
            feature.review(&node, &mut wanted);
            self.metrics.warned(feature.feature(), wanted.warnings.len() - before);
        }
        let answer = wanted.warnings.into_iter().fold(Answer::allowed(), Answer::warn);
        if wanted.operations.is_empty() {
            return (Outcome::Unchanged, answer);
        }
        let patch = Patch(wanted.operations);
        match applies(object, &patch) {
            Ok(()) => (Outcome::Patched, Answer { patch: Some(patch), ..answer }),
            Err(e) => {
                error!(error = %e, patch = %patch, "a patch that would have blocked the node was dropped");
                (Outcome::UnsafePatch, answer)
            }
        }
    }
}

/// The API server refuses a node whose patch does not apply, so this is tried here first.
fn applies(object: &str, patch: &Patch) -> Result<(), String> {
    let mut value: Value = serde_json::from_str(object).map_err(|e| e.to_string())?;
    json_patch::patch(&mut value, patch).map_err(|e| e.to_string())?;
    serde_json::from_value::<k8s_openapi::api::core::v1::NodeSpec>(value.get("spec").cloned().unwrap_or_default())
        .map(drop)
        .map_err(|e| e.to_string())
}
