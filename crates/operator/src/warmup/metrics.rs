//! What is counted; names are those users of kube-booster know.

use std::time::Duration;

use groundcrew_core::warmup::state::Reason;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// How a warm-up ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[expect(non_camel_case_types, reason = "label values are lower case")]
pub(super) enum Outcome {
    success,
    failed_open,
    failed,
    agent_unavailable,
    cancelled,
}

impl Outcome {
    pub(super) const fn of(reason: Reason) -> Self {
        match reason {
            Reason::WarmupComplete => Self::success,
            Reason::WarmupFailedOpen => Self::failed_open,
            Reason::AgentUnavailable => Self::agent_unavailable,
            Reason::WarmupFailed => Self::failed,
            Reason::WarmupQueued | Reason::WarmupRunning | Reason::WarmupStale => Self::cancelled,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ended {
    namespace: String,
    result: Outcome,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Namespace {
    namespace: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Place {
    namespace: String,
    node: String,
}

/// Seconds, up to the five minutes a warm-up or a wait may take.
#[derive(Clone, Copy, Debug)]
struct Seconds;

impl MetricConstructor<Histogram> for Seconds {
    fn new_metric(&self) -> Histogram {
        Histogram::new([0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0])
    }
}

#[derive(Clone, Debug)]
pub(super) struct Metrics {
    ended: Family<Ended, Counter>,
    requests: Family<Namespace, Counter>,
    duration: Family<Namespace, Histogram, Seconds>,
    active: Family<Place, Gauge>,
    queue_wait: Family<Namespace, Histogram, Seconds>,
}

impl Metrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            ended: Family::default(),
            requests: Family::default(),
            duration: Family::new_with_constructor(Seconds),
            active: Family::default(),
            queue_wait: Family::new_with_constructor(Seconds),
        };
        let named = registry.sub_registry_with_prefix("kube_booster_warmup");
        registry_fill(named, &metrics);
        // A prefix and a name are joined by an underscore, and this one has no name of its own.
        registry.register("kube_booster_warmup", "Warm-ups by how they ended", metrics.ended.clone());
        metrics
    }

    pub(super) fn queued(&self, namespace: &str, wait: Duration) {
        let of = Namespace { namespace: namespace.to_owned() };
        self.queue_wait.get_or_create(&of).observe(wait.as_secs_f64());
    }

    pub(super) fn active(&self, namespace: &str, node: &str, change: i64) {
        let place = Place { namespace: namespace.to_owned(), node: node.to_owned() };
        self.active.get_or_create(&place).inc_by(change);
    }

    pub(super) fn ended(&self, namespace: &str, result: Outcome, requests: u32, took: Option<Duration>) {
        self.ended.get_or_create(&Ended { namespace: namespace.to_owned(), result }).inc();
        let of = Namespace { namespace: namespace.to_owned() };
        self.requests.get_or_create(&of).inc_by(u64::from(requests));
        if let Some(took) = took {
            self.duration.get_or_create(&of).observe(took.as_secs_f64());
        }
    }
}

fn registry_fill(registry: &mut Registry, metrics: &Metrics) {
    registry.register("requests", "Requests sent to pods", metrics.requests.clone());
    registry.register("duration_seconds", "How long warm-ups took", metrics.duration.clone());
    registry.register("active_pods", "Pods being warmed now", metrics.active.clone());
    registry.register("queue_wait_seconds", "How long pods waited for a place", metrics.queue_wait.clone());
}
