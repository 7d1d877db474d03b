//! What RBAC cannot say: which fields of an object an account of ours may write. A stolen token is worth no more.

use groundcrew_core::keys;
use serde_json::{Value, json};

use super::{NAME, meta};

const POLICY_API: &str = "admissionregistration.k8s.io/v1";

/// Of a pod that exists, what can be changed at all and would decide what it runs, where and for how long. Tolerations
/// are left out: the API server itself adds some to a pod that has none.
const POD_SPEC: [&str; 8] = [
    "activeDeadlineSeconds",
    "affinity",
    "containers",
    "ephemeralContainers",
    "initContainers",
    "nodeSelector",
    "schedulingGates",
    "terminationGracePeriodSeconds",
];

/// Of a node, everything but its taints.
const NODE_SPEC: [&str; 6] = ["configSource", "externalID", "podCIDR", "podCIDRs", "providerID", "unschedulable"];

const POD_STATUS: [&str; 19] = [
    "allocatedResources",
    "containerStatuses",
    "ephemeralContainerStatuses",
    "extendedResourceClaimStatus",
    "hostIP",
    "hostIPs",
    "initContainerStatuses",
    "message",
    "nominatedNodeName",
    "observedGeneration",
    "phase",
    "podIP",
    "podIPs",
    "qosClass",
    "reason",
    "resize",
    "resourceClaimStatuses",
    "resources",
    "startTime",
];

/// The policies for the operator: every write that a feature makes to an object of others, and none besides.
pub(super) fn operator(namespace: &str) -> Vec<Value> {
    let account = (NAME, namespace);
    let stamps = [keys::TIMESTAMP, keys::SPREAD_RANK, keys::DELETION_COST];
    let pods = [
        validation(&same("spec", &POD_SPEC), "groundcrew may not change what a pod runs"),
        validation(&same_metadata_but(&stamps), "groundcrew may only write its own annotations"),
    ];
    let status = [
        validation(&same_status_but_the_gate(), "groundcrew may only write its own condition"),
        validation(&same_metadata_but(&[keys::WARMUP_STATE]), "groundcrew may only write its own annotations"),
    ];
    // Not their metadata: what somebody's webhook adds to it whenever a node is updated would count as ours, and a held
    // node could not be released.
    let nodes = [validation(&same("spec", &NODE_SPEC), "groundcrew may only write taints")];
    let mut all = policy("groundcrew-operator-pods", account, ("", "pods", &["UPDATE"]), &pods);
    all.extend(policy("groundcrew-operator-pod-status", account, ("", "pods/status", &["UPDATE"]), &status));
    all.extend(policy("groundcrew-operator-nodes", account, ("", "nodes", &["UPDATE"]), &nodes));
    all
}

/// A policy and its binding for one account, by name and namespace.
pub(crate) fn policy(
    name: &str,
    account: (&str, &str),
    on: (&str, &str, &[&str]),
    validations: &[Value],
) -> Vec<Value> {
    let (account, namespace) = account;
    let (group, resource, operations) = on;
    vec![
        json!({
            "apiVersion": POLICY_API, "kind": "ValidatingAdmissionPolicy", "metadata": meta(name, None),
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": [{
                    "apiGroups": [group], "apiVersions": ["v1"], "resources": [resource], "operations": operations,
                }]},
                "matchConditions": [{
                    "name": format!("is-{account}"),
                    "expression": format!("request.userInfo.username == 'system:serviceaccount:{namespace}:{account}'"),
                }],
                "validations": validations,
            },
        }),
        json!({
            "apiVersion": POLICY_API, "kind": "ValidatingAdmissionPolicyBinding", "metadata": meta(name, None),
            "spec": {"policyName": name, "validationActions": ["Deny"]},
        }),
    ]
}

pub(crate) fn validation(expression: &str, message: &str) -> Value {
    json!({"expression": expression, "message": message, "reason": "Forbidden"})
}

/// Fields that this server does not know compare as absent on both sides.
fn same(part: &str, fields: &[&str]) -> String {
    let one = |field: &&str| format!("dyn(object).?{part}.?{field} == dyn(oldObject).?{part}.?{field}");
    fields.iter().map(one).collect::<Vec<_>>().join(" && ")
}

/// Everything in a pod's status stays, but for the condition of warm-up.
pub(crate) fn same_status_but_the_gate() -> String {
    let others =
        |of: &str| format!("{of}.status.?conditions.orValue([]).filter(c, c.type != '{}')", keys::WARMUP_READY);
    format!("{} == {} && {}", others("object"), others("oldObject"), same("status", &POD_STATUS))
}

/// Only these annotations may come, go or change.
pub(crate) fn same_metadata_but(annotations: &[&str]) -> String {
    let map = |of: &str| format!("{of}.metadata.?annotations.orValue({{}})");
    let (new, old) = (map("object"), map("oldObject"));
    let ours: Vec<String> = annotations.iter().map(|key| format!("'{key}'")).collect();
    let ours = ours.join(", ");
    let kept = |a: &str, b: &str| format!("{a}.all(k, k in [{ours}] || (k in {b} && {a}[k] == {b}[k]))");
    let stays = |field: &str| format!("object.metadata.?{field} == oldObject.metadata.?{field}");
    [kept(&new, &old), kept(&old, &new), stays("labels"), stays("finalizers"), stays("ownerReferences")].join(" && ")
}
