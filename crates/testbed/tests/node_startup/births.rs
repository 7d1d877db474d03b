//! Which nodes are born with the taint, by either engine, and who may go around it.

use groundcrew_testbed::objects::pod;
use groundcrew_testbed::{Cluster, Groundcrew, Layer};
use k8s_openapi::api::admissionregistration::v1::{
    MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding, MutatingWebhookConfiguration,
};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::support::*;

/// Waits until nodes are really born with the taint of this key; those made to find out are deleted again.
pub async fn births_carry(cluster: &Cluster, key: &str) -> anyhow::Result<()> {
    let deadline = tokio::time::Instant::now() + SOON;
    for i in 0.. {
        let name = format!("probe-{i}");
        let made = create_node(cluster, &name, json!({}), json!([])).await;
        if made.is_ok() {
            nodes(cluster).delete(&name, &DeleteParams::default()).await?;
        }
        if made.as_ref().is_ok_and(|node| keys(node).contains(&key)) {
            break;
        }
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "new nodes are not tainted with {key}: {made:?}");
        tokio::time::sleep(std::time::Duration::from_millis(150)).await;
    }
    Ok(())
}

/// Waits until nodes with these labels are born with no taint of ours: an API server looks once a second whether a
/// policy is gone.
pub async fn births_are_free(cluster: &Cluster, labels: serde_json::Value) -> anyhow::Result<()> {
    let deadline = tokio::time::Instant::now() + SOON;
    for i in 0.. {
        let born = create_node(cluster, &format!("after-{i}"), labels.clone(), json!([])).await?;
        if keys(&born) == ["node.kubernetes.io/not-ready"] {
            break;
        }
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "new nodes are still tainted: {:?}", keys(&born));
        tokio::time::sleep(std::time::Duration::from_millis(150)).await;
    }
    Ok(())
}

async fn births_are_tainted(cluster: &Cluster) -> anyhow::Result<()> {
    births_carry(cluster, KEY).await
}

async fn judge_births(cluster: &Cluster) -> anyhow::Result<()> {
    let plain = create_node(cluster, "plain", json!({}), json!([])).await?;
    assert_eq!(keys(&plain), ["node.kubernetes.io/not-ready", KEY], "the built-in taint is still there");
    let foreign = json!([{"key": "a", "value": "1", "effect": "NoSchedule"}, {"key": KEY, "value": "wait", "effect": "NoExecute"}]);
    let foreign = create_node(cluster, "foreign", json!({}), foreign).await?;
    assert_eq!(keys(&foreign), ["a", KEY, "node.kubernetes.io/not-ready", KEY]);
    assert!(held(&foreign));
    let twice = held_node(cluster, "twice").await?;
    assert_eq!(keys(&twice), [KEY, "node.kubernetes.io/not-ready"]);
    let clash =
        create_node(cluster, "clash", json!({}), json!([{"key": KEY, "value": "x", "effect": "NoSchedule"}])).await?;
    assert!(!held(&clash), "the API server would have refused a second taint of that key and effect");
    let system = create_node(cluster, "system", json!({"kubernetes.azure.com/mode": "system"}), json!([])).await?;
    assert_eq!(keys(&system), ["node.kubernetes.io/not-ready"]);
    let user = create_node(cluster, "user", json!({"kubernetes.azure.com/mode": "user"}), json!([])).await?;
    assert!(held(&user));

    let free = Patch::Merge(json!({"spec": {"taints": null}}));
    nodes(cluster).patch("plain", &PatchParams::default(), &free).await?;
    let label = Patch::Merge(json!({"metadata": {"labels": {"x": "y"}}}));
    let updated = nodes(cluster).patch("plain", &PatchParams::default(), &label).await?;
    assert!(taints(&updated).is_empty(), "an update adds nothing");
    Ok(())
}

pub async fn node_webhooks(cluster: &Cluster) -> anyhow::Result<usize> {
    let api: Api<MutatingWebhookConfiguration> = Api::all(cluster.client());
    let all = api.list(&ListParams::default()).await?;
    let of_nodes =
        |w: &&k8s_openapi::api::admissionregistration::v1::MutatingWebhook| w.name.starts_with("node-startup.");
    Ok(all.iter().flat_map(|c| c.webhooks.iter().flatten()).filter(of_nodes).count())
}

pub async fn policies(cluster: &Cluster) -> anyhow::Result<(usize, usize)> {
    let (one, two) = (
        Api::<MutatingAdmissionPolicy>::all(cluster.client()),
        Api::<MutatingAdmissionPolicyBinding>::all(cluster.client()),
    );
    Ok((one.list(&ListParams::default()).await?.items.len(), two.list(&ListParams::default()).await?.items.len()))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_webhook_taints_new_nodes_and_no_policy_is_there() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let groundcrew = Groundcrew::builder(&cluster).config_yaml(&config("engine: webhook")).start().await?;
    engine(&groundcrew, "webhook").await?;
    births_are_tainted(&cluster).await?;
    judge_births(&cluster).await?;
    assert_eq!(policies(&cluster).await?, (0, 0));
    assert_eq!(node_webhooks(&cluster).await?, 1);
    logged(&groundcrew, "Adding startup taint").await
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_taint_new_nodes_while_the_operator_is_stopped_and_uninstall_takes_them_away() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let set = init_set(&cluster, "agent", "init", json!({})).await?;
    let mut groundcrew = Groundcrew::builder(&cluster).config_yaml(&config("")).start().await?;
    engine(&groundcrew, "policy").await?;
    births_are_tainted(&cluster).await?;
    assert_eq!(node_webhooks(&cluster).await?, 0, "never both");
    let (status, _) = groundcrew.terminate().await?;
    assert!(status.success());

    judge_births(&cluster).await?;
    let mut born = Vec::new();
    for i in 0..20 {
        let node = create_node(&cluster, &format!("n{i}"), json!({}), json!([])).await?;
        assert!(held(&node) && keys(&node).contains(&"node.kubernetes.io/not-ready"), "{:?}", keys(&node));
        born.push(node);
    }
    let mut groundcrew = Groundcrew::builder(&cluster).name("again").config_yaml(&config("")).start().await?;
    for node in &born {
        let pod = init_pod(&cluster, &set, &node.name_any()).await?;
        make_ready(&cluster, &pod).await?;
    }
    for node in &born {
        let node = wait_released(&cluster, &node.name_any()).await?;
        assert_eq!(keys(&node), ["node.kubernetes.io/not-ready"]);
    }
    logged(&groundcrew, "Removed startup taint").await?;
    assert_eq!(policies(&cluster).await?, (1, 1));

    groundcrew.terminate().await?;
    cleanup(&cluster).await?;
    assert_eq!(policies(&cluster).await?, (0, 0));
    let left: Vec<String> =
        nodes(&cluster).list(&ListParams::default()).await?.iter().filter(|n| held(n)).map(Node::name_any).collect();
    assert!(left.is_empty(), "still held: {left:?}");
    births_are_free(&cluster, json!({})).await
}

/// `groundcrew cleanup`, as the Job of an uninstallation runs it.
pub async fn cleanup(cluster: &Cluster) -> anyhow::Result<()> {
    let mut command = Groundcrew::builder(cluster).name("cleanup").command("cleanup").spawn().await?;
    let status = command.wait_exit(SOON).await?;
    anyhow::ensure!(status.success(), "{}", command.log()?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_engine_switches_without_leaving_the_other_behind() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    for (yaml, webhooks, expected) in
        [("engine: policy", 0, (1, 1)), ("engine: webhook", 1, (0, 0)), ("engine: auto", 0, (1, 1))]
    {
        let mut groundcrew = Groundcrew::builder(&cluster).config_yaml(&config(yaml)).start().await?;
        leading(&groundcrew).await?;
        let deadline = tokio::time::Instant::now() + SOON;
        while (node_webhooks(&cluster).await?, policies(&cluster).await?) != (webhooks, expected) {
            anyhow::ensure!(
                tokio::time::Instant::now() < deadline,
                "{yaml}: {webhooks} webhooks, {expected:?} policies expected"
            );
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        }
        births_are_tainted(&cluster).await?;
        groundcrew.terminate().await?;
    }
    let mut groundcrew =
        Groundcrew::builder(&cluster).config_yaml(&config("")).env("STARTUP_WEBHOOK", "0").start().await?;
    engine(&groundcrew, "none").await?;
    leading(&groundcrew).await?;
    let deadline = tokio::time::Instant::now() + SOON;
    while policies(&cluster).await? != (0, 0) {
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "policies stay though nobody may taint");
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
    groundcrew.terminate().await?;
    Ok(())
}

/// Before 1.36 the kind is not there, which is what these flags make of the API server.
const WITHOUT_POLICIES: [(&str, &str); 2] = [
    ("feature-gates", "MutatingAdmissionPolicy=false"),
    (
        "runtime-config",
        "admissionregistration.k8s.io/v1/mutatingadmissionpolicies=false,\
         admissionregistration.k8s.io/v1/mutatingadmissionpolicybindings=false",
    ),
];

#[tokio::test(flavor = "multi_thread")]
async fn auto_uses_the_webhook_until_the_api_server_serves_policies_and_no_node_slips_through() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    cluster.restart_apiserver_with(&WITHOUT_POLICIES).await?;
    let groundcrew = Groundcrew::builder(&cluster).config_yaml(&config("")).start().await?;
    engine(&groundcrew, "webhook").await?;
    births_are_tainted(&cluster).await?;
    assert_eq!(node_webhooks(&cluster).await?, 1);

    let upgraded = async {
        cluster.restart_apiserver_with(&[]).await?;
        let deadline = tokio::time::Instant::now() + LONG;
        while (node_webhooks(&cluster).await?, policies(&cluster).await?) != (0, (1, 1)) {
            anyhow::ensure!(tokio::time::Instant::now() < deadline, "{:?}", policies(&cluster).await?);
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        engine(&groundcrew, "policy").await
    };
    let births = async {
        for i in 0.. {
            // Refused while the API server is away or cannot reach the webhook; but never let in without the taint.
            if let Ok(node) = create_node(&cluster, &format!("n{i}"), json!({}), json!([])).await {
                assert_eq!(keys(&node), ["node.kubernetes.io/not-ready", KEY], "n{i}");
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        done = upgraded => done?,
        () = births => {}
    }
    let born = nodes(&cluster).list(&ListParams::default()).await?.items.len();
    assert!(born > 0);
    births_are_tainted(&cluster).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_names_a_held_node_is_refused_where_asked_for() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let _groundcrew =
        Groundcrew::builder(&cluster).config_yaml(&config("denyUntolerated: true\nengine: none")).start().await?;
    held_node(&cluster, "held").await?;
    create_node(&cluster, "free", json!({}), json!([])).await?;
    let namespace = cluster.namespace("deny").await?;
    let pods: Api<Pod> = namespace.api();
    let bound = |name: &str, node: &str| {
        let mut pod = pod(name);
        if let Some(spec) = pod.spec.as_mut() {
            spec.node_name = Some(node.to_owned());
        }
        pod
    };
    let deadline = tokio::time::Instant::now() + SOON;
    let refused = loop {
        // Until the API server has taken up the configuration, pods get in.
        match pods
            .create(&PostParams::default(), &bound(&format!("p{}", jiff::Timestamp::now().as_millisecond()), "held"))
            .await
        {
            Err(kube::Error::Api(status)) => break status,
            Err(other) => return Err(other.into()),
            Ok(_) => anyhow::ensure!(tokio::time::Instant::now() < deadline, "never refused"),
        }
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    };
    assert_eq!(refused.code, 403);
    assert!(refused.message.contains("node held is starting up"), "{}", refused.message);
    pods.create(&PostParams::default(), &bound("free", "free")).await?;
    pods.create(&PostParams::default(), &pod("unbound")).await?;
    let mut tolerant = bound("tolerant", "held");
    if let Some(spec) = tolerant.spec.as_mut() {
        spec.tolerations = Some(vec![parse(json!({"key": KEY, "operator": "Exists"}))]);
    }
    pods.create(&PostParams::default(), &tolerant).await?;
    let system: Api<Pod> = Api::namespaced(cluster.client(), "kube-system");
    system.create(&PostParams::default(), &bound("exempt", "held")).await?;
    Ok(())
}
