//! Nodes, init DaemonSets and their pods, as short as a test can say them.

use std::time::Duration;

use groundcrew_testbed::{Cluster, Groundcrew};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Event, Node, Pod, Taint};
use kube::ResourceExt;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

/// Far more than anything takes on two busy cores.
pub const SOON: Duration = Duration::from_secs(60);
/// For what needs controllers of others first.
pub const LONG: Duration = Duration::from_secs(180);
pub const KEY: &str = "startup.k8s.io/initializing";
pub const COMPLETED: &str = "startup.k8s.io/completedAt";

/// A configuration with the feature on; `more` are further lines of its section.
pub fn config(more: &str) -> String {
    let more: String = more.lines().map(|line| format!("  {line}\n")).collect();
    format!("nodeStartup:\n  enabled: true\n{more}")
}

pub fn parse<K: serde::de::DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).expect("a literal of this kind")
}

pub fn taints(node: &Node) -> &[Taint] {
    node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default()
}

pub fn keys(node: &Node) -> Vec<&str> {
    taints(node).iter().map(|taint| taint.key.as_str()).collect()
}

pub fn held(node: &Node) -> bool {
    taints(node).iter().any(|t| t.key == KEY && t.value.as_deref() == Some("wait") && t.effect == "NoSchedule")
}

pub fn completed(node: &Node) -> bool {
    node.annotations().get(COMPLETED).is_some_and(|at| at.parse::<i64>().is_ok())
}

pub fn nodes(cluster: &Cluster) -> Api<Node> {
    Api::all(cluster.client())
}

/// Tried again where the webhook missed its one second, as on a stalled machine; late so often in a row is not that.
pub async fn create_node(cluster: &Cluster, name: &str, labels: Value, taints: Value) -> anyhow::Result<Node> {
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "spec": {"taints": taints}});
    let node: Node = parse(node);
    for _ in 0..4 {
        match nodes(cluster).create(&PostParams::default(), &node).await {
            Err(kube::Error::Api(status)) if status.message.contains("failed calling webhook") => {}
            made => return Ok(made?),
        }
    }
    Ok(nodes(cluster).create(&PostParams::default(), &node).await?)
}

/// A node that carries the taint from the start, whoever taints or not.
pub async fn held_node(cluster: &Cluster, name: &str) -> anyhow::Result<Node> {
    create_node(cluster, name, json!({}), json!([{"key": KEY, "value": "wait", "effect": "NoSchedule"}])).await
}

/// An init DaemonSet in `kube-system`; `spec` is merged into its pod spec.
pub async fn init_set(cluster: &Cluster, name: &str, component: &str, spec: Value) -> anyhow::Result<DaemonSet> {
    let mut pod = json!({"tolerations": [{"operator": "Exists"}], "containers": [{"name": "a", "image": "none"}, {"name": "b", "image": "none"}]});
    for (key, value) in spec.as_object().into_iter().flatten() {
        pod[key] = value.clone();
    }
    let set = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": name, "namespace": "kube-system"}, "spec": {
        "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name, "startup.k8s.io/component": component}}, "spec": pod},
    }});
    let sets: Api<DaemonSet> = Api::namespaced(cluster.client(), "kube-system");
    Ok(sets.create(&PostParams::default(), &parse(set)).await?)
}

/// The pod that the DaemonSet's controller would make on the node.
pub async fn init_pod(cluster: &Cluster, set: &DaemonSet, node: &str) -> anyhow::Result<Pod> {
    let template = set.spec.as_ref().map(|s| s.template.clone()).unwrap_or_default();
    let mut spec = serde_json::to_value(template.spec)?;
    spec["nodeName"] = json!(node);
    spec["automountServiceAccountToken"] = json!(false);
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "spec": spec, "metadata": {
        "name": format!("{}-{node}", set.name_any()), "namespace": "kube-system",
        "labels": template.metadata.and_then(|m| m.labels),
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": set.name_any(), "uid": set.uid(),
            "controller": true, "blockOwnerDeletion": true}],
    }});
    Ok(system_pods(cluster).create(&PostParams::default(), &parse(pod)).await?)
}

pub fn system_pods(cluster: &Cluster) -> Api<Pod> {
    Api::namespaced(cluster.client(), "kube-system")
}

/// What the kubelet would report: each container by itself, and the pod.
pub async fn report(cluster: &Cluster, pod: &Pod, a: bool, b: bool, ready: bool) -> anyhow::Result<()> {
    let container = |name: &str, ready: bool| json!({"name": name, "ready": ready, "image": "none", "imageID": "", "restartCount": 0});
    let status = json!({"status": {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" }}],
        "containerStatuses": [container("a", a), container("b", b)],
    }});
    let name = pod.name_any();
    system_pods(cluster).patch_status(&name, &PatchParams::default(), &Patch::Merge(status)).await?;
    Ok(())
}

pub async fn make_ready(cluster: &Cluster, pod: &Pod) -> anyhow::Result<()> {
    report(cluster, pod, true, true, true).await
}

pub async fn wait_released(cluster: &Cluster, name: &str) -> anyhow::Result<Node> {
    cluster.wait_for(&nodes(cluster), name, "released", SOON, |n| !held(n) && completed(n)).await
}

/// Shows that everything before has been looked at and left: a node made ready after it is released.
pub async fn pass_marker(cluster: &Cluster, set: &DaemonSet, name: &str) -> anyhow::Result<()> {
    held_node(cluster, name).await?;
    let pod = init_pod(cluster, set, name).await?;
    make_ready(cluster, &pod).await?;
    wait_released(cluster, name).await.map(drop)
}

pub async fn leading(groundcrew: &Groundcrew) -> anyhow::Result<()> {
    groundcrew.wait_metric("groundcrew_leader 1", SOON).await
}

pub async fn engine(groundcrew: &Groundcrew, engine: &str) -> anyhow::Result<()> {
    groundcrew.wait_metric(&format!("groundcrew_node_startup_engine{{engine=\"{engine}\"}} 1"), SOON).await
}

/// Waits until the log says this: a write is seen by others before its author has the answer.
pub async fn logged(groundcrew: &Groundcrew, text: &str) -> anyhow::Result<()> {
    let deadline = tokio::time::Instant::now() + SOON;
    while !groundcrew.log()?.contains(text) {
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "the log never says {text:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

/// Waits for an event about a node.
pub async fn event(cluster: &Cluster, node: &str, reason: &str) -> anyhow::Result<String> {
    let events: Api<Event> = Api::all(cluster.client());
    let wanted = format!("involvedObject.name={node},reason={reason}");
    let deadline = tokio::time::Instant::now() + SOON;
    loop {
        let found = events.list(&ListParams::default().fields(&wanted)).await?;
        if let Some(event) = found.items.into_iter().next() {
            return Ok(event.message.unwrap_or_default());
        }
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "no event {reason} about node {node}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
