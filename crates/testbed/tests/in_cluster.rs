//! groundcrew as it is installed: from its own image, in pods run by a real kubelet, under its own service account.
#![expect(clippy::indexing_slicing, reason = "a test ends where its assumption fails")]

use std::time::Duration;

use groundcrew_core::config;
use groundcrew_testbed::objects::{PodExt, apply, pod, stamped_as};
use groundcrew_testbed::{Cluster, Image, Layer};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Client, ResourceExt};
use serde_json::{Value, json};

const NAMESPACE: &str = "groundcrew-system";
const PATIENCE: Duration = Duration::from_secs(90);

fn stamp(pod: &Pod) -> Option<&String> {
    pod.annotations().get("timestamp")
}

/// What `groundcrew manifests` prints, applied as kubectl would.
async fn install(client: &Client, image: &str) -> anyhow::Result<()> {
    let config = config::load(Value::Null, vec![])?;
    let mut all = groundcrew::manifests::objects(&config, NAMESPACE, image);
    for object in all.iter_mut().filter(|object| object["kind"] == "Deployment") {
        object["spec"]["template"]["spec"]["containers"][0]["imagePullPolicy"] = json!("Never");
    }
    apply(client, NAMESPACE, all).await
}

#[tokio::test(flavor = "multi_thread")]
async fn two_replicas_from_their_own_image_stamp_the_pods_of_a_real_kubelet() -> anyhow::Result<()> {
    if !Layer::Nodes.available_or_skip()? {
        return Ok(());
    }
    let cluster = Cluster::start(Layer::Nodes).await?;
    let image = Image::groundcrew("groundcrew.test/groundcrew:1")?;
    let web = Image::busybox("groundcrew.test/web:1")?;
    cluster.load_image(&image).await?;
    cluster.load_image(&web).await?;
    let client = cluster.client();
    install(&client, image.name()).await?;

    let deployments: Api<Deployment> = Api::namespaced(client.clone(), NAMESPACE);
    let ready = |d: &Deployment| d.status.as_ref().and_then(|s| s.ready_replicas) == Some(2);
    cluster.wait_for(&deployments, "groundcrew", "two replicas ready", PATIENCE, ready).await?;
    let own: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    for pod in own.list(&Default::default()).await? {
        let restarts: i32 =
            pod.status.iter().flat_map(|s| s.container_statuses.iter().flatten()).map(|c| c.restart_count).sum();
        assert_eq!(restarts, 0, "{} restarted", pod.name_any());
    }

    // Through the Service, over the certificate it made itself: admission.
    cluster.webhook_answers().await?;
    let namespace = cluster.namespace("real").await?;
    let pods: Api<Pod> = namespace.api();
    let asking = pod("new").annotated("addtime", "").with_image(web.name(), &["/bin/busybox", "sleep", "600"]);
    assert!(stamped_as(&pods, &asking).await?, "not stamped by admission");

    // A running pod that asks later: the controller, under its own RBAC.
    let quiet = pod("running").with_image(web.name(), &["/bin/busybox", "sleep", "600"]);
    pods.create(&PostParams::default(), &quiet).await?;
    let running = |p: &Pod| p.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running");
    cluster.wait_for(&pods, "running", "running", PATIENCE, running).await?;
    let ask = Patch::Merge(json!({"metadata": {"annotations": {"addtime": "now"}}}));
    pods.patch("running", &PatchParams::default(), &ask).await?;
    cluster.wait_for(&pods, "running", "stamped", PATIENCE, |p| stamp(p).is_some()).await?;
    let all_run = |pods: &[&Pod]| pods.len() >= 2 && pods.iter().all(|p| running(p) && stamp(p).is_some());
    cluster.wait_for_list(&pods, watcher::Config::default(), "all run with a stamp", PATIENCE, all_run).await?;

    // No right is missing: nothing of ours was refused.
    let ours = format!("system:serviceaccount:{NAMESPACE}:groundcrew");
    let events = cluster.audit_events().await?;
    let refused: Vec<_> = events
        .iter()
        .filter(|e| e.user.username == ours && e.code() == 403)
        .map(|e| (&e.verb, &e.request_uri))
        .collect();
    assert!(events.iter().any(|e| e.user.username == ours), "the service account was never used");
    assert!(refused.is_empty(), "{refused:?}");
    Ok(())
}
