//! What warm-up adds to an installation: the agents, and the policies that confine them.

use groundcrew_core::config::Config;
use groundcrew_core::keys;
use serde_json::{Value, json};

use crate::manifests::common::{
    CONFIG_FLAG, config_mount, config_volume, from_field, network_policy, ports, probe, sections_annotation, selector,
};
use crate::manifests::confine::{policy, same_metadata_but, same_status_but_the_gate, validation};
use crate::manifests::{NAME, container_security, meta, pod_security, role, rule};

/// The agents' account, role, DaemonSet and policies.
pub const AGENT: &str = "groundcrew-agent";
/// The component of their pods.
const COMPONENT: &str = "agent";
/// What an agent reads of the configuration: changes elsewhere do not restart the agents.
const READ: [&str; 5] = ["warmup", "logging", "metrics", "health", "tracing"];

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
        validation(&same_status_but_the_gate(), "an agent may only write its own condition"),
        validation(&same_metadata_but(&[keys::WARMUP_STATE]), "an agent may only write its own annotation"),
    ];
    let leases = vec![validation(
        &format!("{own_node} && object.metadata.name == ('{AGENT}.' + {node})"),
        "an agent may only write the lease of its own node",
    )];
    let (account, writes) = ((AGENT, namespace), ["CREATE", "UPDATE"]);
    let mut all = policy("groundcrew-agent-pods", account, ("", "pods/status", &["UPDATE"]), &pods);
    all.extend(policy("groundcrew-agent-leases", account, ("coordination.k8s.io", "leases", &writes), &leases));
    all
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
