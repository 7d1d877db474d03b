//! Killed, doubled or left in peace: the same releases, each once.

use std::time::Duration;

use groundcrew_testbed::{Cluster, Groundcrew, Layer, our_writes};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::judge;
use crate::rules::{install, rule};
use crate::support::*;

/// A held node with a foreign taint on each side of ours, and its init pod, not ready.
async fn between_others(
    cluster: &Cluster,
    set: &k8s_openapi::api::apps::v1::DaemonSet,
    name: &str,
) -> anyhow::Result<Pod> {
    let taints = json!([
        {"key": "example.com/a", "effect": "NoSchedule"}, {"key": KEY, "value": "wait", "effect": "NoSchedule"},
        {"key": "example.com/b", "value": "1", "effect": "PreferNoSchedule"},
    ]);
    create_node(cluster, name, json!({}), taints).await?;
    init_pod(cluster, set, name).await
}

/// A kill lands before the event is heard, between decision and write, between write and answer, or after it,
/// depending on when it comes; so it comes a little later each time.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_at_any_moment_of_a_release_loses_and_repeats_nothing() -> anyhow::Result<()> {
    const ROUNDS: u64 = 10;
    let cluster = Cluster::start(Layer::Api).await?;
    let set = init_set(&cluster, "agent", "init", json!({})).await?;
    let (mut before, mut after) = (0_u64, 0_u64);
    for round in 0..ROUNDS {
        let name = format!("n{round}");
        let pod = between_others(&cluster, &set, &name).await?;
        let start = |name: &str| {
            let builder = Groundcrew::builder(&cluster).name(name).config_yaml(&config("engine: none"));
            builder.arg("--leader-elect=false").arg("--enable-webhook=false").start()
        };
        let mut victim = start("victim").await?;
        pass_marker(&cluster, &set, &format!("marker-{round}")).await?;
        make_ready(&cluster, &pod).await?;
        tokio::time::sleep(Duration::from_millis(round * 4)).await;
        victim.kill().await?;
        match held(&nodes(&cluster).get(&name).await?) {
            true => before += 1,
            false => after += 1,
        }
        let mut heir = start("heir").await?;
        let node = wait_released(&cluster, &name).await?;
        assert_eq!(keys(&node), ["example.com/a", "example.com/b", "node.kubernetes.io/not-ready"]);
        heir.kill().await?;
    }
    let events = cluster.audit_events().await?;
    let releases = judge::releases(&events)?;
    judge::released_only_when_ready(&events, &releases)?;
    // A write whose author was killed before the answer is committed, but the log does not call it a success; victims
    // and heirs alike are killed that soon. The victims' first release, that of the marker, was answered.
    let logged = releases.len() as u64;
    assert!((ROUNDS..=2 * ROUNDS).contains(&logged), "{logged} releases, {after} of them by a victim");
    println!("killed before the release {before} times, after it {after} times");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn two_replicas_release_each_node_once_survive_a_crash_and_then_rest() -> anyhow::Result<()> {
    const NODES: usize = 6;
    let cluster = Cluster::start(Layer::Api).await?;
    let rules = install(&cluster).await?;
    let set = init_set(&cluster, "agent", "init", json!({})).await?;
    let start = |name| Groundcrew::builder(&cluster).name(name).config_yaml(&config("")).start();
    let mut leader = start("leader").await?;
    leading(&leader).await?;
    engine(&leader, "policy").await?;
    let follower = start("follower").await?;
    let dry = json!({"dryRun": true, "evidence": {"daemonSets": [{"namespace": "kube-system", "name": "missing"}]}});
    rules.create(&PostParams::default(), &rule("dry", dry)).await?;
    let mut pods = Vec::new();
    for i in 0..NODES {
        pods.push(between_others(&cluster, &set, &format!("n{i}")).await?);
    }
    make_ready(&cluster, &pods[0]).await?;
    wait_released(&cluster, "n0").await?;
    // Killed before the answer, it would have made a release that the log does not call a success.
    judge::wait_answered(&cluster, "n0").await?;
    leader.kill().await?;
    for pod in &pods[1..] {
        make_ready(&cluster, pod).await?;
    }
    leading(&follower).await?;
    for i in 0..NODES {
        wait_released(&cluster, &format!("n{i}")).await?;
    }
    let second = start("second").await?;
    let counted = |r: &groundcrew::node_startup::crd::NodeStartupRule| {
        r.status.as_ref().is_some_and(|s| s.would_hold as usize == NODES)
    };
    cluster.wait_for(&rules, "dry", "counts them all", SOON, counted).await?;
    for i in 1..NODES {
        event(&cluster, &format!("n{i}"), "StartupCompleted").await?;
    }
    engine(&second, "policy").await?;

    let before = cluster.rest().await?;
    // The quiet itself is what is observed: several surveys, renewals and a look at the policies.
    tokio::time::sleep(Duration::from_secs(18)).await;
    // Others' heart-beats are no news either.
    let beat = Patch::Strategic(json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}));
    nodes(&cluster).patch_status("n0", &PatchParams::default(), &beat).await?;
    let pods: Api<Pod> = system_pods(&cluster);
    pods.patch("agent-n0", &PatchParams::default(), &Patch::Merge(json!({"metadata": {"labels": {"x": "y"}}}))).await?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let events = cluster.audit_events().await?;
    assert_eq!(our_writes(&events, before), Vec::<String>::new());
    let releases = judge::releases(&events)?;
    judge::released_only_when_ready(&events, &releases)?;
    assert_eq!(judge::let_go(&events, &releases).len(), NODES);
    Ok(())
}
