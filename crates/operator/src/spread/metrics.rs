//! What `spread` counts, under the names that dashboards know.

use std::time::Duration;

use groundcrew_core::spread::{Class, Kind, Split};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::runtime::cache::Key;

/// How a review ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reviewed {
    Patched,
    Unchanged,
    Invalid,
    Observed,
}

impl Reviewed {
    const fn name(self) -> &'static str {
        match self {
            Reviewed::Patched => "patched",
            Reviewed::Unchanged => "unchanged",
            Reviewed::Invalid => "invalid",
            Reviewed::Observed => "observed",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfWorkload {
    namespace: String,
    workload: String,
    workload_type: &'static str,
    replica_type: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfResult {
    workload_type: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfKind {
    workload_type: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfNamespace {
    namespace: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfReview {
    result: &'static str,
}

#[derive(Debug)]
pub struct Metrics {
    replicas: Family<OfWorkload, Gauge>,
    reconciliations: Family<OfResult, Counter>,
    seconds: Family<OfKind, Histogram>,
    blocked: Family<OfNamespace, Counter>,
    fallbacks: Family<OfNamespace, Counter>,
    reviews: Family<OfReview, Counter>,
    review_seconds: Histogram,
    leader: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            replicas: Family::default(),
            reconciliations: Family::default(),
            seconds: Family::new_with_constructor(|| Histogram::new(exponential_buckets(0.000_1, 4.0, 9))),
            blocked: Family::default(),
            fallbacks: Family::default(),
            reviews: Family::default(),
            review_seconds: Histogram::new(exponential_buckets(0.000_005, 4.0, 10)),
            leader: Gauge::default(),
        }
    }
}

/// Results that alerts look at: a series that is born with its first event shows no increase.
const ALERTED: [&str; 2] = ["no_progress", "invalid"];

impl Metrics {
    pub fn register(&self, registry: &mut Registry) {
        for kind in [Kind::Deployment, Kind::StatefulSet] {
            for result in ALERTED {
                drop(self.reconciliations.get_or_create(&OfResult { workload_type: spelled(kind), result }));
            }
        }
        registry.register("spotalis_workload_replicas", "Pods of a workload by class", self.replicas.clone());
        registry.register("spotalis_reconciliations", "Decisions by their result", self.reconciliations.clone());
        registry.register("spotalis_reconciliation_duration_seconds", "Time per decision", self.seconds.clone());
        registry.register("spotalis_rebalancing_blocked_by_pdb", "Moves a budget forbade", self.blocked.clone());
        registry.register("spotalis_spot_fallbacks", "Pods replaced for want of spot", self.fallbacks.clone());
        registry.register("spotalis_webhook_requests", "Pods reviewed", self.reviews.clone());
        let help = "Time per review";
        registry.register("spotalis_webhook_request_duration_seconds", help, self.review_seconds.clone());
        registry.register("spotalis_leader_election_status", "1 while this replica leads", self.leader.clone());
    }

    /// A replica that does not lead knows nothing of workloads that another may have changed meanwhile.
    pub fn leads(&self, leading: bool) {
        self.leader.set(i64::from(leading));
        if !leading {
            self.replicas.clear();
        }
    }

    pub fn reviewed(&self, outcome: Reviewed, took: Duration) {
        self.reviews.get_or_create(&OfReview { result: outcome.name() }).inc();
        self.review_seconds.observe(took.as_secs_f64());
    }

    pub fn replicas(&self, kind: Kind, key: &Key, split: Split) {
        for class in Class::ALL {
            self.replicas.get_or_create(&of(kind, key, class)).set(i64::from(split.of(class)));
        }
    }

    pub fn forget(&self, kind: Kind, key: &Key) {
        for class in Class::ALL {
            self.replicas.remove(&of(kind, key, class));
        }
    }

    pub fn reconciled(&self, kind: Kind, result: &'static str, took: Duration) {
        let workload_type = spelled(kind);
        self.reconciliations.get_or_create(&OfResult { workload_type, result }).inc();
        self.seconds.get_or_create(&OfKind { workload_type }).observe(took.as_secs_f64());
    }

    pub fn blocked(&self, namespace: &str) {
        self.blocked.get_or_create(&OfNamespace { namespace: namespace.to_owned() }).inc();
    }

    pub fn fell_back(&self, namespace: &str) {
        self.fallbacks.get_or_create(&OfNamespace { namespace: namespace.to_owned() }).inc();
    }
}

fn of(kind: Kind, key: &Key, class: Class) -> OfWorkload {
    OfWorkload {
        namespace: key.namespace.clone(),
        workload: key.name.clone(),
        workload_type: spelled(kind),
        replica_type: class.name(),
    }
}

const fn spelled(kind: Kind) -> &'static str {
    match kind {
        Kind::Deployment => "deployment",
        Kind::StatefulSet => "statefulset",
    }
}

#[cfg(test)]
mod tests {
    use groundcrew_core::spread::Why;

    use super::*;

    #[test]
    fn results_that_alerts_look_at_are_there_before_they_happen() {
        let mut registry = Registry::default();
        Metrics::default().register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for result in [Why::NoProgress.name(), "invalid"] {
            for kind in ["deployment", "statefulset"] {
                let series = format!("{{workload_type=\"{kind}\",result=\"{result}\"}} 0");
                assert!(text.contains(&series), "{series} is not in {text}");
            }
        }
    }

    #[test]
    fn who_loses_the_lead_shows_no_workloads() {
        let metrics = Metrics::default();
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let shown = || {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            text.lines().filter(|line| line.starts_with("spotalis_workload_replicas{")).count()
        };
        metrics.leads(true);
        let key = Key { namespace: "ns".into(), name: "web".into() };
        metrics.replicas(Kind::Deployment, &key, Split { spot: 6, on_demand: 4 });
        assert_eq!(shown(), 2);
        metrics.leads(false);
        assert_eq!(shown(), 0);
    }
}
