//! Every annotation, label and taint users know, with one typed reader each.
//!
//! These are a contract with clusters that exist: a key is never renamed, only added.

use std::collections::BTreeMap;

/// Asks for a timestamp; any value counts, even an empty one.
pub const ADDTIME: &str = "addtime";
/// The time groundcrew wrote, or the user's own, which is never touched.
pub const TIMESTAMP: &str = "timestamp";

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

/// A map of annotations or labels, whoever owns the strings.
pub trait Lookup {
    fn value(&self, key: &str) -> Option<&str>;

    fn has(&self, key: &str) -> bool {
        self.value(key).is_some()
    }

    /// An optional value: present but empty means absent.
    fn given(&self, key: &str) -> Option<&str> {
        self.value(key).filter(|value| !value.is_empty())
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
