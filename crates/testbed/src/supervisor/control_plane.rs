//! Command lines of etcd, API server, controller-manager, scheduler and kwok.

use std::fs;

use serde_json::json;

use super::plan::{Plan, SERVICE_RANGE};
use super::process::Launch;
use crate::Layer;
use crate::assets::Program;

pub(crate) fn etcd(plan: &Plan) -> anyhow::Result<Launch> {
    let client = format!("http://127.0.0.1:{}", plan.ports.etcd);
    let peer = format!("http://127.0.0.1:{}", plan.ports.etcd_peer);
    Ok(Launch::new(plan.assets.path(Program::Etcd)?)
        .flag("data-dir", plan.dir.join("etcd"))
        .flag("listen-client-urls", &client)
        .flag("advertise-client-urls", &client)
        .flag("listen-peer-urls", &peer)
        .flag("initial-advertise-peer-urls", &peer)
        .flag("initial-cluster", format!("default={peer}"))
        // The data does not outlive the process; syncing would only wear the disk and slow every write.
        .flag("unsafe-no-fsync", "true")
        .flag("log-level", "warn"))
}

pub(crate) fn apiserver(plan: &Plan) -> anyhow::Result<Launch> {
    let policy = plan.etc("audit-policy.json");
    fs::write(&policy, serde_json::to_vec_pretty(&audit_policy())?)?;
    let launch = Launch::new(plan.assets.path(Program::Apiserver)?)
        .flag("etcd-servers", format!("http://127.0.0.1:{}", plan.ports.etcd))
        .flag("secure-port", plan.ports.api.to_string())
        .flag("tls-cert-file", &plan.api_pair.certificate)
        .flag("tls-private-key-file", &plan.api_pair.key)
        .flag("client-ca-file", plan.authority.certificate())
        // No aggregated API servers here, but controller-manager and scheduler keep asking for these settings.
        .flag("requestheader-client-ca-file", plan.authority.certificate())
        .flag("requestheader-allowed-names", "front-proxy")
        .flag("requestheader-username-headers", "X-Remote-User")
        .flag("authorization-mode", "Node,RBAC")
        .flag("enable-admission-plugins", "NodeRestriction")
        .flag("allow-privileged", "true")
        // Webhooks behind a Service are called at their endpoints' addresses, so they work without kube-proxy too.
        .flag("enable-aggregator-routing", "true")
        .flag("kubelet-preferred-address-types", "InternalIP")
        .flag("kubelet-client-certificate", &plan.api_client_pair.certificate)
        .flag("kubelet-client-key", &plan.api_client_pair.key)
        .flag("service-cluster-ip-range", SERVICE_RANGE)
        .flag("service-account-issuer", "https://kubernetes.default.svc")
        .flag("service-account-key-file", &plan.token_keys.public)
        .flag("service-account-signing-key-file", &plan.token_keys.private)
        .flag("audit-policy-file", policy)
        .flag("audit-log-path", plan.audit_log())
        // In megabytes: a rotated log would hide part of the history that tests judge by.
        .flag("audit-log-maxsize", "100000")
        .flag("profiling", "false");
    let launch = match plan.layer {
        // No controller-manager, so no service account named default, without which this plugin refuses every pod.
        Layer::Api => launch.flag("disable-admission-plugins", "ServiceAccount"),
        Layer::Controllers | Layer::Nodes => launch,
    };
    let launch = plan.apiserver_flags()?.into_iter().fold(launch, |launch, (name, value)| launch.flag(&name, value));
    Ok(match plan.layer {
        // Pods reach the API server through the kubernetes Service, which must not point at a loopback address.
        Layer::Nodes => launch.flag("bind-address", "0.0.0.0").flag("advertise-address", plan.address.to_string()),
        Layer::Api | Layer::Controllers => launch
            .flag("bind-address", "127.0.0.1")
            .flag("advertise-address", "127.0.0.1")
            .flag("endpoint-reconciler-type", "none"),
    })
}

/// Tests judge by what the server committed, so changes of pods and nodes are recorded whole.
fn audit_policy() -> serde_json::Value {
    json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived", "ResponseStarted"],
        "omitManagedFields": true,
        "rules": [
            {
                "level": "RequestResponse",
                "verbs": ["create", "update", "patch", "delete", "deletecollection"],
                "resources": [{
                    "group": "",
                    "resources": ["pods", "pods/status", "pods/eviction", "pods/binding", "pods/resize", "nodes"],
                }],
            },
            {"level": "Metadata"},
        ],
    })
}

pub(crate) fn controller_manager(plan: &Plan) -> anyhow::Result<Launch> {
    let kubeconfig = plan.kubeconfig("controller-manager");
    Ok(Launch::new(plan.assets.path(Program::ControllerManager)?)
        .flag("kubeconfig", &kubeconfig)
        .flag("authentication-kubeconfig", &kubeconfig)
        .flag("authorization-kubeconfig", &kubeconfig)
        .flag("bind-address", "127.0.0.1")
        .flag("secure-port", plan.ports.controller_manager.to_string())
        .flag("leader-elect", "false")
        .flag("use-service-account-credentials", "true")
        .flag("service-account-private-key-file", &plan.token_keys.private)
        .flag("root-ca-file", plan.authority.certificate())
        .flag("cluster-signing-cert-file", plan.authority.certificate())
        .flag("cluster-signing-key-file", plan.authority.key())
        // The defaults (20 and 30) take minutes for a thousand pods.
        .flag("kube-api-qps", "500")
        .flag("kube-api-burst", "1000"))
}

pub(crate) fn scheduler(plan: &Plan) -> anyhow::Result<Launch> {
    let kubeconfig = plan.kubeconfig("scheduler");
    Ok(Launch::new(plan.assets.path(Program::Scheduler)?)
        .flag("kubeconfig", &kubeconfig)
        .flag("authentication-kubeconfig", &kubeconfig)
        .flag("authorization-kubeconfig", &kubeconfig)
        .flag("bind-address", "127.0.0.1")
        .flag("secure-port", plan.ports.scheduler.to_string())
        .flag("leader-elect", "false")
        .flag("kube-api-qps", "500")
        .flag("kube-api-burst", "1000"))
}

pub(crate) fn kwok(plan: &Plan) -> anyhow::Result<Launch> {
    Ok(Launch::new(plan.assets.path(Program::Kwok)?)
        .flag("kubeconfig", plan.kubeconfig("kwok"))
        .flag("config", plan.assets.kwok_stages())
        .flag("manage-all-nodes", "false")
        .flag("manage-nodes-with-annotation-selector", crate::kwok::MANAGED.join("="))
        .flag("node-lease-duration-seconds", "40")
        // Away from the real node's pods, so that no fake pod seems to have a real one's address.
        .flag("cidr", "10.245.0.1/16")
        .flag("node-ip", "10.245.0.1")
        .flag("server-address", format!("127.0.0.1:{}", plan.ports.kwok)))
}
