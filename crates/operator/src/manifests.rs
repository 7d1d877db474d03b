//! Everything an installation consists of, as data; `groundcrew manifests` prints it.

use groundcrew_core::config::{CertificateSource, Config};
use k8s_openapi::api::rbac::v1::PolicyRule;
use serde::Serialize;
use serde_json::{Value, json};

use crate::features;

pub(crate) mod common;
pub(crate) mod confine;

use common::{config_annotation, config_mount, config_volume, from_field, ports, probe, selector};

/// The name of every object that is ours alone.
pub const NAME: &str = "groundcrew";
pub const DEFAULT_NAMESPACE: &str = "groundcrew-system";
/// The component of the pods that `groundcrew run` runs in.
const OPERATOR: &str = "operator";
pub const CERTIFICATE_SECRET: &str = "groundcrew-webhook-tls";
/// Remembers a webhook configuration that somebody deleted.
pub const WEBHOOK_RECORD: &str = "groundcrew-webhooks";
/// Remembers moves and droughts of `spread`.
pub const SPREAD_MEMORY: &str = "groundcrew-spread";
/// A pair of somebody else, for `webhook.certDir`; the chart has cert-manager write it.
const GIVEN_CERTIFICATE_SECRET: &str = "groundcrew-webhook-cert";
/// The role for the lease, which may be in another namespace than the rest.
const ELECTION: &str = "groundcrew-leader-election";
/// Remembers which startup taints are ours to remove.
pub const NODE_STARTUP_RECORD: &str = "groundcrew-node-startup";

/// The documents as one file.
#[must_use]
pub fn yaml(documents: &[Value]) -> String {
    let mut text = String::new();
    for document in documents {
        text.push_str("---\n");
        // Maps with string keys always print.
        text.push_str(&serde_saphyr::to_string(document).unwrap_or_default());
    }
    text
}

/// An installation, in the order in which it must be applied.
#[must_use]
pub fn objects(config: &Config, namespace: &str, image: &str) -> Vec<Value> {
    let mut all = vec![
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels()}}),
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta(NAME, Some(namespace))}),
    ];
    all.extend(features::definitions(config).iter().map(value));
    all.extend(role(NAME, "ClusterRole", None, namespace, cluster_rules(config)));
    all.extend(role(NAME, "Role", Some(namespace), namespace, own_namespace_rules(config)));
    let election = config.controller.leader_election.namespace_or(namespace);
    all.extend(bound_role(ELECTION, "Role", Some(election), (NAME, namespace), election_rules()));
    all.extend(confine::operator(namespace));
    // Never held: the first leader of a new installation need not wait.
    all.push(value(&crate::runtime::lease::vacant(election, NAME)));
    all.push(common::config_map(config, namespace));
    all.push(service(config, namespace));
    all.push(deployment(config, namespace, image));
    all.push(disruption_budget(namespace));
    all.push(common::network_policy(config, namespace, NAME, OPERATOR, &["webhook", "health"]));
    all.extend(features::enabled(config).flat_map(|feature| (feature.objects)(config, namespace, image)));
    let webhooks = features::webhook_configurations(config, namespace);
    all.extend(webhooks.mutating.iter().map(value));
    all.extend(webhooks.validating.iter().map(value));
    all
}

fn value(object: &impl Serialize) -> Value {
    serde_json::to_value(object).unwrap_or_default()
}

pub(crate) fn labels() -> Value {
    json!({"app.kubernetes.io/name": NAME, "app.kubernetes.io/managed-by": NAME})
}

pub(crate) fn meta(name: &str, namespace: Option<&str>) -> Value {
    let mut meta = json!({"name": name, "labels": labels()});
    if let (Some(namespace), Some(map)) = (namespace, meta.as_object_mut()) {
        map.insert("namespace".to_owned(), json!(namespace));
    }
    meta
}

/// A role and its binding to the account of the same name.
pub(crate) fn role(
    name: &str,
    kind: &str,
    namespace: Option<&str>,
    account_namespace: &str,
    rules: Vec<PolicyRule>,
) -> [Value; 2] {
    bound_role(name, kind, namespace, (name, account_namespace), rules)
}

/// A role and its binding to an account: its name and namespace.
pub(crate) fn bound_role(
    name: &str,
    kind: &str,
    namespace: Option<&str>,
    account: (&str, &str),
    rules: Vec<PolicyRule>,
) -> [Value; 2] {
    let (account, account_namespace) = account;
    let api_version = "rbac.authorization.k8s.io/v1";
    [
        json!({"apiVersion": api_version, "kind": kind, "metadata": meta(name, namespace), "rules": rules}),
        json!({
            "apiVersion": api_version, "kind": format!("{kind}Binding"), "metadata": meta(name, namespace),
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": account_namespace}],
        }),
    ]
}

/// One permission: a group's resources, the verbs, and the only names they are for.
#[must_use]
pub fn rule(group: &str, resources: &[&str], verbs: &[&str], names: &[&str]) -> PolicyRule {
    let owned = |texts: &[&str]| texts.iter().map(|t| (*t).to_owned()).collect::<Vec<_>>();
    PolicyRule {
        api_groups: Some(vec![group.to_owned()]),
        resources: Some(owned(resources)),
        verbs: owned(verbs),
        resource_names: (!names.is_empty()).then(|| owned(names)),
        non_resource_urls: None,
    }
}

fn cluster_rules(config: &Config) -> Vec<PolicyRule> {
    let configurations = ["mutatingwebhookconfigurations", "validatingwebhookconfigurations"];
    let group = "admissionregistration.k8s.io";
    let mut rules = vec![
        // A create cannot be narrowed to a name.
        rule(group, &configurations, &["create"], &[]),
        rule(group, &configurations, &["get", "list", "watch", "patch", "delete"], &[NAME]),
        rule("events.k8s.io", &["events"], &["create", "patch"], &[]),
    ];
    if config.crds.manage {
        rules.extend(definition_rules(config));
    }
    rules.extend(features::permissions(config));
    rules
}

/// For the definitions of the enabled features and no others.
fn definition_rules(config: &Config) -> Vec<PolicyRule> {
    let names: Vec<String> = features::definitions(config).into_iter().filter_map(|d| d.metadata.name).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (group, resources) = ("apiextensions.k8s.io", ["customresourcedefinitions"]);
    // Without a name a rule would be about all of them.
    if names.is_empty() {
        return Vec::new();
    }
    vec![rule(group, &resources, &["create"], &[]), rule(group, &resources, &["get", "patch"], &names)]
}

fn election_rules() -> Vec<PolicyRule> {
    vec![
        rule("coordination.k8s.io", &["leases"], &["create"], &[]),
        rule("coordination.k8s.io", &["leases"], &["get", "patch"], &[NAME]),
    ]
}

fn own_namespace_rules(config: &Config) -> Vec<PolicyRule> {
    let mut rules = vec![
        // Of warm-up agents that are gone, even after their feature was turned off.
        rule("coordination.k8s.io", &["leases"], &["list", "delete"], &[]),
        rule("", &["secrets", "configmaps"], &["create"], &[]),
        rule("", &["configmaps"], &["get", "patch"], &[WEBHOOK_RECORD, NODE_STARTUP_RECORD]),
        rule("", &["secrets"], &["get", "list", "watch", "patch"], &[CERTIFICATE_SECRET]),
    ];
    rules.extend(features::own_permissions(config));
    rules
}

fn service(config: &Config, namespace: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": meta(&config.webhook.service, Some(namespace)),
        "spec": {
            "selector": selector(OPERATOR),
            "ports": [{"name": "webhook", "port": 443, "targetPort": "webhook", "protocol": "TCP"}],
        },
    })
}

/// What the restricted pod security standard asks of a pod.
pub(crate) fn pod_security() -> Value {
    json!({
        "runAsNonRoot": true, "runAsUser": 65532, "runAsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    })
}

/// And of its containers.
pub(crate) fn container_security() -> Value {
    json!({"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]}})
}

/// Drains take one replica at a time.
fn disruption_budget(namespace: &str) -> Value {
    json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": meta(NAME, Some(namespace)),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector(OPERATOR)}},
    })
}

fn deployment(config: &Config, namespace: &str, image: &str) -> Value {
    let mut open = vec![json!({"name": "webhook", "containerPort": config.webhook.port})];
    open.extend(ports(config));
    let (mut mounts, mut volumes) = (vec![config_mount()], vec![config_volume()]);
    if config.webhook.certificates.source == CertificateSource::Files {
        mounts.push(json!({"name": "tls", "mountPath": config.webhook.cert_dir, "readOnly": true}));
        volumes.push(json!({"name": "tls", "secret": {"secretName": GIVEN_CERTIFICATE_SECRET}}));
    }
    let container = json!({
        "name": "groundcrew",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": ["run", common::CONFIG_FLAG],
        "env": [from_field("POD_NAMESPACE", "metadata.namespace"), from_field("POD_NAME", "metadata.name")],
        "ports": open,
        "livenessProbe": probe("/livez"),
        "readinessProbe": probe("/readyz"),
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": container_security(),
        "volumeMounts": mounts,
    });
    let apart = json!({
        "weight": 100,
        "podAffinityTerm": {
            "topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": selector(OPERATOR)},
        },
    });
    let zones = json!({
        "maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(OPERATOR)},
    });
    let mut pod = json!({
        "serviceAccountName": NAME,
        "enableServiceLinks": false,
        "securityContext": pod_security(),
        "priorityClassName": "system-cluster-critical",
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [apart]}},
        "topologySpreadConstraints": [zones],
        "terminationGracePeriodSeconds": 20,
        "containers": [container],
        "volumes": volumes,
    });
    let tolerations = features::tolerations(config);
    if let (false, Some(pod)) = (tolerations.is_empty(), pod.as_object_mut()) {
        // A cluster of fresh nodes only must be able to start what releases them.
        pod.insert("tolerations".to_owned(), json!(tolerations));
    }
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta(NAME, Some(namespace)),
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": selector(OPERATOR)},
            "template": {
                "metadata": {"labels": selector(OPERATOR), "annotations": config_annotation(config)},
                "spec": pod,
            },
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn default_config() -> Config {
        groundcrew_core::config::load(Value::Null, vec![]).unwrap()
    }

    #[test]
    fn no_rule_has_a_wildcard_or_reads_secrets_elsewhere() {
        let config = default_config();
        for rule in cluster_rules(&config).iter().chain(&own_namespace_rules(&config)) {
            let texts = [&rule.api_groups, &rule.resources, &Some(rule.verbs.clone())];
            assert!(texts.iter().all(|t| !t.iter().flatten().any(|s| s == "*")), "{rule:?}");
        }
        for rule in cluster_rules(&config) {
            assert!(!rule.resources.iter().flatten().any(|r| r == "secrets"), "{rule:?}");
        }
    }

    #[test]
    fn without_features_these_rights_are_left() {
        let off = serde_json::json!({
            "nodeStartup": {"enabled": false}, "sizing": {"enabled": false}, "spread": {"enabled": false},
            "timestamp": {"enabled": false}, "warmup": {"enabled": false},
        });
        let off = groundcrew_core::config::load(off, vec![]).unwrap();
        let spelled = |rules: Vec<PolicyRule>| -> Vec<String> {
            let all = rules.into_iter().map(|rule| {
                let list = |texts: Option<Vec<String>>| texts.unwrap_or_default().join(",");
                format!("{} {} {}", rule.verbs.join(","), list(rule.resources), list(rule.resource_names))
            });
            all.map(|line| line.trim_end().to_owned()).collect()
        };
        assert_eq!(
            spelled(cluster_rules(&off)),
            [
                "create mutatingwebhookconfigurations,validatingwebhookconfigurations",
                "get,list,watch,patch,delete mutatingwebhookconfigurations,validatingwebhookconfigurations groundcrew",
                "create,patch events",
                // For taking back what node_startup did while it was on.
                "list,patch nodes",
                "list,patch nodestartuprules",
                "list,delete mutatingadmissionpolicies,mutatingadmissionpolicybindings",
                // For opening the gates that warmup shut.
                "list pods",
                "patch pods/status",
            ]
        );
        assert_eq!(
            spelled(own_namespace_rules(&off)),
            [
                "list,delete leases",
                "create secrets,configmaps",
                "get,patch configmaps groundcrew-webhooks,groundcrew-node-startup",
                "get,list,watch,patch secrets groundcrew-webhook-tls",
            ]
        );
        assert!(cluster_rules(&default_config()).len() > 8 && own_namespace_rules(&default_config()).len() > 4);
    }

    #[test]
    fn only_what_an_agent_reads_restarts_the_agents() {
        let template = |file: Value, kind: &str| {
            let config = groundcrew_core::config::load(file, vec![]).unwrap();
            let all = objects(&config, "here", "groundcrew:test");
            let found = all.into_iter().find(|object| object["kind"] == kind).unwrap();
            found["spec"]["template"].clone()
        };
        let (usual, other) = (json!({}), json!({"spread": {"maxMoves": 3}}));
        assert_eq!(template(usual.clone(), "DaemonSet"), template(other.clone(), "DaemonSet"));
        assert_ne!(template(usual.clone(), "Deployment"), template(other, "Deployment"));
        assert_ne!(template(usual, "DaemonSet"), template(json!({"warmup": {"maxRps": 3}}), "DaemonSet"));
    }

    #[test]
    fn the_printed_documents_read_back_as_the_same_objects() {
        let config = default_config();
        let printed = objects(&config, "here", "groundcrew:test");
        let documents: Vec<Value> = serde_saphyr::from_multiple(&yaml(&printed)).unwrap();
        assert_eq!(documents, printed);
    }
}
