//! Every annotation, label and taint users know, with one typed reader each.
//!
//! These are a contract with clusters that exist: a key is never renamed, only added.

use std::collections::BTreeMap;

/// Asks for a timestamp; any value counts, even an empty one.
pub const ADDTIME: &str = "addtime";
/// The time groundcrew wrote, or the user's own, which is never touched.
pub const TIMESTAMP: &str = "timestamp";

/// Opts a Deployment or StatefulSet into `spread`, as annotation or label; only `true` counts.
pub const SPREAD_ENABLED: &str = "spotalis.io/enabled";
pub const SPREAD_PERCENTAGE: &str = "spotalis.io/spot-percentage";
pub const SPREAD_FLOOR: &str = "spotalis.io/min-on-demand";
/// When moves may start, and for how long; on the workload or on its Namespace.
pub const SPREAD_SCHEDULE: &str = "spotalis.io/disruption-schedule";
pub const SPREAD_DURATION: &str = "spotalis.io/disruption-duration";
/// On a pod: its place in the order of its revision. The deletion cost is ours where it follows from this.
pub const SPREAD_RANK: &str = "groundcrew.io/spread-rank";
/// Of pods equally ready the ReplicaSet removes the one with the lowest cost first.
pub const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// Pods annotated so are never moved.
pub const EXEMPT_FROM_MOVES: [(&str, &str); 2] =
    [("karpenter.sh/do-not-disrupt", "true"), ("cluster-autoscaler.kubernetes.io/safe-to-evict", "false")];

/// A map of annotations or labels, whoever owns the strings.
pub trait Lookup {
    fn value(&self, key: &str) -> Option<&str>;

    fn has(&self, key: &str) -> bool {
        self.value(key).is_some()
    }
}

impl Lookup for BTreeMap<String, String> {
    fn value(&self, key: &str) -> Option<&str> {
        self.get(key).map(String::as_str)
    }
}

impl<L: Lookup> Lookup for Option<L> {
    fn value(&self, key: &str) -> Option<&str> {
        self.as_ref()?.value(key)
    }
}
