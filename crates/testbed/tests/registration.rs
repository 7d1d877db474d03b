//! The webhook configuration on a real API server: kept right, left alone, and taken away.

use std::time::{Duration, Instant};

use groundcrew_testbed::objects::{PodExt, pod};
use groundcrew_testbed::{AuditEvent, Cluster, Groundcrew, GroundcrewBuilder, Layer};
use jiff::Timestamp;
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

/// What groundcrew has asked to write since then, its lease aside.
fn our_writes(events: &[AuditEvent], since: Timestamp) -> Vec<String> {
    let ours = events.iter().filter(|e| e.user_agent.starts_with("groundcrew/") && !e.is_about("leases", ""));
    let writes = ours.filter(|e| !["get", "list", "watch"].contains(&e.verb.as_str()));
    let recent = writes.filter(|e| e.request_received_timestamp > since);
    recent.map(|e| format!("{} {}", e.verb, e.object_key().unwrap_or_default())).collect()
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
        let mut took: Vec<Duration> = Vec::new();
        // A machine may stand still once, not each time.
        while took.last().is_none_or(|last| *last > Duration::from_secs(5)) {
            assert!(took.len() < 3, "{took:?}: {change}");
            let began = Instant::now();
            configurations.patch(NAME, &PatchParams::default(), &json_patch(change.clone())?).await?;
            let what = format!("{change} is undone");
            let undone = |live: &MutatingWebhookConfiguration| live.webhooks == wanted.webhooks;
            cluster.wait_for(&configurations, NAME, &what, SOON, undone).await?;
            took.push(began.elapsed());
        }
        println!("{took:?}: {change}");
    }

    let since = Timestamp::now();
    let theirs = json!({"metadata": {"annotations": {"example.com/theirs": "stays"}}});
    configurations.patch(NAME, &PatchParams::default(), &Patch::Merge(&theirs)).await?;
    sleep(Duration::from_secs(3)).await;
    let live = configurations.get(NAME).await?;
    assert_eq!(live.annotations().get("example.com/theirs").map(String::as_str), Some("stays"));
    let writes = our_writes(&cluster.audit_events().await?, since);
    assert!(writes.is_empty(), "what others add is no reason to write: {writes:?}");
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
    // Said once the record's write was answered, which a stop would cut short.
    while !first.log()?.contains("someone deleted the webhook configuration; leaving it deleted") {
        assert!(deleted.elapsed() < SOON, "nothing is said of the deletion");
        sleep(Duration::from_millis(20)).await;
    }
    first.terminate().await?;
    let second = groundcrew(&cluster, "second").config_yaml(config).start().await?;
    loop {
        let back = configurations.get_opt(NAME).await?.is_some();
        // An answer that took long may be of a later time.
        if deleted.elapsed() >= Duration::from_secs(18) {
            break;
        }
        assert!(!back, "back after {:?}", deleted.elapsed());
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
    let began = Instant::now();
    let mut before: Vec<String> = Vec::new();
    // Converged is who has written and then has not for a while.
    loop {
        sleep(Duration::from_secs(5)).await;
        let now = our_writes(&cluster.audit_events().await?, Timestamp::MIN);
        if now == before && now.iter().any(|write| write.contains("patch")) {
            break;
        }
        assert!(began.elapsed() < 2 * SOON, "never done writing: {now:?}");
        before = now;
    }
    // Longer than the resync of the registration and than one watch.
    sleep(Duration::from_secs(35)).await;
    assert_eq!(our_writes(&cluster.audit_events().await?, Timestamp::MIN), before);
    Ok(())
}
