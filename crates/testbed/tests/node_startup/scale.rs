//! A thousand nodes joining a cluster that waits for them, with the real scheduler and DaemonSet controller.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::{StreamExt, TryStreamExt, stream};
use groundcrew_testbed::{Cluster, Groundcrew, KwokNode, Layer};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use kube::api::{Api, ListParams, PostParams};
use serde_json::{Value, json};

use crate::births::births_carry;
use crate::judge;
use crate::support::*;

/// How many nodes join; fewer where time is short.
fn size() -> usize {
    std::env::var("GROUNDCREW_TEST_NODES").ok().and_then(|n| n.parse().ok()).unwrap_or(1000)
}

const PER_SECOND: u64 = 50;

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
    // Else the last of them might come when all others are bound and all nodes are free.
    let all = |d: &Deployment| d.status.as_ref().and_then(|s| s.replicas) == i32::try_from(replicas).ok();
    cluster.wait_for(&api, "web", "all pods are made", LONG, all).await?;
    Ok(())
}

/// How many nodes are held although their init pod is ready, and how many at all.
async fn ready_and_held(cluster: &Cluster) -> anyhow::Result<(usize, usize)> {
    let is_ready = |pod: &&Pod| {
        let mut conditions = pod.status.iter().flat_map(|s| s.conditions.iter().flatten());
        conditions.any(|c| c.type_ == "Ready" && c.status == "True")
    };
    let pods = system_pods(cluster).list(&ListParams::default()).await?;
    let ready: BTreeSet<&str> =
        pods.iter().filter(is_ready).filter_map(|p| p.spec.as_ref()?.node_name.as_deref()).collect();
    let held: Vec<String> =
        nodes(cluster).list(&ListParams::default()).await?.iter().filter(|n| held(n)).map(Node::name_any).collect();
    Ok((held.iter().filter(|name| ready.contains(name.as_str())).count(), held.len()))
}

#[tokio::test(flavor = "multi_thread")]
async fn no_user_pod_is_bound_before_its_node_is_released() -> anyhow::Result<()> {
    let nodes_wanted = size();
    let cluster = Cluster::start(Layer::Controllers).await?;
    init_set(&cluster, "agent", "init", json!({})).await?;
    let namespace = cluster.namespace("users").await?;
    waiting_pods(&cluster, namespace.name(), 2 * nodes_wanted).await?;
    let groundcrew = Groundcrew::builder(&cluster).config_yaml(&config("")).start().await?;
    engine(&groundcrew, "policy").await?;
    births_carry(&cluster, KEY).await?;

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

    let pods: Api<Pod> = namespace.api();
    let deadline = tokio::time::Instant::now() + 2 * LONG;
    loop {
        let unbound = pods.list(&ListParams::default().fields("spec.nodeName=").limit(1)).await?;
        // Whole lists are a burden, so they wait for the end.
        if unbound.items.is_empty() && ready_and_held(&cluster).await? == (0, 0) {
            break;
        }
        if tokio::time::Instant::now() > deadline {
            let (ready, held) = ready_and_held(&cluster).await?;
            anyhow::bail!(
                "{held} nodes are held, {ready} of them with a ready init pod; unbound: {:?}",
                unbound.metadata
            );
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    println!("all released and all pods bound after {:?}", started.elapsed());
    judge(&cluster, nodes_wanted).await?;
    say("release after the watch event, in groundcrew", release_times(&groundcrew.log()?));
    Ok(())
}

/// Milliseconds from the event that showed a node ready to the answer of the write, as groundcrew logged them.
fn release_times(log: &str) -> Vec<f64> {
    let lines = log.lines().filter(|line| line.contains("Removed startup taint"));
    // It may be in the midst of the last line.
    let parsed = lines.filter_map(|line| serde_json::from_str::<Value>(line).ok());
    parsed.filter_map(|line| line["release_ms"].as_f64()).collect()
}

fn say(what: &str, mut delays: Vec<f64>) {
    delays.sort_by(f64::total_cmp);
    let last = delays.len().saturating_sub(1);
    let percentile = |p: usize| delays.get((delays.len() * p / 100).min(last)).copied().unwrap_or_default();
    let (p50, p99, max) = (percentile(50), percentile(99), percentile(100));
    println!("{what}, over {} nodes: p50 {p50:.1} ms, p99 {p99:.1} ms, max {max:.1} ms", delays.len());
}

/// Reads the audit log: releases after readiness, bindings after releases.
async fn judge(cluster: &Cluster, nodes_wanted: usize) -> anyhow::Result<()> {
    let events = cluster.audit_events().await?;
    let releases = judge::releases(&events)?;
    judge::released_only_when_ready(&events, &releases)?;
    let from: BTreeMap<String, Timestamp> = judge::let_go(&events, &releases);
    assert!(from.len() >= nodes_wanted, "{} released", from.len());
    let mut bound = 0;
    for event in events.iter().filter(|e| e.is_committed_write() && e.is_about("pods", "binding")) {
        let node = event.request_object.as_ref().and_then(|b| b.pointer("/target/name")).and_then(Value::as_str);
        let user = event.object_ref.as_ref().is_some_and(|o| o.namespace.starts_with("users"));
        if let (Some(node), true) = (node, user) {
            bound += 1;
            let free = from.get(node).is_some_and(|from| event.request_received_timestamp >= *from);
            anyhow::ensure!(free, "a user pod was bound to {node} before its release");
        }
    }
    assert_eq!(bound, 2 * nodes_wanted);
    let ready = judge::first_ready(&events);
    let since = |r: &judge::Release, ready: &judge::Ready| r.done.duration_since(ready.at).as_secs_f64() * 1000.0;
    let after = |r: &judge::Release| ready.get(&r.node).map(|ready| since(r, ready));
    say("release after readiness, in the audit log", releases.iter().filter_map(after).collect());
    Ok(())
}
