//! What admission counts.

use std::time::Duration;

use groundcrew_core::feature::Feature;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// How a review ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Patched,
    Unchanged,
    /// Not an AdmissionReview; answered with an HTTP error.
    Malformed,
    /// A pod that could not be decoded; allowed.
    Unreadable,
    /// A patch that failed its own check; allowed without it.
    UnsafePatch,
    /// A feature was told to refuse such objects.
    Refused,
    Panicked,
}

impl Outcome {
    const fn name(self) -> &'static str {
        match self {
            Outcome::Patched => "patched",
            Outcome::Unchanged => "unchanged",
            Outcome::Malformed => "malformed",
            Outcome::Unreadable => "unreadable",
            Outcome::UnsafePatch => "unsafe_patch",
            Outcome::Refused => "refused",
            Outcome::Panicked => "panicked",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByOutcome {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByFeature {
    feature: &'static str,
}

#[derive(Clone, Debug)]
pub struct Metrics {
    reviews: Family<ByOutcome, Counter>,
    seconds: Histogram,
    warnings: Family<ByFeature, Counter>,
    panics: Family<ByFeature, Counter>,
}

impl Metrics {
    /// Registers under `groundcrew_admission_…`.
    pub fn register(registry: &mut Registry) -> Self {
        // From 25 µs, where a small review ends, to the API server's patience of one second.
        let buckets = [25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 50e-3, 0.1, 1.0];
        let metrics = Self {
            reviews: Family::default(),
            seconds: Histogram::new(buckets),
            warnings: Family::default(),
            panics: Family::default(),
        };
        let sub = registry.sub_registry_with_prefix("groundcrew_admission");
        sub.register("reviews", "Pod reviews by outcome", metrics.reviews.clone());
        sub.register("review_seconds", "Time from the request's head to its answer", metrics.seconds.clone());
        sub.register("warnings", "Warnings sent to whoever created a pod", metrics.warnings.clone());
        sub.register("panics", "Features that panicked in a review", metrics.panics.clone());
        metrics
    }

    pub fn record(&self, outcome: Outcome, took: Duration) {
        self.reviews.get_or_create(&ByOutcome { outcome: outcome.name() }).inc();
        self.seconds.observe(took.as_secs_f64());
    }

    pub fn warned(&self, feature: Feature, count: usize) {
        if count > 0 {
            self.warnings.get_or_create(&ByFeature { feature: feature.name() }).inc_by(count as u64);
        }
    }

    pub fn panicked(&self, feature: Feature) {
        self.panics.get_or_create(&ByFeature { feature: feature.name() }).inc();
    }
}
