//! When too many nodes never become ready, new ones are left alone: an autoscaler must not run away.

use groundcrew_testbed::{Cluster, Groundcrew, Layer};
use kube::ResourceExt;
use kube::api::ListParams;
use serde_json::json;

use crate::support::*;

/// With nodes born untainted in the end; the last of them.
async fn stop(cluster: &Cluster, groundcrew: &Groundcrew) -> anyhow::Result<String> {
    for i in 0..3 {
        held_node(cluster, &format!("late-{i}")).await?;
    }
    groundcrew.wait_metric("groundcrew_node_startup_guard_open{rule=\"initializing\"} 0", SOON).await?;
    assert!(event(cluster, "groundcrew-system", "StartupTaintingStopped").await?.contains("new ones are not held"));
    let deadline = tokio::time::Instant::now() + SOON;
    for i in 0.. {
        let name = format!("free-{i}");
        if !held(&create_node(cluster, &name, json!({}), json!([])).await?) {
            return Ok(name);
        }
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "new nodes are still tainted");
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
    unreachable!("the loop above has no end of its own")
}

/// The late ones become ready after all.
async fn heal(cluster: &Cluster, groundcrew: &Groundcrew) -> anyhow::Result<()> {
    let set = init_set(cluster, "agent", "init", json!({})).await?;
    for node in nodes(cluster).list(&ListParams::default()).await?.iter().filter(|n| held(n)) {
        make_ready(cluster, &init_pod(cluster, &set, &node.name_any()).await?).await?;
    }
    groundcrew.wait_metric("groundcrew_node_startup_guard_open{rule=\"initializing\"} 1", SOON).await
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_stop_tainting_while_too_many_nodes_time_out_and_start_again_when_they_recover() -> anyhow::Result<()>
{
    let cluster = Cluster::start(Layer::Api).await?;
    let yaml = config("engine: policy\ntimeout: 2s\nguard:\n  minNodes: 3");
    let groundcrew = Groundcrew::builder(&cluster).config_yaml(&yaml).start().await?;
    // Only who leads when the guard closes says so.
    leading(&groundcrew).await?;
    stop(&cluster, &groundcrew).await?;
    heal(&cluster, &groundcrew).await?;
    crate::births::births_carry(&cluster, KEY).await
}

#[tokio::test(flavor = "multi_thread")]
async fn webhook_and_backfill_stop_tainting_together_and_start_again_together() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let yaml = config("engine: webhook\nbackfill: true\ntimeout: 2s\nguard:\n  minNodes: 3");
    let groundcrew = Groundcrew::builder(&cluster).config_yaml(&yaml).start().await?;
    crate::births::births_carry(&cluster, KEY).await?;
    leading(&groundcrew).await?;
    let free = stop(&cluster, &groundcrew).await?;
    let last = held_node(&cluster, "last").await?;
    event(&cluster, &last.name_any(), "StartupTimedOut").await?;
    assert!(!held(&nodes(&cluster).get(&free).await?), "an idle node was tainted late though tainting has stopped");
    heal(&cluster, &groundcrew).await?;
    cluster.wait_for(&nodes(&cluster), &free, "tainted late", SOON, held).await?;
    crate::births::births_carry(&cluster, KEY).await
}
