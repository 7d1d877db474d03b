//! Whatever ends, a feature, a taint's key, a rule or an installation: nobody stays held by a taint no one lifts.

use groundcrew::node_startup::crd::NodeStartupRule;
use groundcrew_testbed::{Cluster, Groundcrew, Layer};
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;

use crate::births::{births_are_free, births_carry, node_webhooks, policies};
use crate::judge;
use crate::rules::{install, rule};
use crate::support::*;

const OFF: &str = "nodeStartup:\n  enabled: false\n";
const OLD: &str = "example.com/first";
const OF_RULE: &str = "startup-taint.cluster-autoscaler.kubernetes.io/disks";

fn unbound(rule: &NodeStartupRule) -> bool {
    rule.finalizers().is_empty()
}

fn free_of(key: &'static str) -> impl Fn(&Node) -> bool {
    move |node| !keys(node).contains(&key)
}

/// Policies taint in an order of their own.
fn sorted(node: &Node) -> Vec<&str> {
    let mut keys = keys(node);
    keys.sort_unstable();
    keys
}

/// Waits until a groundcrew whose feature is off has looked whether it was ever on.
async fn has_looked_for_its_record(cluster: &Cluster) -> anyhow::Result<()> {
    let deadline = tokio::time::Instant::now() + SOON;
    loop {
        let asked =
            |e: &groundcrew_testbed::AuditEvent| e.verb == "get" && e.request_uri.contains("groundcrew-node-startup");
        if cluster.audit_events().await?.iter().any(asked) {
            return Ok(());
        }
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "the record was never asked for");
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_taint_outlives_its_key_or_the_feature_and_that_of_others_is_left_alone() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let rules = install(&cluster).await?;

    // Never on here: whoever uses this taint is somebody else.
    held_node(&cluster, "others").await?;
    let mut never = Groundcrew::builder(&cluster).name("never").config_yaml(OFF).start().await?;
    leading(&never).await?;
    has_looked_for_its_record(&cluster).await?;
    never.terminate().await?;
    assert!(held(&nodes(&cluster).get("others").await?), "the taint of another tool was taken");
    assert_eq!(judge::releases(&cluster.audit_events().await?)?.len(), 0);
    nodes(&cluster).delete("others", &DeleteParams::default()).await?;

    // Rules alone put nothing on record, and yet their taints and policies are ours.
    let missing = json!({"evidence": {"daemonSets": [{"namespace": "kube-system", "name": "missing"}]}});
    rules.create(&PostParams::default(), &rule("disks", missing)).await?;
    let bare = config("builtIn: false");
    let mut bare = Groundcrew::builder(&cluster).name("bare").config_yaml(&bare).start().await?;
    births_carry(&cluster, OF_RULE).await?;
    let node = create_node(&cluster, "bare", json!({}), json!([])).await?;
    assert_eq!(sorted(&node), ["node.kubernetes.io/not-ready", OF_RULE]);
    bare.terminate().await?;
    let mut off = Groundcrew::builder(&cluster).name("bare-off").config_yaml(OFF).start().await?;
    cluster.wait_for(&nodes(&cluster), "bare", "free of the rule's taint", SOON, free_of(OF_RULE)).await?;
    cluster.wait_for(&rules, "disks", "free to go", SOON, unbound).await?;
    assert_eq!(policies(&cluster).await?, (0, 0));
    off.terminate().await?;
    nodes(&cluster).delete("bare", &DeleteParams::default()).await?;

    let yaml = config(&format!("taintKey: {OLD}"));
    let mut first = Groundcrew::builder(&cluster).name("first").config_yaml(&yaml).start().await?;
    births_carry(&cluster, OLD).await?;
    births_carry(&cluster, OF_RULE).await?;
    let foreign = json!([{"key": OLD, "value": "mine", "effect": "NoExecute"}]);
    let node = create_node(&cluster, "old", json!({}), foreign).await?;
    assert_eq!(sorted(&node), [OLD, OLD, "node.kubernetes.io/not-ready", OF_RULE]);
    first.terminate().await?;

    let mut second = Groundcrew::builder(&cluster).name("second").config_yaml(&config("")).start().await?;
    let one_left = |node: &Node| keys(node) == [OLD, "node.kubernetes.io/not-ready", OF_RULE];
    let old = cluster.wait_for(&nodes(&cluster), "old", "free of the old key", SOON, one_left).await?;
    assert_eq!(taints(&old)[0].value.as_deref(), Some("mine"), "the foreign one stays");
    births_carry(&cluster, KEY).await?;
    let node = create_node(&cluster, "new", json!({}), json!([])).await?;
    assert_eq!(sorted(&node), ["node.kubernetes.io/not-ready", OF_RULE, KEY]);
    second.terminate().await?;

    let off = Groundcrew::builder(&cluster).name("off").config_yaml(OFF).start().await?;
    leading(&off).await?;
    cluster.wait_for(&nodes(&cluster), "new", "free of the taint", SOON, free_of(KEY)).await?;
    for name in ["old", "new"] {
        cluster.wait_for(&nodes(&cluster), name, "free of the rule's taint", SOON, free_of(OF_RULE)).await?;
    }
    assert_eq!((policies(&cluster).await?, node_webhooks(&cluster).await?), ((0, 0), 0));
    births_are_free(&cluster, json!({})).await?;
    cluster.wait_for(&rules, "disks", "free to go", SOON, unbound).await?;
    Ok(())
}
