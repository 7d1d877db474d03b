//! What the pods of every part have in common, and what stands around them.

use std::hash::{DefaultHasher, Hash, Hasher};

use groundcrew_core::config::Config;
use serde_json::{Value, json};

use super::{NAME, meta};

/// Where every part reads its configuration.
pub(crate) const CONFIG_FLAG: &str = "--config=/etc/groundcrew/config.yaml";

/// The labels by which a part's pods are known.
pub(crate) fn selector(component: &str) -> Value {
    json!({"app.kubernetes.io/name": NAME, "app.kubernetes.io/component": component})
}

/// The configuration as it was given, flags and environment included.
pub(crate) fn config_map(config: &Config, namespace: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": meta(NAME, Some(namespace)),
        "data": {"config.yaml": config_text(config)},
    })
}

fn config_text(config: &Config) -> String {
    if config.given.is_null() {
        return "{}\n".to_owned();
    }
    // Maps with string keys always print.
    serde_saphyr::to_string(&config.given).unwrap_or_default()
}

/// On a pod template: a changed configuration restarts the pods.
pub(crate) fn config_annotation(config: &Config) -> Value {
    checksum(&config_text(config))
}

/// The same for a part that reads only these sections.
pub(crate) fn sections_annotation(config: &Config, sections: &[&str]) -> Value {
    let read: Vec<Option<&Value>> = sections.iter().map(|section| config.given.get(section)).collect();
    checksum(&json!(read).to_string())
}

fn checksum(text: &str) -> Value {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    json!({"checksum/config": format!("{:016x}", hasher.finish())})
}

pub(crate) fn config_volume() -> Value {
    json!({"name": "config", "configMap": {"name": NAME}})
}

pub(crate) fn config_mount() -> Value {
    json!({"name": "config", "mountPath": "/etc/groundcrew", "readOnly": true})
}

/// A variable with a field of the pod.
pub(crate) fn from_field(name: &str, path: &str) -> Value {
    json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
}

pub(crate) fn probe(path: &str) -> Value {
    json!({"httpGet": {"path": path, "port": "health"}, "periodSeconds": 5})
}

/// The ports that operator and agents share.
pub(crate) fn ports(config: &Config) -> Vec<Value> {
    let metrics = config.metrics.map(|address| json!({"name": "metrics", "containerPort": address.port()}));
    let health = json!({"name": "health", "containerPort": config.health.port()});
    metrics.into_iter().chain([health]).collect()
}

/// Lets nobody in but by the ports that are meant for others. The API server and kubelets have no labels to be known by.
pub(crate) fn network_policy(config: &Config, namespace: &str, name: &str, component: &str, open: &[&str]) -> Value {
    let port = |name: &&str| json!({"port": name, "protocol": "TCP"});
    let mut ingress = vec![json!({"ports": open.iter().map(port).collect::<Vec<_>>()})];
    if config.metrics.is_some() {
        ingress.push(json!({"ports": [port(&"metrics")], "from": [{"namespaceSelector": {}}]}));
    }
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": meta(name, Some(namespace)),
        "spec": {
            "podSelector": {"matchLabels": selector(component)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    })
}
