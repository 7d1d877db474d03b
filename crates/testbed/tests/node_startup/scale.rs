//! A thousand nodes joining a cluster that waits for them, with the real scheduler and DaemonSet controller.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt, stream};
use groundcrew_testbed::{AuditEvent, Cluster, Groundcrew, KwokNode, Layer};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, ListParams, PostParams};
use serde_json::{Value, json};

use crate::support::*;

/// How many nodes join; fewer where time is short.
fn size() -> usize {
    std::env::var("GROUNDCREW_TEST_NODES").ok().and_then(|n| n.parse().ok()).unwrap_or(1000)
}

const PER_SECOND: u64 = 50;
const LONG: Duration = Duration::from_secs(300);

async fn waiting_pods(cluster: &Cluster, namespace: &str, replicas: usize) -> anyhow::Result<()> {
    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": {
        "replicas": replicas, "selector": {"matchLabels": {"app": "web"}},
        "template": {"metadata": {"labels": {"app": "web"}}, "spec": {
            "automountServiceAccountToken": false,
            "containers": [{"name": "web", "image": "none", "resources": {"requests": {"cpu": "1"}}}],
        }},
    }});
    let api: Api<Deployment> = Api::namespaced(cluster.client(), namespace);
    api.create(&PostParams::default(), &parse(deployment)).await?;
    Ok(())
}

fn name_of(event: &AuditEvent) -> Option<String> {
    event.object_key()?.rsplit('/').next().map(str::to_owned)
}

#[tokio::test(flavor = "multi_thread")]
async fn no_user_pod_is_bound_before_its_node_is_released() -> anyhow::Result<()> {
    let nodes_wanted = size();
    let cluster = Cluster::start(Layer::Controllers).await?;
    let set = init_set(&cluster, "agent", "init", json!({})).await?;
    let namespace = cluster.namespace("users").await?;
    waiting_pods(&cluster, namespace.name(), 2 * nodes_wanted).await?;
    let groundcrew = Groundcrew::builder(&cluster).config_yaml(&config("")).start().await?;
    engine(&groundcrew, "policy").await?;
    // The policy is in force once a node is born with the taint.
    for i in 0..100 {
        let probe = cluster.add_kwok_node(KwokNode::new(&format!("probe-{i}")).allocatable("pods", "0")).await?;
        if held(&probe) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }

    let mut ticks = tokio::time::interval(Duration::from_millis(1000 / PER_SECOND));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Burst);
    let started = tokio::time::Instant::now();
    let client = cluster.connect().await?;
    let api: Api<Node> = Api::all(client);
    stream::unfold((0, ticks), |(i, mut ticks)| async move {
        ticks.tick().await;
        (i < nodes_wanted).then_some((i, (i + 1, ticks)))
    })
    .map(|i| {
        let api = api.clone();
        async move {
            let node = KwokNode::new(&format!("node-{i:04}")).allocatable("cpu", "4").into_node();
            let node = api.create(&PostParams::default(), &node).await?;
            anyhow::ensure!(held(&node), "born without the taint");
            anyhow::Ok(())
        }
    })
    .buffer_unordered(32)
    .try_for_each(async |()| Ok(()))
    .await?;
    println!("{nodes_wanted} nodes joined in {:?}", started.elapsed());

    let deadline = tokio::time::Instant::now() + LONG;
    loop {
        let all = api.list(&ListParams::default()).await?;
        let waiting =
            all.iter().filter(|n| held(n) && !n.metadata.name.as_deref().unwrap_or("").starts_with("probe")).count();
        let pods: Api<Pod> = namespace.api();
        let bound = pods
            .list(&ListParams::default())
            .await?
            .iter()
            .filter(|p| p.spec.as_ref().is_some_and(|s| s.node_name.is_some()))
            .count();
        if waiting == 0 && bound == 2 * nodes_wanted {
            break;
        }
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "{waiting} nodes held, {bound} pods bound");
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    println!("all released and all pods bound after {:?}", started.elapsed());
    drop(set);
    judge(&cluster, nodes_wanted).await
}

/// Reads the audit log: releases after readiness, bindings after releases.
async fn judge(cluster: &Cluster, nodes_wanted: usize) -> anyhow::Result<()> {
    let events = cluster.audit_events().await?;
    let mut ready: BTreeMap<String, Timestamp> = BTreeMap::new();
    let mut released: BTreeMap<String, (Timestamp, Timestamp)> = BTreeMap::new();
    let mut bound: Vec<(String, Timestamp)> = Vec::new();
    for event in events.iter().filter(|e| e.is_committed_write()) {
        if event.is_about("pods", "status") {
            let is_ready = |c: &Value| c["type"] == "Ready" && c["status"] == "True";
            let init = event.response_at("/metadata/labels/startup.k8s.io~1component").is_some();
            let conditions = event.response_at("/status/conditions").and_then(Value::as_array);
            let node = event.response_at("/spec/nodeName").and_then(Value::as_str);
            if let (true, Some(node), true) = (init, node, conditions.into_iter().flatten().any(is_ready)) {
                ready.entry(node.to_owned()).or_insert(event.stage_timestamp);
            }
        } else if event.is_about("nodes", "") && event.user_agent.starts_with("groundcrew/") {
            if let Some(node) = name_of(event) {
                let before = released.insert(node.clone(), (event.request_received_timestamp, event.stage_timestamp));
                anyhow::ensure!(before.is_none(), "{node} was written twice");
            }
        } else if event.is_about("pods", "binding") {
            let node = event.request_object.as_ref().and_then(|b| b.pointer("/target/name")).and_then(Value::as_str);
            let user = event.object_ref.as_ref().is_some_and(|o| o.namespace.starts_with("users"));
            if let (Some(node), true) = (node, user) {
                bound.push((node.to_owned(), event.request_received_timestamp));
            }
        }
    }
    assert!(released.len() >= nodes_wanted, "{} released", released.len());
    let early: Vec<&String> = bound
        .iter()
        .filter(|(node, at)| released.get(node).is_none_or(|(from, _)| at < from))
        .map(|(node, _)| node)
        .collect();
    assert!(early.is_empty(), "bound before the release: {early:?}");
    assert_eq!(bound.len(), 2 * nodes_wanted);
    let mut delays: Vec<f64> = Vec::new();
    for (node, (_, done)) in &released {
        let at = ready.get(node).ok_or_else(|| anyhow::anyhow!("{node} was released without a ready init pod"))?;
        delays.push(done.duration_since(*at).as_secs_f64() * 1000.0);
    }
    delays.sort_by(f64::total_cmp);
    let percentile = |p: usize| delays[(delays.len() * p / 100).min(delays.len() - 1)];
    println!(
        "release after readiness over {} nodes: p50 {:.1} ms, p99 {:.1} ms, max {:.1} ms",
        delays.len(),
        percentile(50),
        percentile(99),
        percentile(100)
    );
    Ok(())
}
