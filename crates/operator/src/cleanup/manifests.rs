//! The Job that cleans up from inside the cluster: its account, its rights, and nothing that stays.

use groundcrew_core::config::Config;
use k8s_openapi::api::rbac::v1::PolicyRule;
use serde_json::{Value, json};

use crate::manifests::common::{CONFIG_FLAG, config_mount, config_volume, from_field, selector};
use crate::manifests::{
    CERTIFICATE_SECRET, NAME, NODE_STARTUP_RECORD, SPREAD_MEMORY, WEBHOOK_RECORD, bound_role, container_security, meta,
    pod_security, role, rule,
};
use crate::warmup::manifests::AGENT;

/// The Job's name and account.
pub const CLEANUP: &str = "groundcrew-cleanup";
/// The role for the replicas' lease, which may be in another namespace than the rest.
const ELECTION: &str = "groundcrew-cleanup-leader-election";

/// Selects the pods of operator and agents, not those of the Job.
#[must_use]
pub fn running_parts() -> String {
    format!("app.kubernetes.io/name={NAME},app.kubernetes.io/component in (operator,agent)")
}

#[must_use]
pub fn objects(config: &Config, namespace: &str, image: &str) -> Vec<Value> {
    let mut all =
        vec![json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta(CLEANUP, Some(namespace))})];
    all.extend(role(CLEANUP, "ClusterRole", None, namespace, cluster_rules()));
    all.extend(role(CLEANUP, "Role", Some(namespace), namespace, own_namespace_rules()));
    let election = config.controller.leader_election.namespace_or(namespace);
    all.extend(bound_role(ELECTION, "Role", Some(election), (CLEANUP, namespace), election_rules()));
    all.push(job(namespace, image));
    all
}

fn cluster_rules() -> Vec<PolicyRule> {
    let admission = "admissionregistration.k8s.io";
    let webhooks = ["mutatingwebhookconfigurations", "validatingwebhookconfigurations"];
    let policies = ["mutatingadmissionpolicies", "mutatingadmissionpolicybindings"];
    vec![
        rule(admission, &webhooks, &["get", "delete"], &[NAME]),
        // Their names follow the rules' names, which nobody knows beforehand.
        rule(admission, &policies, &["list", "delete"], &[]),
        rule("", &["nodes"], &["list", "patch"], &[]),
        rule("groundcrew.io", &["nodestartuprules"], &["list", "patch"], &[]),
        rule("", &["pods"], &["list"], &[]),
        rule("", &["pods/status"], &["patch"], &[]),
    ]
}

fn election_rules() -> Vec<PolicyRule> {
    vec![rule("coordination.k8s.io", &["leases"], &["get", "delete"], &[NAME])]
}

fn own_namespace_rules() -> Vec<PolicyRule> {
    vec![
        rule("apps", &["deployments"], &["delete"], &[NAME]),
        rule("apps", &["daemonsets"], &["delete"], &[AGENT]),
        // One per node: their names are not known beforehand.
        rule("coordination.k8s.io", &["leases"], &["list", "delete"], &[]),
        rule("", &["secrets"], &["delete"], &[CERTIFICATE_SECRET]),
        rule("", &["configmaps"], &["get"], &[NODE_STARTUP_RECORD]),
        rule("", &["configmaps"], &["delete"], &[WEBHOOK_RECORD, SPREAD_MEMORY, NODE_STARTUP_RECORD]),
    ]
}

/// Reads the configuration of the installation it takes down: taints have names of their own there.
fn job(namespace: &str, image: &str) -> Value {
    let container = json!({
        "name": "cleanup",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": ["cleanup", CONFIG_FLAG],
        "env": [from_field("POD_NAMESPACE", "metadata.namespace")],
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "128Mi"}},
        "securityContext": container_security(),
        "volumeMounts": [config_mount()],
    });
    json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": meta(CLEANUP, Some(namespace)),
        "spec": {
            "backoffLimit": 3,
            "activeDeadlineSeconds": 600,
            "template": {
                "metadata": {"labels": selector("cleanup")},
                "spec": {
                    "serviceAccountName": CLEANUP,
                    "enableServiceLinks": false,
                    "restartPolicy": "Never",
                    "securityContext": pod_security(),
                    // Perhaps every node is held by a taint of ours.
                    "tolerations": [{"operator": "Exists"}],
                    "containers": [container],
                    "volumes": [config_volume()],
                },
            },
        },
    })
}
