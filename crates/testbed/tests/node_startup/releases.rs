//! When the taint goes, and when it stays.

use std::time::Duration;

use groundcrew_testbed::objects::pod;
use groundcrew_testbed::{Cluster, Groundcrew, Layer};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::births::births_carry;
use crate::support::*;

async fn still_held(cluster: &Cluster, names: &[&str]) -> anyhow::Result<()> {
    for name in names {
        let node = nodes(cluster).get(name).await?;
        assert!(held(&node) && !completed(&node), "{name}: {:?}", keys(&node));
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_taint_goes_when_every_init_pod_is_ready_and_not_before() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    // Before groundcrew starts: what a node waits for is told once, and must name them.
    let set = init_set(&cluster, "agent", "init", json!({})).await?;
    let gpu = init_set(&cluster, "gpu", "init", json!({"nodeSelector": {"gpu": "yes"}})).await?;
    let groundcrew = Groundcrew::builder(&cluster).config_yaml(&config("engine: none")).start().await?;
    let waiting = ["empty", "half", "unready", "shout", "elsewhere", "terminating", "older", "two"];
    for name in waiting {
        let labels = if name == "two" { json!({"gpu": "yes"}) } else { json!({}) };
        // Its pod must be older by a whole second, the finest that the API server tells.
        if name != "older" {
            create_node(&cluster, name, labels, json!([{"key": KEY, "value": "wait", "effect": "NoSchedule"}])).await?;
        }
    }
    let half = init_pod(&cluster, &set, "half").await?;
    report(&cluster, &half, true, false, true).await?;
    let unready = init_pod(&cluster, &set, "unready").await?;
    report(&cluster, &unready, true, true, false).await?;
    let shout = init_pod(&cluster, &set, "shout").await?;
    let annotate = |value: &str| Patch::Merge(json!({"metadata": {"annotations": {"startup.k8s.io/ready": value}}}));
    system_pods(&cluster).patch(&shout.name_any(), &PatchParams::default(), &annotate("True")).await?;
    // A pod ready on another node, which has no Node object.
    let elsewhere = init_pod(&cluster, &set, "nowhere").await?;
    make_ready(&cluster, &elsewhere).await?;
    let terminating = init_pod(&cluster, &set, "terminating").await?;
    let finalizer = Patch::Merge(json!({"metadata": {"finalizers": ["groundcrew.io/test"]}}));
    system_pods(&cluster).patch(&terminating.name_any(), &PatchParams::default(), &finalizer).await?;
    system_pods(&cluster).delete(&terminating.name_any(), &DeleteParams::default()).await?;
    make_ready(&cluster, &terminating).await?;
    let older = init_pod(&cluster, &set, "older").await?;
    make_ready(&cluster, &older).await?;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    held_node(&cluster, "older").await?;
    let two = init_pod(&cluster, &set, "two").await?;
    make_ready(&cluster, &two).await?;
    let two = init_pod(&cluster, &gpu, "two").await?;

    pass_marker(&cluster, &set, "marker").await?;
    still_held(&cluster, &waiting).await?;
    assert!(event(&cluster, "two", "StartupHeld").await?.contains("DaemonSet kube-system/gpu"));
    let blocks =
        |metric: &str| format!("groundcrew_node_startup_{metric}{{namespace=\"kube-system\",daemonset=\"gpu\"}}");
    groundcrew.wait_metric(&format!("{} 1", blocks("blocked_nodes")), SOON).await?;
    let born = nodes(&cluster).get("two").await?.creation_timestamp().map(|t| t.0.as_second()).unwrap_or_default();
    groundcrew.wait_metric(&format!("{} {born}", blocks("blocked_since_seconds")), SOON).await?;

    make_ready(&cluster, &two).await?;
    make_ready(&cluster, &half).await?;
    make_ready(&cluster, &unready).await?;
    system_pods(&cluster).patch(&shout.name_any(), &PatchParams::default(), &annotate("true")).await?;
    for name in ["two", "half", "unready", "shout"] {
        wait_released(&cluster, name).await?;
    }
    event(&cluster, "two", "StartupCompleted").await?;
    still_held(&cluster, &["empty", "elsewhere", "terminating", "older"]).await?;

    // Born again under its name: the old pod says nothing about the new node.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    nodes(&cluster).delete("half", &DeleteParams::default()).await?;
    held_node(&cluster, "half").await?;
    pass_marker(&cluster, &set, "marker-2").await?;
    still_held(&cluster, &["half"]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn hold_timeout_and_phases_end_as_configured() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let set = init_set(&cluster, "agent", "init", json!({})).await?;
    let early = init_set(&cluster, "early", "preinit", json!({})).await?;

    let mut first = Groundcrew::builder(&cluster).config_yaml(&config("engine: none\nminHold: 4s")).start().await?;
    let born = held_node(&cluster, "hold").await?;
    make_ready(&cluster, &init_pod(&cluster, &set, "hold").await?).await?;
    let free = wait_released(&cluster, "hold").await?;
    let at: i64 = free.annotations()[COMPLETED].parse()?;
    let since = born.creation_timestamp().map(|t| t.0.as_second()).unwrap_or_default();
    assert!(at - since >= 4, "held for {} s", at - since);
    first.terminate().await?;

    let yaml = config("engine: none\ntimeout: 2s\nonTimeout: keep");
    let mut second = Groundcrew::builder(&cluster).name("keep").config_yaml(&yaml).start().await?;
    held_node(&cluster, "kept").await?;
    assert!(event(&cluster, "kept", "StartupTimedOut").await?.contains("kube-system/agent"));
    still_held(&cluster, &["kept"]).await?;
    second.wait_metric("groundcrew_node_startup_timed_out_total{rule=\"initializing\"} 1", SOON).await?;
    make_ready(&cluster, &init_pod(&cluster, &set, "kept").await?).await?;
    wait_released(&cluster, "kept").await?;
    second.terminate().await?;

    let yaml = config("engine: none\ntimeout: 2s\nonTimeout: release");
    let mut third = Groundcrew::builder(&cluster).name("release").config_yaml(&yaml).start().await?;
    held_node(&cluster, "let-go").await?;
    let node = wait_released(&cluster, "let-go").await?;
    assert!(node.annotations().contains_key("startup.k8s.io/timedOutAt"));
    event(&cluster, "let-go", "StartupTimedOut").await?;
    third.wait_metric("groundcrew_node_startup_timed_out_total{rule=\"initializing\"} 1", SOON).await?;
    third.terminate().await?;

    let yaml = config("phases: [preinit, initializing]");
    let _fourth = Groundcrew::builder(&cluster).name("phases").config_yaml(&yaml).start().await?;
    births_carry(&cluster, "startup.k8s.io/preinit").await?;
    births_carry(&cluster, KEY).await?;
    let born = create_node(&cluster, "phases", json!({}), json!([])).await?;
    assert_eq!(keys(&born).len(), 3, "{:?}", keys(&born));
    make_ready(&cluster, &init_pod(&cluster, &set, "phases").await?).await?;
    // A node that is ready after it in both phases is released, so this one has been looked at.
    held_node(&cluster, "marker").await?;
    for set in [&early, &set] {
        make_ready(&cluster, &init_pod(&cluster, set, "marker").await?).await?;
    }
    wait_released(&cluster, "marker").await?;
    assert_eq!(nodes(&cluster).get("phases").await.map(|n| keys(&n).len())?, 3, "the second phase waits for the first");
    make_ready(&cluster, &init_pod(&cluster, &early, "phases").await?).await?;
    let free = wait_released(&cluster, "phases").await?;
    assert_eq!(keys(&free), ["node.kubernetes.io/not-ready"]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_init_daemon_set_that_cannot_tolerate_the_taint_is_named_at_once() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let _groundcrew = Groundcrew::builder(&cluster).config_yaml(&config("engine: none")).start().await?;
    let only = json!({"tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists"}]});
    init_set(&cluster, "shy", "init", only).await?;
    held_node(&cluster, "stuck").await?;
    let message = event(&cluster, "stuck", "InitPodCannotRun").await?;
    assert!(message.contains("kube-system/shy") && message.contains(KEY), "{message}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn backfill_taints_idle_nodes_only_and_only_if_asked_by_exactly_one() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let set = init_set(&cluster, "agent", "init", json!({})).await?;
    let control_plane = json!({"node-role.kubernetes.io/control-plane": ""});
    for (name, labels) in [
        ("idle", json!({})),
        ("busy", json!({})),
        ("daemons", json!({})),
        ("finished", json!({})),
        ("control-plane", control_plane),
        ("system", json!({"kubernetes.azure.com/mode": "system"})),
        ("done", json!({})),
    ] {
        create_node(&cluster, name, labels, json!([])).await?;
    }
    let done = Patch::Merge(json!({"metadata": {"annotations": {COMPLETED: "1"}}}));
    nodes(&cluster).patch("done", &PatchParams::default(), &done).await?;
    init_pod(&cluster, &set, "daemons").await?;
    let namespace = cluster.namespace("users").await?;
    let pods: Api<Pod> = namespace.api();
    for (name, node) in [("web", "busy"), ("job", "finished")] {
        let mut pod = pod(name);
        if let Some(spec) = pod.spec.as_mut() {
            spec.node_name = Some(node.to_owned());
        }
        pods.create(&PostParams::default(), &pod).await?;
    }
    let over = Patch::Merge(json!({"status": {"phase": "Succeeded"}}));
    pods.patch_status("job", &PatchParams::default(), &over).await?;

    let mut off = Groundcrew::builder(&cluster)
        .config_yaml(&config("engine: none"))
        .env("STARTUP_BACKFILL", "true")
        .start()
        .await?;
    pass_marker(&cluster, &set, "marker").await?;
    let tainted = async || -> anyhow::Result<Vec<String>> {
        let all = nodes(&cluster).list(&ListParams::default()).await?;
        let mut names: Vec<String> = all.iter().filter(|n| held(n)).map(Node::name_any).collect();
        names.sort();
        Ok(names)
    };
    assert_eq!(tainted().await?, Vec::<String>::new());
    off.terminate().await?;

    let _on = Groundcrew::builder(&cluster)
        .name("on")
        .config_yaml(&config("engine: none"))
        .env("STARTUP_BACKFILL", "1")
        .start()
        .await?;
    for name in ["idle", "daemons", "finished"] {
        cluster.wait_for(&nodes(&cluster), name, "backfilled", SOON, held).await?;
    }
    let idle = nodes(&cluster).get("idle").await?;
    assert!(taints(&idle).iter().any(|t| t.key == KEY && t.time_added.is_some()));
    pass_marker(&cluster, &set, "marker-2").await?;
    assert_eq!(tainted().await?, ["daemons", "finished", "idle"]);
    make_ready(&cluster, &init_pod(&cluster, &set, "idle").await?).await?;
    wait_released(&cluster, "idle").await?;
    pass_marker(&cluster, &set, "marker-3").await?;
    assert_eq!(tainted().await?, ["daemons", "finished"], "who has been through it is not tainted again");
    Ok(())
}
