//! Admission as a sandwich: unwrap the review, ask each feature, wrap one checked patch.
//!
//! ```text
//! body ─► Review ─► PodView ─► feature, feature, … ─► PodPatch ─► check ─► response
//!                                 │ panics, doubts            └─ does not apply
//!                                 └────────────────► allowed, unchanged, counted
//! ```
//!
//! Guarantees: a well-formed review is always allowed (but see [`validate`]), the answer comes from memory alone, and no patch leaves that
//! was not applied to the received bytes first.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use groundcrew_core::feature::Feature;
use groundcrew_core::patch::{self, PodPatch};
use groundcrew_core::pod::PodView;
use jiff::Timestamp;
use tracing::{Span, debug, error, field, info_span, warn};

pub mod body;
pub mod certs;
pub mod metrics;
pub mod node;
pub mod registration;
pub mod review;
pub mod server;
pub mod tls;
pub mod validate;

pub use metrics::{Metrics, Outcome};
use review::{Answer, Review};

/// What a feature may look at when a pod is created.
#[derive(Debug)]
pub struct PodReview<'a> {
    pub pod: PodView<'a>,
    pub namespace: &'a str,
    pub dry_run: bool,
    pub now: Timestamp,
}

/// What a feature wants: changes to the pod, and sentences for whoever created it.
#[derive(Debug, Default)]
pub struct Contribution {
    pub patch: PodPatch,
    pub warnings: Vec<String>,
}

/// A feature's part in pod admission; a thin shell around its `decide`.
pub trait PodFeature: Send + Sync {
    fn feature(&self) -> Feature;

    /// Whether it also acts in `webhook.exemptNamespaces`.
    fn covers_exempt_namespaces(&self) -> bool {
        false
    }

    fn review(&self, review: &PodReview<'_>, out: &mut Contribution);
}

/// Everything the handlers need, none of it behind a network call.
pub struct Admission {
    pub features: Vec<Box<dyn PodFeature>>,
    pub node_features: Vec<Arc<dyn node::NodeFeature>>,
    pub validators: Vec<Box<dyn validate::Validator>>,
    pub exempt_namespaces: Vec<String>,
    pub metrics: Metrics,
    pub clock: fn() -> Timestamp,
    pub limits: body::Limits,
}

impl std::fmt::Debug for Admission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let features: Vec<_> = self.features.iter().map(|f| f.feature()).collect();
        f.debug_struct("Admission").field("features", &features).finish_non_exhaustive()
    }
}

/// The webhook's routes; `oneshot` it in tests, serve it over TLS in life.
pub fn router(admission: Arc<Admission>) -> Router {
    Router::new()
        .route("/mutate-v1-pod", post(mutate_pod))
        .route("/mutate", post(mutate_pod))
        .route("/mutate-node", post(node::mutate_node))
        .route("/validate", post(validate::validate))
        .with_state(admission)
}

async fn mutate_pod(State(admission): State<Arc<Admission>>, request: Request<Body>) -> Response {
    let started = tokio::time::Instant::now();
    let (outcome, response) = match body::read(request, &admission.limits).await {
        Ok(bytes) => admission.answer_pod(&bytes),
        Err(refusal) => (Outcome::Malformed, refusal.into_response()),
    };
    admission.metrics.record(outcome, started.elapsed());
    response
}

impl Admission {
    fn answer_pod(&self, bytes: &[u8]) -> (Outcome, Response) {
        let review = match Review::parse(bytes) {
            Ok(review) => review,
            Err(malformed) => {
                debug!(reason = %malformed, "malformed review");
                return (Outcome::Malformed, (StatusCode::BAD_REQUEST, malformed.to_string()).into_response());
            }
        };
        let span = info_span!("review", uid = review.uid(), namespace = review.namespace(), pod = field::Empty);
        let _entered = span.enter();
        // A panic must not cost the user the pod: whatever happens below, the answer is at least "allowed".
        let (outcome, answer) = catch_unwind(AssertUnwindSafe(|| self.decide_pod(&review))).unwrap_or_else(|_| {
            error!("admission panicked; the pod is allowed unchanged");
            (Outcome::Panicked, Answer::allowed())
        });
        (outcome, review.respond(answer))
    }

    fn decide_pod(&self, review: &Review<'_>) -> (Outcome, Answer) {
        let Some(object) = review.created("Pod") else {
            return (Outcome::Unchanged, Answer::allowed());
        };
        let pod: PodView<'_> = match serde_json::from_str(object) {
            Ok(pod) => pod,
            Err(e) => {
                warn!(error = %e, "a pod that cannot be read is allowed unchanged");
                let warning = format!("groundcrew: the pod was left unchanged, it could not be read: {e}");
                return (Outcome::Unreadable, Answer::allowed().warn(warning));
            }
        };
        Span::current().record("pod", pod.display_name());
        let review = PodReview { pod, namespace: review.namespace(), dry_run: review.dry_run(), now: (self.clock)() };
        let wanted = self.gather(&review);
        let answer = wanted.warnings.into_iter().fold(Answer::allowed(), Answer::warn);
        let patch = wanted.patch.against(&review.pod);
        if patch.0.is_empty() {
            return (Outcome::Unchanged, answer);
        }
        match patch::check(object, &patch) {
            Ok(()) => (Outcome::Patched, Answer { patch: Some(patch), ..answer }),
            Err(e) => {
                error!(error = %e, patch = %patch, "a patch that would have blocked the pod was dropped");
                (Outcome::UnsafePatch, answer)
            }
        }
    }

    /// Asks each feature; one that panics loses its own contribution only.
    fn gather(&self, review: &PodReview<'_>) -> Contribution {
        let exempt = self.exempt_namespaces.iter().any(|ns| ns == review.namespace);
        let mut all = Contribution::default();
        for feature in self.features.iter().filter(|f| !exempt || f.covers_exempt_namespaces()) {
            let mut own = Contribution::default();
            if catch_unwind(AssertUnwindSafe(|| feature.review(review, &mut own))).is_err() {
                error!(feature = %feature.feature(), "a feature panicked; its part is left out");
                self.metrics.panicked(feature.feature());
                continue;
            }
            self.metrics.warned(feature.feature(), own.warnings.len());
            all.patch.absorb(own.patch);
            all.warnings.append(&mut own.warnings);
        }
        all
    }
}

#[cfg(test)]
mod tests;
