//! How many evictions a split costs, how long a hundred workloads take to reach theirs, and what a large cluster costs.
//!
//! ```console
//! $ cargo build --release --workspace
//! $ cargo run --release -p groundcrew-testbed --example spread_bench            # both parts
//! $ cargo run --release -p groundcrew-testbed --example spread_bench converge   # or: scale
//! ```

#![allow(clippy::print_stdout, clippy::expect_used, reason = "a program to read numbers from")]

use std::time::{Duration, Instant};

use anyhow::Context;
use futures::{StreamExt, TryStreamExt, stream};
use groundcrew_testbed::{Cluster, Groundcrew, KwokNode, Layer, TestNamespace};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;

const REPLICAS: usize = 10;
/// Requests of ours at once.
const HANDS: usize = 16;
/// Processor time is counted in hundredths of a second.
const TICKS: f64 = 100.0;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let part = std::env::args().nth(1);
    let wants = |name: &str| part.as_deref().is_none_or(|part| part == name);
    if wants("converge") {
        converge(100).await?;
    }
    if wants("scale") {
        scale(1000, 1000).await?;
    }
    Ok(())
}

/// With the defaults: every workload goes from no spot to 60 %, six moves each.
async fn converge(workloads: usize) -> anyhow::Result<()> {
    let cluster = nodes(8, "1000").await?;
    let groundcrew = started(&cluster).await?;
    let namespace = cluster.namespace("bench").await?;
    create(&namespace, workloads, "0").await?;
    wait_split(&namespace, workloads, 0, Duration::from_secs(180)).await?;
    let (began, used) = (Instant::now(), processor(&groundcrew)?);
    let deployments: Api<Deployment> = namespace.api();
    let change = json!({"metadata": {"annotations": {"spotalis.io/spot-percentage": "60"}}});
    stream::iter(0..workloads)
        .map(|i| {
            let (deployments, change) = (deployments.clone(), Patch::Merge(change.clone()));
            async move { deployments.patch(&format!("w{i}"), &PatchParams::default(), &change).await }
        })
        .buffer_unordered(HANDS)
        .try_collect::<Vec<_>>()
        .await?;
    wait_split(&namespace, workloads, 6, Duration::from_secs(900)).await?;
    let took = began.elapsed();
    let used = processor(&groundcrew)? - used;
    let events = cluster.audit_events().await?;
    let evictions = events.iter().filter(|e| e.is_about("pods", "eviction") && e.is_committed_write()).count();
    let useful = workloads * 6;
    println!("{workloads} workloads of {REPLICAS}, 0 % to 60 %: {took:.0?}");
    println!("{evictions} evictions for {useful} useful moves: {:.3} each", evictions as f64 / useful as f64);
    println!("{used:.1} s of processor time for it, {} KiB resident", resident_kib(&groundcrew)?);
    Ok(())
}

/// A large cluster at rest, and its pods being created.
async fn scale(nodes_wanted: usize, workloads: usize) -> anyhow::Result<()> {
    let cluster = nodes(nodes_wanted, "110").await?;
    let groundcrew = started(&cluster).await?;
    println!("{nodes_wanted} nodes, no pods: {} KiB resident", resident_kib(&groundcrew)?);
    let namespace = cluster.namespace("bench").await?;
    let (began, used) = (Instant::now(), processor(&groundcrew)?);
    create(&namespace, workloads, "60").await?;
    wait_split(&namespace, workloads, 6, Duration::from_secs(1500)).await?;
    println!(
        "{} pods created and placed in {:.0?}, {:.1} s of processor time for it",
        workloads * REPLICAS,
        began.elapsed(),
        processor(&groundcrew)? - used
    );
    tokio::time::sleep(Duration::from_secs(5)).await;
    let (began, used) = (Instant::now(), processor(&groundcrew)?);
    tokio::time::sleep(Duration::from_secs(30)).await;
    let load = (processor(&groundcrew)? - used) / began.elapsed().as_secs_f64();
    println!("at rest: {} KiB resident, {:.2} % of one core", resident_kib(&groundcrew)?, load * 100.0);
    let events = cluster.audit_events().await?;
    let evictions = events.iter().filter(|e| e.is_about("pods", "eviction") && e.is_committed_write()).count();
    println!("{evictions} evictions");
    Ok(())
}

/// Half of them spot.
async fn nodes(count: usize, pods: &str) -> anyhow::Result<Cluster> {
    let cluster = Cluster::start(Layer::Controllers).await?;
    let all = (0..count).map(|i| {
        let (prefix, class) = if i % 2 == 0 { ("spot", "spot") } else { ("od", "on-demand") };
        let node = KwokNode::new(&format!("{prefix}-{i}")).label("karpenter.sh/capacity-type", class);
        cluster.add_kwok_node(node.allocatable("pods", pods))
    });
    stream::iter(all).buffer_unordered(HANDS).try_collect::<Vec<_>>().await?;
    Ok(cluster)
}

async fn started(cluster: &Cluster) -> anyhow::Result<Groundcrew> {
    let groundcrew = Groundcrew::builder(cluster).start().await?;
    groundcrew.wait_metric("groundcrew_leader 1", Duration::from_secs(60)).await?;
    cluster.webhook_answers().await?;
    Ok(groundcrew)
}

async fn create(namespace: &TestNamespace, workloads: usize, percentage: &str) -> anyhow::Result<()> {
    let deployments: Api<Deployment> = namespace.api();
    let object = |i: usize| -> Deployment {
        let (name, labels) = (format!("w{i}"), json!({"app": format!("w{i}")}));
        let rule = json!({"spotalis.io/enabled": "true", "spotalis.io/spot-percentage": percentage});
        serde_json::from_value(json!({
            "metadata": {"name": name, "annotations": rule},
            "spec": {
                "replicas": REPLICAS, "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {"terminationGracePeriodSeconds": 1, "containers": [{"name": "main", "image": "none"}]},
                },
            },
        }))
        .expect("a Deployment")
    };
    stream::iter(0..workloads)
        .map(|i| {
            let (deployments, object) = (deployments.clone(), object(i));
            async move { deployments.create(&PostParams::default(), &object).await }
        })
        .buffer_unordered(HANDS)
        .try_collect::<Vec<_>>()
        .await?;
    Ok(())
}

/// Every workload has so many ready pods on spot and the rest on on-demand.
///
/// Looked at once a second: a watch of ten thousand pods would cost more than what is measured.
async fn wait_split(
    namespace: &TestNamespace,
    workloads: usize,
    spot: usize,
    deadline: Duration,
) -> anyhow::Result<()> {
    let (deployments, pods): (Api<Deployment>, Api<Pod>) = (namespace.api(), namespace.api());
    let began = Instant::now();
    loop {
        let all = deployments.list(&ListParams::default()).await?;
        let ready = |d: &Deployment| d.status.as_ref().and_then(|s| s.ready_replicas) == i32::try_from(REPLICAS).ok();
        if all.iter().filter(|d| ready(d)).count() == workloads
            && is_split(&pods.list(&ListParams::default()).await?.items, workloads, spot)
        {
            return Ok(());
        }
        anyhow::ensure!(began.elapsed() < deadline, "not {spot} of {REPLICAS} on spot within {deadline:?}");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

fn is_split(pods: &[Pod], workloads: usize, spot: usize) -> bool {
    if pods.len() != workloads * REPLICAS || !pods.iter().all(is_ready) {
        return false;
    }
    let mut on_spot = std::collections::HashMap::<&str, usize>::new();
    for pod in pods {
        let app = pod.metadata.labels.iter().flatten().find_map(|(k, v)| (k == "app").then_some(v.as_str()));
        let node = pod.spec.as_ref().and_then(|s| s.node_name.as_deref()).unwrap_or_default();
        *on_spot.entry(app.unwrap_or_default()).or_default() += usize::from(node.starts_with("spot-"));
    }
    on_spot.len() == workloads && on_spot.values().all(|count| *count == spot)
}

fn is_ready(pod: &Pod) -> bool {
    let mut conditions = pod.status.iter().flat_map(|s| s.conditions.iter().flatten());
    pod.metadata.deletion_timestamp.is_none() && conditions.any(|c| c.type_ == "Ready" && c.status == "True")
}

fn resident_kib(groundcrew: &Groundcrew) -> anyhow::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", groundcrew.pid().context("it ended")?))?;
    let line = status.lines().find(|line| line.starts_with("VmRSS")).context("no VmRSS")?;
    Ok(line.split_whitespace().nth(1).context("no number")?.parse()?)
}

/// Seconds of processor time so far.
fn processor(groundcrew: &Groundcrew) -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", groundcrew.pid().context("it ended")?))?;
    // The name in parentheses may hold blanks; user and system time are the 12th and 13th after it.
    let (_, fields) = stat.rsplit_once(')').context("no name")?;
    let ticks: Vec<f64> = fields.split_whitespace().skip(11).take(2).filter_map(|f| f.parse().ok()).collect();
    Ok(ticks.iter().sum::<f64>() / TICKS)
}
