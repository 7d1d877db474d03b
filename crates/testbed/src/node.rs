//! Reading nodes.

use k8s_openapi::api::core::v1::Node;

/// Ready, and rid of the taints that Kubernetes puts on a node until it is: pods will be scheduled there.
#[must_use]
pub fn is_ready_and_free(node: Option<&Node>) -> bool {
    let Some(node) = node else { return false };
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let ready = conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True");
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    ready && !taints.into_iter().any(|taint| taint.key.starts_with("node.kubernetes.io/"))
}
