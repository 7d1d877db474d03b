//! Validation: the one place where an object can be refused, and only because a feature was told to; others warn.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, StatusCode};
use axum::response::{IntoResponse, Response};
use groundcrew_core::feature::Feature;
use tracing::{debug, error, info, info_span};

use super::review::{Answer, Review};
use super::{Admission, Outcome, body};

/// A feature's part in validation.
pub trait Validator: Send + Sync {
    fn feature(&self) -> Feature;
    fn judges(&self) -> Judged<'static>;
    fn validate(&self, object: &str) -> Result<(), Refusal>;
}

/// Which requests a validator looks at.
#[derive(Clone, Copy, Debug)]
pub struct Judged<'a> {
    pub group: &'static str,
    pub kinds: &'a [&'static str],
    pub operations: &'a [&'static str],
}

impl Judged<'static> {
    /// What [`Entry::workload_written`](super::registration::Entry::workload_written) sends.
    pub const WORKLOADS: Self =
        Self { group: "apps", kinds: &["Deployment", "StatefulSet"], operations: &["CREATE", "UPDATE"] };
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Told to whoever made the request.
    Denied(String),
    /// Allowed, and whoever made the request hears why it will not do what they meant.
    Doubtful(String),
    /// Not ours to judge: allowed, with a warning.
    Unreadable(String),
}

pub(super) async fn validate(State(admission): State<Arc<Admission>>, request: Request<Body>) -> Response {
    let started = tokio::time::Instant::now();
    let (outcome, response) = match body::read(request, &admission.limits).await {
        Ok(bytes) => admission.answer_validation(&bytes),
        Err(refusal) => (Outcome::Malformed, refusal.into_response()),
    };
    admission.metrics.record(outcome, started.elapsed());
    response
}

impl Admission {
    fn answer_validation(&self, bytes: &[u8]) -> (Outcome, Response) {
        let review = match Review::parse(bytes) {
            Ok(review) => review,
            Err(malformed) => {
                debug!(reason = %malformed, "malformed review");
                return (Outcome::Malformed, (StatusCode::BAD_REQUEST, malformed.to_string()).into_response());
            }
        };
        let span = info_span!("review", uid = review.uid(), namespace = review.namespace());
        let _entered = span.enter();
        let (outcome, answer) = catch_unwind(AssertUnwindSafe(|| self.judge(&review))).unwrap_or_else(|_| {
            error!("validation panicked; the object is allowed");
            (Outcome::Panicked, Answer::allowed())
        });
        (outcome, review.respond(answer))
    }

    fn judge(&self, review: &Review<'_>) -> (Outcome, Answer) {
        let mut answer = Answer::allowed();
        let mut outcome = Outcome::Unchanged;
        if self.exempt_namespaces.iter().any(|ns| ns == review.namespace()) {
            return (outcome, answer);
        }
        for validator in &self.validators {
            let Some(object) = review.object(validator.judges()) else { continue };
            match validator.validate(object) {
                Ok(()) => {}
                Err(Refusal::Denied(why)) => {
                    info!(feature = %validator.feature(), why, "refused");
                    return (Outcome::Refused, Answer { refusal: Some(why), ..answer });
                }
                Err(Refusal::Doubtful(why)) => {
                    self.metrics.warned(validator.feature(), 1);
                    answer = answer.warn(format!("groundcrew: {why}"));
                }
                Err(Refusal::Unreadable(e)) => {
                    outcome = Outcome::Unreadable;
                    self.metrics.warned(validator.feature(), 1);
                    answer = answer.warn(format!("groundcrew: not judged, it could not be read: {e}"));
                }
            }
        }
        (outcome, answer)
    }
}
