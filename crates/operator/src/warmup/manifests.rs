//! What warm-up adds to an installation: the agents, and the policies that confine them.

use groundcrew_core::config::Config;
use groundcrew_core::keys;
use serde_json::{Value, json};

use crate::manifests::common::{
    CONFIG_FLAG, config_mount, config_volume, from_field, network_policy, ports, probe, sections_annotation, selector,
};
use crate::manifests::{NAME, container_security, meta, pod_security, role, rule};

/// The agents' account, role, DaemonSet and policies.
pub const AGENT: &str = "groundcrew-agent";
/// The component of their pods.
const COMPONENT: &str = "agent";
/// What an agent reads of the configuration: changes elsewhere do not restart the agents.
const READ: [&str; 5] = ["warmup", "logging", "metrics", "health", "tracing"];
const POLICY_API: &str = "admissionregistration.k8s.io/v1";

#[must_use]
pub fn objects(config: &Config, namespace: &str, image: &str) -> Vec<Value> {
    let mut all = vec![json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta(AGENT, Some(namespace))})];
    all.extend(rights(namespace));
    all.extend(policies(namespace));
    all.push(daemon_set(config, namespace, image));
    // Only ingress: an agent warms pods on whatever port they serve.
    all.push(network_policy(config, namespace, AGENT, COMPONENT, &["health"]));
    all
}

/// RBAC knows no nodes; the policies below narrow it to the agent's own.
#[must_use]
pub fn rights(namespace: &str) -> Vec<Value> {
    let cluster = vec![
        rule("", &["pods"], &["list", "watch"], &[]),
        rule("", &["pods/status"], &["patch"], &[]),
        rule("kube-booster.io", &["warmupconfigs"], &["get"], &[]),
        rule("events.k8s.io", &["events"], &["create", "patch"], &[]),
    ];
    let own = vec![rule("coordination.k8s.io", &["leases"], &["create", "get", "patch"], &[])];
    let watch = vec![rule("coordination.k8s.io", &["leases"], &["get", "list", "watch"], &[])];
    let mut all: Vec<Value> = role(AGENT, "ClusterRole", None, namespace, cluster).into();
    all.extend(role(AGENT, "Role", Some(namespace), namespace, own));
    // The operator follows the agents' leases.
    all.push(json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
        "metadata": meta("groundcrew-agent-leases", Some(namespace)), "rules": watch,
    }));
    all.push(json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
        "metadata": meta("groundcrew-agent-leases", Some(namespace)),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "groundcrew-agent-leases"},
        "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": namespace}],
    }));
    all
}

/// A stolen agent token is worth its own node's gates and nothing else.
#[must_use]
pub fn policies(namespace: &str) -> Vec<Value> {
    let own_node = "'authentication.kubernetes.io/node-name' in request.userInfo.extra";
    let node = "request.userInfo.extra['authentication.kubernetes.io/node-name'][0]";
    let pods = vec![
        validation(
            &format!("{own_node} && has(oldObject.spec.nodeName) && oldObject.spec.nodeName == {node}"),
            "an agent may only write pods of its own node",
        ),
        validation(&only_our_condition(), "an agent may only write its own condition"),
        validation(&only_our_annotation(), "an agent may only write its own annotation"),
    ];
    let leases = vec![validation(
        &format!("{own_node} && object.metadata.name == ('{AGENT}.' + {node})"),
        "an agent may only write the lease of its own node",
    )];
    let mut all = policy("pods", namespace, ("", "pods/status", &["UPDATE"]), &pods);
    all.extend(policy("leases", namespace, ("coordination.k8s.io", "leases", &["CREATE", "UPDATE"]), &leases));
    all
}

fn validation(expression: &str, message: &str) -> Value {
    json!({"expression": expression, "message": message, "reason": "Forbidden"})
}

/// Everything else in the status stays. Fields that this server does not know compare as absent on both sides.
fn only_our_condition() -> String {
    let others =
        |of: &str| format!("{of}.status.?conditions.orValue([]).filter(c, c.type != '{}')", keys::WARMUP_READY);
    let mut all = vec![format!("{} == {}", others("object"), others("oldObject"))];
    let fields = [
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
    all.extend(fields.iter().map(|field| format!("dyn(object.status).?{field} == dyn(oldObject.status).?{field}")));
    all.join(" && ")
}

fn only_our_annotation() -> String {
    let map = |of: &str| format!("{of}.metadata.?annotations.orValue({{}})");
    let (new, old) = (map("object"), map("oldObject"));
    let kept =
        |a: &str, b: &str| format!("{a}.all(k, k == '{}' || (k in {b} && {a}[k] == {b}[k]))", keys::WARMUP_STATE);
    let same = |field: &str| format!("object.metadata.?{field} == oldObject.metadata.?{field}");
    [kept(&new, &old), kept(&old, &new), same("labels"), same("finalizers"), same("ownerReferences")].join(" && ")
}

fn policy(what: &str, namespace: &str, on: (&str, &str, &[&str]), validations: &[Value]) -> Vec<Value> {
    let name = format!("{AGENT}-{what}");
    let (group, resource, operations) = on;
    vec![
        json!({
            "apiVersion": POLICY_API, "kind": "ValidatingAdmissionPolicy", "metadata": meta(&name, None),
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": [{
                    "apiGroups": [group], "apiVersions": ["v1"], "resources": [resource], "operations": operations,
                }]},
                "matchConditions": [{
                    "name": "is-an-agent",
                    "expression": format!("request.userInfo.username == 'system:serviceaccount:{namespace}:{AGENT}'"),
                }],
                "validations": validations,
            },
        }),
        json!({
            "apiVersion": POLICY_API, "kind": "ValidatingAdmissionPolicyBinding", "metadata": meta(&name, None),
            "spec": {"policyName": name, "validationActions": ["Deny"]},
        }),
    ]
}

fn daemon_set(config: &Config, namespace: &str, image: &str) -> Value {
    let container = json!({
        "name": "agent",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": ["agent", CONFIG_FLAG],
        "env": [
            from_field("NODE_NAME", "spec.nodeName"),
            from_field("POD_NAMESPACE", "metadata.namespace"),
            from_field("POD_NAME", "metadata.name"),
        ],
        "ports": ports(config),
        "livenessProbe": probe("/livez"),
        "readinessProbe": probe("/readyz"),
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "128Mi"}},
        "securityContext": container_security(),
        "volumeMounts": [config_mount()],
    });
    json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": meta(AGENT, Some(namespace)),
        "spec": {
            "selector": {"matchLabels": selector(COMPONENT)},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}},
            "template": {
                "metadata": {"labels": selector(COMPONENT), "annotations": sections_annotation(config, &READ)},
                "spec": {
                    "serviceAccountName": AGENT,
                    "enableServiceLinks": false,
                    "priorityClassName": "system-node-critical",
                    // A gate on a tainted node must be opened as well.
                    "tolerations": [{"operator": "Exists"}],
                    "securityContext": pod_security(),
                    "terminationGracePeriodSeconds": 20,
                    "containers": [container],
                    "volumes": [config_volume()],
                },
            },
        },
    })
}
