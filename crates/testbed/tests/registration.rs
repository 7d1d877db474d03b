//! The webhook configuration on a real API server: kept right, left alone, and taken away.

use std::time::{Duration, Instant};

use groundcrew_testbed::objects::{PodExt, pod};
use groundcrew_testbed::{AuditEvent, Cluster, Groundcrew, GroundcrewBuilder, Layer};
use k8s_openapi::api::admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use rcgen::{CertificateParams, KeyPair};
use serde_json::json;
use tokio::time::sleep;

const SOON: Duration = Duration::from_secs(30);
const NAME: &str = "groundcrew";

type Configurations = Api<MutatingWebhookConfiguration>;

async fn registered(cluster: &Cluster) -> anyhow::Result<(Configurations, MutatingWebhookConfiguration)> {
    let configurations = Api::all(cluster.client());
    let complete =
        |live: &MutatingWebhookConfiguration| live.webhooks.as_ref().is_some_and(|entries| !entries.is_empty());
    let live = cluster.wait_for(&configurations, NAME, "the webhook is registered", SOON, complete).await?;
    Ok((configurations, live))
}

/// With one entry to register: which features there are is not what these tests are about.
fn groundcrew<'a>(cluster: &'a Cluster, name: &str) -> GroundcrewBuilder<'a> {
    let others = ["NODESTARTUP", "SIZING", "SPREAD", "WARMUP"];
    let only_timestamp =
        |builder: GroundcrewBuilder<'a>, other| builder.env(format!("GROUNDCREW_{other}__ENABLED"), "false");
    others.into_iter().fold(Groundcrew::builder(cluster).name(name), only_timestamp)
}

fn json_patch(operations: serde_json::Value) -> anyhow::Result<Patch<()>> {
    Ok(Patch::Json(serde_json::from_value(operations)?))
}

/// What groundcrew wrote, its lease aside.
fn our_writes(events: &[AuditEvent]) -> Vec<String> {
    let ours = events.iter().filter(|e| e.user_agent.starts_with("groundcrew/") && !e.is_about("leases", ""));
    let writes = ours.filter(|e| !["get", "list", "watch"].contains(&e.verb.as_str()));
    writes.map(|e| format!("{} {}", e.verb, e.object_key().unwrap_or_default())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_change_is_right_again_in_five_seconds() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let _groundcrew = groundcrew(&cluster, "a").start().await?;
    let (configurations, wanted) = registered(&cluster).await?;

    let stranger = CertificateParams::default().self_signed(&KeyPair::generate()?)?.pem();
    let stranger = serde_json::to_value(k8s_openapi::ByteString(stranger.into_bytes()))?;
    let bundle = "/webhooks/0/clientConfig/caBundle";
    let changes = [
        json!([{"op": "replace", "path": bundle, "value": stranger}]),
        json!([{"op": "remove", "path": bundle}]),
        json!([{"op": "replace", "path": "/webhooks/0/timeoutSeconds", "value": 30}]),
        json!([{"op": "replace", "path": "/webhooks/0/failurePolicy", "value": "Fail"}]),
        json!([{"op": "remove", "path": "/webhooks/0"}]),
        json!([{"op": "copy", "from": "/webhooks/0", "path": "/webhooks/-"},
               {"op": "replace", "path": "/webhooks/1/name", "value": "gone.groundcrew.io"}]),
    ];
    for change in changes {
        let began = Instant::now();
        configurations.patch(NAME, &PatchParams::default(), &json_patch(change.clone())?).await?;
        let what = format!("{change} is undone");
        let undone = |live: &MutatingWebhookConfiguration| live.webhooks == wanted.webhooks;
        cluster.wait_for(&configurations, NAME, &what, Duration::from_secs(5), undone).await?;
        println!("{:?}: {change}", began.elapsed());
    }

    let theirs = json!({"metadata": {"annotations": {"example.com/theirs": "stays"}}});
    configurations.patch(NAME, &PatchParams::default(), &Patch::Merge(&theirs)).await?;
    let before = our_writes(&cluster.audit_events().await?);
    sleep(Duration::from_secs(3)).await;
    let live = configurations.get(NAME).await?;
    assert_eq!(live.annotations().get("example.com/theirs").map(String::as_str), Some("stays"));
    assert_eq!(our_writes(&cluster.audit_events().await?), before, "what others add is no reason to write");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_configuration_stays_deleted_across_restarts_and_says_so() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let config = "webhook: {recreateAfter: 20s}";
    let mut first = groundcrew(&cluster, "first").config_yaml(config).start().await?;
    let (configurations, _) = registered(&cluster).await?;
    let records: Api<ConfigMap> = Api::namespaced(cluster.client(), "groundcrew-system");
    let has = |key: &'static str| move |record: &ConfigMap| record.data.iter().flatten().any(|(name, _)| name == key);
    let record = "groundcrew-webhooks";
    cluster.wait_for(&records, record, "the registration is on record", SOON, has("mutating-registered-at")).await?;

    configurations.delete(NAME, &DeleteParams::default()).await?;
    let deleted = Instant::now();
    cluster.wait_for(&records, record, "the deletion is on record", SOON, has("mutating-deleted-at")).await?;
    first.terminate().await?;
    assert!(first.log()?.contains("someone deleted the webhook configuration; leaving it deleted"));
    let second = groundcrew(&cluster, "second").config_yaml(config).start().await?;
    while deleted.elapsed() < Duration::from_secs(18) {
        assert!(configurations.get_opt(NAME).await?.is_none(), "back after {:?}", deleted.elapsed());
        sleep(Duration::from_millis(200)).await;
    }
    registered(&cluster).await?;
    println!("registered again after {:?}", deleted.elapsed());
    drop(second);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn turned_off_means_taken_away_and_turned_on_means_back_at_once() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    // Warm-up looks at workloads, too, so there is a configuration of each kind.
    let mut running = groundcrew(&cluster, "on").env("GROUNDCREW_WARMUP__ENABLED", "true").start().await?;
    let (configurations, _) = registered(&cluster).await?;
    let validating: Api<ValidatingWebhookConfiguration> = Api::all(cluster.client());
    cluster.wait_for(&validating, NAME, "the validating webhook is registered", SOON, |_| true).await?;
    running.terminate().await?;
    assert!(configurations.get_opt(NAME).await?.is_some(), "a restart is no reason to unregister");

    let mut off = groundcrew(&cluster, "webhook-off").arg("--enable-webhook=false").start().await?;
    cluster.wait_gone(&configurations, NAME, SOON).await?;
    cluster.wait_gone(&validating, NAME, SOON).await?;
    off.terminate().await?;
    let mut running = groundcrew(&cluster, "on-again").start().await?;
    registered(&cluster).await?;
    running.terminate().await?;

    let mut off = groundcrew(&cluster, "feature-off").config_yaml("timestamp: {enabled: false}").start().await?;
    cluster.wait_gone(&configurations, NAME, SOON).await?;
    off.terminate().await?;
    let _running = groundcrew(&cluster, "on-once-more").start().await?;
    registered(&cluster).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_converged_cluster_sees_no_writes() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let _one = groundcrew(&cluster, "one").start().await?;
    registered(&cluster).await?;
    let namespace = cluster.namespace("quiet").await?;
    namespace.api::<Pod>().create(&PostParams::default(), &pod("stamped").annotated("addtime", "")).await?;
    sleep(Duration::from_secs(3)).await;
    let before = our_writes(&cluster.audit_events().await?);
    assert!(before.iter().any(|write| write.contains("patch")), "{before:?}");
    // Longer than the resync of the registration and than one watch.
    sleep(Duration::from_secs(35)).await;
    assert_eq!(our_writes(&cluster.audit_events().await?), before);
    Ok(())
}
