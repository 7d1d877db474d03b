//! Every annotation, label and taint users know, with one typed reader each.
//!
//! These are a contract with clusters that exist: a key is never renamed, only added.

use std::collections::BTreeMap;

/// Asks for a timestamp; any value counts, even an empty one.
pub const ADDTIME: &str = "addtime";
/// The time groundcrew wrote, or the user's own, which is never touched.
pub const TIMESTAMP: &str = "timestamp";

/// Names the template that sizes a DaemonSet's pods.
pub const RESOURCE_TEMPLATE: &str = "flexdaemonsets.xai/resource-template";

/// The template a DaemonSet or its pod asks for; an empty value means none.
pub fn resource_template(annotations: &impl Lookup) -> Option<&str> {
    annotations.value(RESOURCE_TEMPLATE).filter(|name| !name.is_empty())
}
/// Opts a pod into warm-up; only the exact value [`WARMUP_ENABLED`] counts.
pub const WARMUP: &str = "kube-booster.io/warmup";
pub const WARMUP_ENABLED: &str = "enabled";
/// The readiness gate, and the pod condition that opens it.
pub const WARMUP_READY: &str = "kube-booster.io/warmup-ready";
/// What the agent remembers on the pod: which containers it warmed and how far it got.
pub const WARMUP_STATE: &str = "kube-booster.io/warmup-state";
pub const WARMUP_ENDPOINT: &str = "kube-booster.io/warmup-endpoint";
pub const WARMUP_REQUESTS: &str = "kube-booster.io/warmup-requests";
pub const WARMUP_DURATION: &str = "kube-booster.io/warmup-duration";
pub const WARMUP_PORT: &str = "kube-booster.io/warmup-port";
pub const WARMUP_TIMEOUT: &str = "kube-booster.io/warmup-timeout";
pub const WARMUP_PROTOCOL: &str = "kube-booster.io/warmup-protocol";
pub const WARMUP_GRPC_METHOD: &str = "kube-booster.io/warmup-grpc-method";
pub const WARMUP_GRPC_PAYLOAD: &str = "kube-booster.io/warmup-grpc-payload";
pub const WARMUP_CONFIG: &str = "kube-booster.io/warmup-config";
pub const WARMUP_MODE: &str = "kube-booster.io/warmup-mode";
pub const WARMUP_ENDPOINT_FROM: &str = "kube-booster.io/warmup-endpoint-from";
pub const WARMUP_FAILURE_POLICY: &str = "kube-booster.io/warmup-failure-policy";
pub const WARMUP_RETRIES: &str = "kube-booster.io/warmup-retries";
/// The built-in startup taint's key; with [`STARTUP_WAIT`] and `NoSchedule` it is the whole taint.
pub const STARTUP_INITIALIZING: &str = "startup.k8s.io/initializing";
/// The key of the taint of the phase before it, where two phases are asked for.
pub const STARTUP_PREINIT: &str = "startup.k8s.io/preinit";
/// The value of every startup taint that says no other.
pub const STARTUP_WAIT: &str = "wait";
/// The label of init pods, and its value in each phase.
pub const STARTUP_COMPONENT: &str = "startup.k8s.io/component";
pub const STARTUP_COMPONENT_INIT: &str = "init";
pub const STARTUP_COMPONENT_PREINIT: &str = "preinit";
/// On an init pod, exactly `true`: done, whatever the readiness says.
pub const STARTUP_READY: &str = "startup.k8s.io/ready";
/// On a node, Unix seconds: when its startup was over.
pub const STARTUP_COMPLETED_AT: &str = "startup.k8s.io/completedAt";
/// On a node, Unix seconds: it was let go because its time was up, not because it was ready.
pub const STARTUP_TIMED_OUT_AT: &str = "startup.k8s.io/timedOutAt";
/// Keys below it are startup taints to the cluster autoscaler, with no setting there.
pub const AUTOSCALER_STARTUP_TAINT: &str = "startup-taint.cluster-autoscaler.kubernetes.io/";
/// `system` marks the AKS node pool that runs the cluster itself.
pub const AKS_MODE: &str = "kubernetes.azure.com/mode";
pub const AKS_MODE_SYSTEM: &str = "system";
/// Labels of control-plane nodes, the second as older installers write it.
pub const CONTROL_PLANE: [&str; 2] = ["node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"];
/// Marks what the kubelet shows of a pod that lives in a file on its node.
pub const MIRROR_POD: &str = "kubernetes.io/config.mirror";
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

    /// The value of an optional setting: present but empty means absent.
    fn setting(&self, key: &str) -> Option<&str> {
        self.value(key).filter(|value| !value.is_empty())
    }
}

impl Lookup for BTreeMap<String, String> {
    fn value(&self, key: &str) -> Option<&str> {
        self.get(key).map(String::as_str)
    }
}

impl<L: Lookup> Lookup for &L {
    fn value(&self, key: &str) -> Option<&str> {
        (*self).value(key)
    }
}

impl<L: Lookup> Lookup for Option<L> {
    fn value(&self, key: &str) -> Option<&str> {
        self.as_ref()?.value(key)
    }
}
