//! When a workload is left alone, though its split is wrong.

use jiff::{SignedDuration, Timestamp, Zoned};
use k8s_openapi::api::core::v1::Namespace;

use super::*;

impl Scene {
    /// When evictions of this workload's pods were made.
    async fn moved_at(&self, name: &str) -> anyhow::Result<Vec<Timestamp>> {
        let of = |e: &&AuditEvent| e.object_ref.as_ref().is_some_and(|o| o.name.starts_with(&format!("{name}-")));
        let evictions = self.evictions().await?;
        let made = evictions.iter().filter(of).filter(|e| e.is_committed_write());
        Ok(made.map(|e| e.request_received_timestamp).collect())
    }

    async fn all_available(&self, name: &str, replicas: i32) -> anyhow::Result<()> {
        let available = |d: &Deployment| {
            d.status.as_ref().is_some_and(|s| {
                s.observed_generation == d.metadata.generation
                    && s.updated_replicas == Some(replicas)
                    && s.replicas == Some(replicas)
                    && s.available_replicas == Some(replicas)
            })
        };
        let what = format!("{replicas} available");
        self.cluster.wait_for(&self.deployments(), name, &what, 2 * SOON, available).await?;
        Ok(())
    }
}

/// The percentage changes in the same write as what makes the workload busy, so there is no moment in between.
fn upset_with(spec: Value) -> Value {
    json!({"metadata": {"annotations": {"spotalis.io/spot-percentage": "100"}}, "spec": spec})
}

#[tokio::test(flavor = "multi_thread")]
async fn no_pod_moves_while_its_workload_is_paused_scaled_or_rolled_out() -> anyhow::Result<()> {
    let scene = scene(QUICK).await?;
    for name in ["paused", "scaled", "rolled"] {
        let mut object: Deployment = workload("Deployment", name, 3, &[("spot-percentage", "0")]);
        // New pods count a little later, so that each step below begins before the last one has ended.
        object.spec.as_mut().expect("a spec").min_ready_seconds = Some(if name == "scaled" { 8 } else { 2 });
        scene.create(&object).await?;
    }
    for name in ["paused", "scaled", "rolled"] {
        scene.all_available(name, 3).await?;
    }
    scene.patch("paused", upset_with(json!({"paused": true}))).await?;
    let stamp = json!({"metadata": {"annotations": {"v": "2"}}});
    scene.patch("rolled", upset_with(json!({"template": stamp}))).await?;
    for replicas in 4..=7 {
        scene.patch("scaled", upset_with(json!({"replicas": replicas}))).await?;
        let (pods, config) = (scene.namespace.api::<Pod>(), watcher::Config::default().labels("app=scaled"));
        let all = |pods: &[&Pod]| pods.len() == replicas;
        scene.cluster.wait_for_list(&pods, config, &format!("{replicas} pods"), SOON, all).await?;
        // As an autoscaler would, again and again.
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    let scaled = Timestamp::now();
    assert_eq!(scene.moved_at("scaled").await?, [], "moved while it was scaled");
    // New pods went to spot; the three old ones are moved once all have settled.
    scene.settles_within("scaled", (7, 0), 3 * SOON).await?;
    let (most, moved) = (3 + scene.missed("scaled").await?, scene.moved_at("scaled").await?);
    assert!((3..=most).contains(&moved.len()) && moved.iter().all(|at| *at > scaled), "{moved:?} {scaled}");

    scene.all_available("rolled", 3).await?;
    scene.settles("rolled", (3, 0)).await?;
    let moved = scene.moved_at("rolled").await?;
    assert!(moved.len() <= scene.missed("rolled").await?, "a rollout needs no moves: {moved:?}");

    assert_eq!(scene.moved_at("paused").await?, [], "moved while paused");
    scene.patch("paused", json!({"spec": {"paused": false}})).await?;
    scene.settles_within("paused", (3, 0), 2 * SOON).await?;
    let (most, moved) = (3 + scene.missed("paused").await?, scene.moved_at("paused").await?);
    assert!((3..=most).contains(&moved.len()), "{moved:?}");
    Ok(())
}

/// The next minute that begins in at least `ahead`.
fn minute_in(ahead: SignedDuration) -> anyhow::Result<Zoned> {
    let soon = Timestamp::now().checked_add(ahead)?.to_zoned(jiff::tz::TimeZone::UTC);
    Ok(soon
        .checked_add(SignedDuration::from_mins(1))?
        .round(jiff::ZonedRound::new().smallest(jiff::Unit::Minute).mode(jiff::RoundMode::Trunc))?)
}

/// Cooldown of ten seconds, fallback after a minute, and a window: with no configuration at all.
#[tokio::test(flavor = "multi_thread")]
async fn with_the_defaults_moves_keep_their_distance_and_their_windows() -> anyhow::Result<()> {
    let scene = scene("").await?;
    let fast = json!({"metadata": {"labels": {"disk": "fast"}}});
    for node in ["od-0", "od-1"] {
        let nodes: Api<Node> = Api::all(scene.cluster.client());
        nodes.patch(node, &PatchParams::default(), &Patch::Merge(&fast)).await?;
    }
    // Whoever has no window of its own keeps to that of the namespace, which is known before anything is wrong.
    let opens = minute_in(SignedDuration::from_secs(45))?;
    let window = |schedule: String| {
        let lasting = "30m";
        json!({"spotalis.io/disruption-schedule": schedule, "spotalis.io/disruption-duration": lasting})
    };
    let around = window(format!("{} {} * * *", opens.minute(), opens.hour()));
    let around = Patch::Merge(json!({"metadata": {"annotations": around}}));
    let namespaces: Api<Namespace> = Api::all(scene.cluster.client());
    namespaces.patch(scene.namespace.name(), &PatchParams::default(), &around).await?;
    // What asks for spot here waits for ever.
    let mut nowhere: Deployment = workload("Deployment", "nowhere", 2, &[("spot-percentage", "50")]);
    let template = nowhere.spec.as_mut().and_then(|s| s.template.spec.as_mut()).expect("a template");
    template.node_selector = Some([("disk".to_owned(), "fast".to_owned())].into());
    let asked = Timestamp::now();
    scene.create(&nowhere).await?;
    for name in ["window", "cooled"] {
        scene.create(&workload::<Deployment>("Deployment", name, 2, &[("spot-percentage", "0")])).await?;
    }
    scene.settles("window", (0, 2)).await?;
    scene.settles("cooled", (0, 2)).await?;

    scene.patch("cooled", json!({"metadata": {"annotations": window("* * * * *".to_owned())}})).await?;
    scene.patch("cooled", upset_with(json!({}))).await?;
    scene.patch("window", json!({"metadata": {"annotations": {"spotalis.io/spot-percentage": "50"}}})).await?;

    scene.settles_within("cooled", (2, 0), 2 * SOON).await?;
    let moves = scene.moves_of("cooled").await?;
    let apart = moves.windows(2).map(|pair| pair[0].0.duration_until(pair[1].1)).collect::<Vec<_>>();
    let expected = (1..=1 + scene.missed("cooled").await?).contains(&apart.len());
    assert!(expected && apart.iter().all(|apart| apart.as_secs() >= 10), "{apart:?}");

    // Nothing in the cluster changes then: it wakes by itself.
    scene.settles_within("window", (1, 1), 3 * SOON).await?;
    let moved = scene.moved_at("window").await?;
    let expected = (1..=1 + scene.missed("window").await?).contains(&moved.len());
    assert!(expected && moved.iter().all(|at| *at >= opens.timestamp()), "{moved:?}, it opens at {opens}");

    scene.settles_within("nowhere", (0, 2), 2 * SOON).await?;
    let moved = scene.moved_at("nowhere").await?;
    assert!(moved.len() == 1 && asked.duration_until(moved[0]).as_secs() >= 60, "{moved:?} {asked}");
    Ok(())
}
