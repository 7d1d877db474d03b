//! What can be seen of `node_startup` from outside.

use std::time::Duration;

use groundcrew_core::node_startup::report::{Blockers, Tally};
use groundcrew_core::node_startup::{Named, Released, Verdict};
use jiff::Timestamp;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfRule {
    rule: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ended {
    rule: String,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfDaemonSet {
    namespace: String,
    daemonset: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfEngine {
    engine: &'static str,
}

type Seconds = Family<OfRule, Histogram, fn() -> Histogram>;

/// Labels are rule names and DaemonSets that block: as many as an admin made, never one per node.
#[derive(Clone, Debug)]
pub struct Metrics {
    held: Family<OfRule, Gauge>,
    timed_out: Family<OfRule, Gauge>,
    released: Family<Ended, Counter>,
    timeouts: Family<OfRule, Counter>,
    hold: Seconds,
    release: Seconds,
    blocked: Family<OfDaemonSet, Gauge>,
    blocked_since: Family<OfDaemonSet, Gauge>,
    guard_open: Family<OfRule, Gauge>,
    engine: Family<OfEngine, Gauge>,
}

/// From a pod that is ready at once to a driver that is built on the node.
fn hold_buckets() -> Histogram {
    Histogram::new([0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0])
}

/// Around the tenth of a second that a release should take at most.
fn release_buckets() -> Histogram {
    Histogram::new([0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0])
}

impl Metrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            held: Family::default(),
            timed_out: Family::default(),
            released: Family::default(),
            timeouts: Family::default(),
            hold: Family::new_with_constructor(hold_buckets),
            release: Family::new_with_constructor(release_buckets),
            blocked: Family::default(),
            blocked_since: Family::default(),
            guard_open: Family::default(),
            engine: Family::default(),
        };
        let registry = registry.sub_registry_with_prefix("groundcrew_node_startup");
        registry.register("nodes_held", "Nodes that carry a startup taint", metrics.held.clone());
        registry.register("nodes_timed_out", "Nodes held for longer than allowed", metrics.timed_out.clone());
        registry.register("released", "Nodes let go, by why", metrics.released.clone());
        registry.register("timed_out", "Nodes whose time was up", metrics.timeouts.clone());
        registry.register("hold_seconds", "How long released nodes were held", metrics.hold.clone());
        registry.register(
            "release_seconds",
            "From the event that showed a node ready to the answer of the write that let it go",
            metrics.release.clone(),
        );
        registry.register("blocked_nodes", "Nodes that wait for this DaemonSet", metrics.blocked.clone());
        registry.register(
            "blocked_since_seconds",
            "Unix time since when the first of them waits",
            metrics.blocked_since.clone(),
        );
        registry.register("guard_open", "0 while new nodes are not tainted", metrics.guard_open.clone());
        registry.register("engine", "1 for the engine that taints new nodes", metrics.engine.clone());
        metrics
    }

    pub fn released(&self, rule: &str, verdict: &Verdict, held: Duration, followed: Option<Duration>) {
        let reason = match verdict {
            Verdict::Release(Released::Ready) => "ready",
            Verdict::Release(Released::TimedOut(_)) => "timed_out",
            Verdict::Release(Released::RuleGone) => "rule_gone",
            Verdict::Release(Released::NotSelected) => "not_selected",
            _ => return,
        };
        self.released.get_or_create(&Ended { rule: rule.to_owned(), reason }).inc();
        let labels = OfRule { rule: rule.to_owned() };
        self.hold.get_or_create(&labels).observe(held.as_secs_f64());
        if let Some(followed) = followed {
            self.release.get_or_create(&labels).observe(followed.as_secs_f64());
        }
    }

    pub fn timed_out(&self, rule: &str) {
        self.timeouts.get_or_create(&OfRule { rule: rule.to_owned() }).inc();
    }

    pub fn rule(&self, rule: &str, tally: &Tally, guard_open: bool) {
        let labels = OfRule { rule: rule.to_owned() };
        self.held.get_or_create(&labels).set(tally.held.into());
        self.timed_out.get_or_create(&labels).set(tally.timed_out.into());
        self.guard_open.get_or_create(&labels).set(guard_open.into());
    }

    pub fn forget(&self, rule: &str) {
        let labels = OfRule { rule: rule.to_owned() };
        self.held.remove(&labels);
        self.timed_out.remove(&labels);
        self.guard_open.remove(&labels);
    }

    pub fn blockers(&self, blockers: &Blockers) {
        self.blocked.clear();
        self.blocked_since.clear();
        for (Named { namespace, name }, (nodes, since)) in &blockers.0 {
            let labels = OfDaemonSet { namespace: namespace.clone(), daemonset: name.clone() };
            self.blocked.get_or_create(&labels).set((*nodes).into());
            self.blocked_since.get_or_create(&labels).set(Timestamp::as_second(*since));
        }
    }

    pub fn engine(&self, engine: &'static str) {
        self.engine.clear();
        self.engine.get_or_create(&OfEngine { engine }).set(1);
    }
}
