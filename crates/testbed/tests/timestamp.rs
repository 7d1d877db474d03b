//! `timestamp` on a real API server: judged by what it stored and by its audit log.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use futures::{StreamExt, TryStreamExt, stream};
use groundcrew_testbed::objects::{PodExt, pod, reviewed};
use groundcrew_testbed::{AuditEvent, Cluster, Groundcrew, Layer, Proxy, our_writes};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, ResourceExt};
use serde_json::json;

const SOON: Duration = Duration::from_secs(30);

fn stamp(pod: &Pod) -> Option<&str> {
    pod.annotations().get("timestamp").map(String::as_str)
}

/// Exempt from the webhook, so that only the controller stamps here.
fn exempt(client: &Client) -> Api<Pod> {
    Api::namespaced(client.clone(), "kube-system")
}

fn asking(name: &str) -> Pod {
    pod(name).annotated("addtime", "")
}

/// How often each pod went from unstamped to stamped, or from one stamp to another, in the order the server made it so.
///
/// From a watch, not from the audit log: a write whose author was killed is committed, but audited without a success.
#[derive(Clone, Default)]
struct History(Arc<Mutex<Stamps>>);

/// By pod: its last stamp, and how many it has had.
type Stamps = BTreeMap<String, (Option<String>, usize)>;

impl History {
    fn of(apis: &[&Api<Pod>]) -> Self {
        let history = Self::default();
        for api in apis {
            let (api, history) = ((*api).clone(), history.clone());
            tokio::spawn(async move {
                // Without a pause it would ask a server that is gone for ever, and never let the test end.
                let mut events = pin!(watcher(api, watcher::Config::default()).default_backoff());
                while let Some(event) = events.next().await {
                    if let Ok(Event::Apply(pod) | Event::InitApply(pod)) = event {
                        history.note(&pod);
                    }
                }
            });
        }
        history
    }

    fn note(&self, pod: &Pod) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (last, count) = seen.entry(pod.name_any()).or_default();
        let now = stamp(pod).map(str::to_owned);
        if now.is_some() && now != *last {
            *count += 1;
        }
        *last = now;
    }

    fn stampings(&self, name: &str) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(name).map_or(0, |(_, count)| *count)
    }

    /// Waits until the watch has seen the stamp of this pod.
    async fn until_stamped(&self, name: &str) -> anyhow::Result<()> {
        let began = tokio::time::Instant::now();
        while self.stampings(name) == 0 {
            anyhow::ensure!(began.elapsed() < SOON, "the stamp of {name} was not seen");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }
}

fn our_pod_writes(events: &[AuditEvent]) -> usize {
    let ours = |e: &&AuditEvent| e.user_agent.starts_with("groundcrew/") && e.is_about("pods", "");
    events.iter().filter(ours).filter(|e| e.is_committed_write()).count()
}

/// A write is seen by others a moment before it is in the log.
async fn expect_pod_writes(cluster: &Cluster, expected: usize) -> anyhow::Result<()> {
    let began = Instant::now();
    loop {
        let made = our_pod_writes(&cluster.audit_events().await?);
        if made >= expected || began.elapsed() > SOON {
            assert_eq!(made, expected);
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_pod_carries_the_time_when_its_creation_is_answered() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let _groundcrew = Groundcrew::builder(&cluster).start().await?;
    let namespace = cluster.namespace("new").await?;
    let pods: Api<Pod> = namespace.api();
    registered(&cluster).await?;

    let created = reviewed(&pods, &PostParams::default(), &asking("a")).await?;
    let text = stamp(&created).context("not stamped by admission")?;
    let at: jiff::Timestamp = text.parse()?;
    assert!(text.ends_with('Z') && text.len() == 20, "{text}");
    assert!(at.duration_until(jiff::Timestamp::now()).abs().as_secs() < 60, "{text}");

    let generated = Pod {
        metadata: kube::api::ObjectMeta { generate_name: Some("g-".into()), name: None, ..asking("x").metadata },
        ..asking("x")
    };
    assert!(stamp(&reviewed(&pods, &PostParams::default(), &generated).await?).is_some());

    let own = pods.create(&PostParams::default(), &asking("own").annotated("timestamp", "mine")).await?;
    assert_eq!(stamp(&own), Some("mine"));
    assert_eq!(stamp(&pods.create(&PostParams::default(), &pod("silent")).await?), None);

    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let tried = reviewed(&pods, &dry, &asking("dry")).await?;
    assert!(stamp(&tried).is_some());
    assert!(pods.get_opt(&tried.name_any()).await?.is_none());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_pods_are_stamped_once_each_though_the_leader_dies_and_the_watch_is_cut() -> anyhow::Result<()> {
    const PODS: usize = 1000;
    let cluster = Cluster::start(Layer::Api).await?;
    let proxy = Proxy::to(cluster.api_addr()).await?;
    let mut first = Groundcrew::builder(&cluster).name("first").start().await?;
    leading(&first).await?;
    let second = Groundcrew::builder(&cluster).name("second").through(&proxy).start().await?;
    registered(&cluster).await?;

    // Half by admission, half by the controller alone.
    let namespace = cluster.namespace("many").await?;
    let (by_webhook, by_controller) = (namespace.api::<Pod>(), exempt(&cluster.client()));
    let history = History::of(&[&by_webhook, &by_controller]);
    let create = |range: std::ops::Range<usize>| {
        let (by_webhook, by_controller) = (by_webhook.clone(), by_controller.clone());
        stream::iter(range)
            .map(move |i| {
                let api = if i % 2 == 0 { by_webhook.clone() } else { by_controller.clone() };
                async move { api.create(&PostParams::default(), &asking(&format!("pod-{i}"))).await }
            })
            .buffer_unordered(16)
            .try_for_each(async |_| Ok(()))
    };
    create(0..PODS / 2).await?;
    first.kill().await?;
    proxy.cut();
    create(PODS / 2..PODS).await?;

    for api in [&by_webhook, &by_controller] {
        let all_stamped = |pods: &[&Pod]| pods.len() == PODS / 2 && pods.iter().all(|p| stamp(p).is_some());
        cluster.wait_for_list(api, watcher::Config::default(), "every pod stamped", 2 * SOON, all_stamped).await?;
    }
    leading(&second).await?;
    for i in 0..PODS {
        history.until_stamped(&format!("pod-{i}")).await?;
    }
    let wrong: Vec<_> = (0..PODS).filter(|i| history.stampings(&format!("pod-{i}")) != 1).collect();
    assert!(wrong.is_empty(), "stamped more than once: {wrong:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_quick_updates_make_one_stamp_and_a_removed_stamp_is_written_anew() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let groundcrew = Groundcrew::builder(&cluster).start().await?;
    let pods = exempt(&cluster.client());
    let label =
        |i: usize| Patch::Merge(json!({"metadata": {"labels": {"n": i.to_string()}, "annotations": {"addtime": "x"}}}));
    // Until a write met an update, so that reading again after a conflict is tested every time.
    let (began, mut rounds) = (Instant::now(), 0);
    let (busy, stamped) = loop {
        rounds += 1;
        let busy = format!("busy-{rounds}");
        pods.create(&PostParams::default(), &pod(&busy)).await?;
        for i in 0..10 {
            pods.patch(&busy, &PatchParams::default(), &label(i)).await?;
        }
        let stamped = cluster.wait_for(&pods, &busy, "stamped", SOON, |p| stamp(p).is_some()).await?;
        let metrics = groundcrew.metrics().await?;
        if metrics.lines().any(|line| line.contains("feature=\"timestamp\"") && line.contains("outcome=\"conflict\"")) {
            break (busy, stamped);
        }
        anyhow::ensure!(began.elapsed() < 2 * SOON, "no conflict in {rounds} rounds:\n{metrics}");
    };
    expect_pod_writes(&cluster, rounds).await?;

    let remove = Patch::Merge(json!({"metadata": {"annotations": {"timestamp": null}}}));
    pods.patch(&busy, &PatchParams::default(), &remove).await?;
    let again = cluster.wait_for(&pods, &busy, "stamped again", SOON, |p| stamp(p).is_some()).await?;
    assert!(stamp(&again) >= stamp(&stamped));
    expect_pod_writes(&cluster, rounds + 1).await
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_created_while_groundcrew_was_away_are_stamped_when_it_is_back() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let mut groundcrew = Groundcrew::builder(&cluster).start().await?;
    registered(&cluster).await?;
    let port = groundcrew.webhook_addr().port();
    let (status, took) = groundcrew.terminate().await?;
    assert!(status.success() && took < Duration::from_secs(10), "{status} after {took:?}");

    let namespace = cluster.namespace("away").await?;
    let pods: Api<Pod> = namespace.api();
    let created = pods.create(&PostParams::default(), &asking("early")).await?;
    assert_eq!(stamp(&created), None, "nobody was there to stamp it");
    pods.create(&PostParams::default(), &asking("own").annotated("timestamp", "")).await?;
    let finished = pods.create(&PostParams::default(), &asking("finished")).await?;
    let succeeded = Patch::Merge(json!({"status": {"phase": "Succeeded"}}));
    pods.patch_status(&finished.name_any(), &PatchParams::default(), &succeeded).await?;
    let mut leaving = asking("leaving");
    leaving.metadata.finalizers = Some(vec!["groundcrew.io/test".into()]);
    pods.create(&PostParams::default(), &leaving).await?;
    pods.delete("leaving", &DeleteParams::default()).await?;

    let _back = Groundcrew::builder(&cluster).webhook_port(port).start().await?;
    cluster.wait_for(&pods, "early", "stamped", SOON, |p| stamp(p).is_some()).await?;
    // A later pod that is stamped shows that the queue has passed the others.
    let marker = exempt(&cluster.client());
    marker.create(&PostParams::default(), &asking("marker")).await?;
    cluster.wait_for(&marker, "marker", "stamped", SOON, |p| stamp(p).is_some()).await?;
    let stamps: BTreeMap<String, Option<String>> =
        pods.list(&ListParams::default()).await?.iter().map(|p| (p.name_any(), stamp(p).map(str::to_owned))).collect();
    assert_eq!(stamps["own"], Some(String::new()));
    assert_eq!((&stamps["finished"], &stamps["leaving"]), (&None, &None));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_converged_cluster_sees_no_writes_but_lease_renewals() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let groundcrew = Groundcrew::builder(&cluster).start().await?;
    registered(&cluster).await?;
    leading(&groundcrew).await?;
    let pods = exempt(&cluster.client());
    for i in 0..20 {
        pods.create(&PostParams::default(), &asking(&format!("p{i}"))).await?;
    }
    let all = |pods: &[&Pod]| pods.len() == 20 && pods.iter().all(|p| stamp(p).is_some());
    cluster.wait_for_list(&pods, watcher::Config::default(), "all stamped", SOON, all).await?;
    let before = cluster.rest().await?;
    // The quiet itself is what is observed: several renewals and a resync of everything that polls.
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert_eq!(our_writes(&cluster.audit_events().await?, before), Vec::<String>::new());
    Ok(())
}

/// Waits until the webhook configuration is there: before that, nothing is admitted by us.
async fn registered(cluster: &Cluster) -> anyhow::Result<()> {
    use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
    let api: Api<MutatingWebhookConfiguration> = Api::all(cluster.client());
    cluster.wait_for(&api, "groundcrew", "registered", SOON, |c| c.webhooks.iter().flatten().count() > 0).await?;
    cluster.webhook_answers().await
}

async fn leading(groundcrew: &Groundcrew) -> anyhow::Result<()> {
    groundcrew.wait_metric("groundcrew_leader 1", SOON).await
}
