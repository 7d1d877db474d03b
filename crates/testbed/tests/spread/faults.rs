//! When a move is forbidden, futile or impossible.

use groundcrew_testbed::objects::{PodExt, pod};
use k8s_openapi::api::core::v1::ConfigMap;

use super::*;

const QUIET: Duration = Duration::from_secs(12);

#[tokio::test(flavor = "multi_thread")]
async fn a_budget_that_allows_nothing_stops_its_own_workload_only() -> anyhow::Result<()> {
    let scene = scene(QUICK).await?;
    scene.create(&budget("none", "held", 0)).await?;
    for name in ["one", "two"] {
        scene.create(&budget(name, "twice", 1)).await?;
    }
    for name in ["held", "twice", "free"] {
        scene.create(&workload::<Deployment>("Deployment", name, 2, &[("spot-percentage", "0")])).await?;
        scene.settles(name, (0, 2)).await?;
    }
    for name in ["held", "twice", "free"] {
        scene.patch(name, json!({"metadata": {"annotations": {"spotalis.io/spot-percentage": "50"}}})).await?;
    }
    scene.settles("free", (1, 1)).await?;
    tokio::time::sleep(QUIET).await;
    let names: Vec<String> =
        scene.evictions().await?.iter().filter_map(|e| e.object_ref.as_ref().map(|o| o.name.clone())).collect();
    let most = 1 + scene.missed("free").await?;
    let enough = (1..=most).contains(&names.len());
    assert!(names.iter().all(|n| n.starts_with("free-")) && enough, "{names:?}");
    assert_eq!(scene.reasons().await?.get("RebalanceBlocked"), Some(&2), "one event per workload");
    let looks = "spotalis_reconciliations_total{workload_type=\"deployment\",result=\"blocked_by_pdb\"}";
    let looks =
        scene.groundcrew.metrics().await?.lines().find_map(|l| l.strip_prefix(looks)?.trim().parse::<u32>().ok());
    assert!(looks.is_some_and(|looks| looks <= 20), "looked at {looks:?} times, which is no backoff");
    // Opened later, it goes on from there.
    let open = Patch::Merge(json!({"spec": {"maxUnavailable": 1}}));
    scene.namespace.api::<PodDisruptionBudget>().patch("none", &PatchParams::default(), &open).await?;
    scene.settles("held", (1, 1)).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_spot_nodes_pods_go_to_on_demand_and_return_when_there_are_some() -> anyhow::Result<()> {
    let scene = scene(QUICK).await?;
    scene.cordon(true).await?;
    scene.create(&workload::<Deployment>("Deployment", "web", 4, &[("spot-percentage", "50")])).await?;
    scene.settles("web", (0, 4)).await.context("fallback")?;
    scene.wait_event("web", "SpotFallback").await?;
    // One pod tries first: no more than that may go to spot until it runs.
    let memory: Api<ConfigMap> = Api::namespaced(scene.cluster.client(), "groundcrew-system");
    let tries = |map: &ConfigMap| {
        let text = map.data.iter().flat_map(|data| data.values()).next();
        text.is_some_and(|text| text.contains("\"trial\":true") && text.contains("\"cap\":1"))
    };
    // Watched from before there are nodes: the trial is soon over.
    let trial = scene.cluster.wait_for(&memory, "groundcrew-spread", "one pod tries", SOON, tries);
    tokio::try_join!(trial, scene.cordon(false))?;
    scene.settles("web", (2, 2)).await.context("return")?;
    let (most, moves) = (4 + scene.missed("web").await?, scene.committed_evictions().await?);
    assert!((4..=most).contains(&moves), "two that waited in vain, two that return, not {moves}");
    what_runs_on_spot_stays_there(&scene).await
}

/// Three of four keep running on cordoned nodes while the fourth falls back: none of them has to pay for it.
async fn what_runs_on_spot_stays_there(scene: &Scene) -> anyhow::Result<()> {
    scene.create(&workload::<Deployment>("Deployment", "kept", 4, &[("spot-percentage", "100")])).await?;
    scene.settles("kept", (4, 0)).await?;
    let pods: Api<Pod> = scene.namespace.api();
    let mut before = pods.list(&ListParams::default().labels("app=kept")).await?.items;
    scene.cordon(true).await?;
    let lost = before.pop().context("no pod")?;
    pods.delete(&lost.name_any(), &kube::api::DeleteParams::default()).await?;
    scene.settles("kept", (3, 1)).await.context("one falls back")?;
    scene.cordon(false).await?;
    scene.settles("kept", (4, 0)).await.context("it returns")?;
    for pod in before {
        let now = pods.get(&pod.name_any()).await.context("a pod that ran on spot was moved")?;
        assert_eq!(now.uid(), pod.uid());
    }
    Ok(())
}

/// Waits until the API server, which hears of it a moment later, creates pods without asking; by dry runs.
async fn webhook_is_away(cluster: &Cluster) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(cluster.client(), "default");
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    let asking = pod("away").annotated("addtime", "");
    let began = tokio::time::Instant::now();
    loop {
        let asked = tokio::time::Instant::now();
        let stamped = pods.create(&dry_run, &asking).await?.annotations().contains_key("timestamp");
        // After a second the API server may have given up on one that is there.
        if !stamped && asked.elapsed() < Duration::from_secs(1) {
            return Ok(());
        }
        anyhow::ensure!(began.elapsed() < SOON, "the API server goes on asking the webhook");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_webhook_is_away_at_most_two_evictions_are_futile() -> anyhow::Result<()> {
    use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
    let mut scene = scene(QUICK).await?;
    let pinned = |mut d: Deployment| {
        // Without admission replacements land on on-demand again.
        let spec = d.spec.as_mut().and_then(|s| s.template.spec.as_mut()).expect("a template");
        spec.node_selector = Some([("karpenter.sh/capacity-type".to_owned(), "on-demand".to_owned())].into());
        d
    };
    scene.create(&pinned(workload("Deployment", "web", 4, &[("spot-percentage", "0")]))).await?;
    scene.settles("web", (0, 4)).await?;
    let hooks: Api<MutatingWebhookConfiguration> = Api::all(scene.cluster.client());
    hooks.delete("groundcrew", &kube::api::DeleteParams::default()).await?;
    webhook_is_away(&scene.cluster).await?;
    scene.patch("web", json!({"metadata": {"annotations": {"spotalis.io/spot-percentage": "100"}}})).await?;
    scene.wait_event("web", "RebalanceBlocked").await?;
    // A new leader knows that it was tried.
    scene.groundcrew.terminate().await?;
    scene.groundcrew = Groundcrew::builder(&scene.cluster).name("next").config_yaml(QUICK).start().await?;
    scene.groundcrew.wait_metric("groundcrew_leader 1", SOON).await?;
    tokio::time::sleep(QUIET).await;
    assert_eq!(scene.committed_evictions().await?, 2);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn observing_writes_nothing() -> anyhow::Result<()> {
    let scene = scene("spread: {mode: observe, cooldown: 1s}\n").await?;
    scene.create(&workload::<Deployment>("Deployment", "web", 4, &[("spot-percentage", "100")])).await?;
    let pods: Api<Pod> = scene.namespace.api();
    scene.create(&workload::<Deployment>("Deployment", "wrong", 1, &[("spot-percentage", "150")])).await?;
    let ready = |pods: &[&Pod]| pods.len() == 5 && pods.iter().all(|p| is_ready(p));
    scene.cluster.wait_for_list(&pods, watcher::Config::default(), "five ready pods", SOON, ready).await?;
    tokio::time::sleep(QUIET).await;
    let events = scene.cluster.audit_events().await?;
    let ours: Vec<_> = events
        .iter()
        .filter(|e| e.user_agent.starts_with("groundcrew/") && e.is_committed_write())
        .filter(|e| {
            let there = e.object_ref.as_ref().is_some_and(|o| o.namespace == scene.namespace.name());
            let about_them = e.is_about("pods", "") || e.is_about("pods", "eviction") || e.is_about("events", "");
            let remembers = e.object_ref.as_ref().is_some_and(|o| o.name == "groundcrew-spread");
            (there && about_them) || remembers
        })
        .map(|e| &e.request_uri)
        .collect();
    assert!(ours.is_empty(), "{ours:?}");
    for pod in pods.list(&ListParams::default()).await? {
        assert_eq!(pod.spec.and_then(|s| s.node_selector), None);
    }
    // It says what it would have done.
    let log = scene.groundcrew.log()?;
    assert!(log.contains("would evict web-"));
    assert!(log.lines().any(|line| line.contains("ConfigurationError") && line.contains("150")), "{log}");
    Ok(())
}
