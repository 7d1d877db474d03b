//! `spread` with the real controllers and scheduler: judged by where pods run and by the API server's audit log.
#![expect(clippy::expect_used, reason = "a test ends where its assumption fails")]

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context;
use groundcrew_testbed::{AuditEvent, Cluster, Groundcrew, KwokNode, Layer, TestNamespace, is_ready_and_free};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(60);
/// Fast enough to watch, slow enough that two moves cannot be one.
const QUICK: &str = "spread: {cooldown: 1s, fallbackAfter: 3s, returnAfter: 4s, maxMoves: 10, movesPerSecond: 20}\ncontroller: {resyncPeriod: 5s}\n";

/// Two nodes of each class, and groundcrew.
struct Scene {
    cluster: Cluster,
    groundcrew: Groundcrew,
    namespace: TestNamespace,
}

async fn scene(config: &str) -> anyhow::Result<Scene> {
    let cluster = Cluster::start(Layer::Controllers).await?;
    for (prefix, class) in [("spot", "spot"), ("od", "on-demand")] {
        for i in 0..2 {
            let node = KwokNode::new(&format!("{prefix}-{i}")).label("karpenter.sh/capacity-type", class);
            cluster.add_kwok_node(node).await?;
        }
    }
    let groundcrew = Groundcrew::builder(&cluster).config_yaml(config).start().await?;
    groundcrew.wait_metric("groundcrew_leader 1", SOON).await?;
    cluster.webhook_answers().await?;
    nodes_are_ready(&cluster, 4).await?;
    let namespace = cluster.namespace("spread").await?;
    Ok(Scene { cluster, groundcrew, namespace })
}

/// Before any pod is there: one that waits for its node looks as if spot had run dry.
async fn nodes_are_ready(cluster: &Cluster, count: usize) -> anyhow::Result<()> {
    let nodes: Api<Node> = Api::all(cluster.client());
    let ready = |nodes: &[&Node]| nodes.len() == count && nodes.iter().all(|n| is_ready_and_free(Some(*n)));
    cluster.wait_for_list(&nodes, watcher::Config::default(), "ready nodes", SOON, ready).await?;
    Ok(())
}

/// Replicas of this workload that came without us, each of which may cost a move: on a busy machine the API server
/// gives up on a webhook after its second.
fn missed(events: &[AuditEvent], app: &str) -> usize {
    events
        .iter()
        .filter(|e| e.verb == "create" && e.is_about("pods", "") && e.is_committed_write())
        .filter(|e| e.response_at("/metadata/labels/app").and_then(Value::as_str) == Some(app))
        .filter(|e| e.response_at("/metadata/ownerReferences").is_some())
        .filter(|e| e.response_annotation("groundcrew.io/spread-rank").is_none())
        .count()
}

fn metadata(name: &str, rule: &[(&str, &str)]) -> Value {
    let own = rule.iter().map(|(key, value)| (format!("spotalis.io/{key}"), json!(value)));
    let annotations: serde_json::Map<String, Value> =
        own.chain([("spotalis.io/enabled".to_owned(), json!("true"))]).collect();
    json!({"name": name, "annotations": annotations})
}

fn workload<K: serde::de::DeserializeOwned>(kind: &str, name: &str, replicas: u32, rule: &[(&str, &str)]) -> K {
    let labels = json!({"app": name});
    serde_json::from_value(json!({
        "apiVersion": "apps/v1", "kind": kind, "metadata": metadata(name, rule),
        "spec": {
            "replicas": replicas, "serviceName": name, "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"terminationGracePeriodSeconds": 1, "containers": [{"name": "main", "image": "none"}]},
            },
        },
    }))
    .expect("a workload")
}

fn budget(name: &str, app: &str, allowed: u32) -> PodDisruptionBudget {
    serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {"maxUnavailable": allowed, "selector": {"matchLabels": {"app": app}}},
    }))
    .expect("a budget")
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|s| s.conditions.iter().flatten());
    pod.metadata.deletion_timestamp.is_none()
        && conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True")
}

/// Ready replicas on spot and on on-demand, by the nodes they really run on; `None` while others are there.
fn split(pods: &[&Pod]) -> Option<(usize, usize)> {
    let pods: Vec<&&Pod> = pods.iter().filter(|p| p.metadata.owner_references.is_some()).collect();
    let on = |prefix: &str| {
        let on =
            |p: &&&&Pod| p.spec.as_ref().and_then(|s| s.node_name.as_deref()).is_some_and(|n| n.starts_with(prefix));
        pods.iter().filter(on).count()
    };
    pods.iter().all(|p| is_ready(p)).then(|| (on("spot-"), on("od-")))
}

impl Scene {
    fn deployments(&self) -> Api<Deployment> {
        self.namespace.api()
    }

    async fn create<K>(&self, object: &K) -> anyhow::Result<K>
    where
        K: kube::Resource<Scope = kube::core::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + serde::de::DeserializeOwned
            + serde::Serialize,
    {
        Ok(self.namespace.api::<K>().create(&PostParams::default(), object).await?)
    }

    async fn settles(&self, app: &str, wanted: (usize, usize)) -> anyhow::Result<()> {
        self.settles_within(app, wanted, SOON).await
    }

    async fn settles_within(&self, app: &str, wanted: (usize, usize), limit: Duration) -> anyhow::Result<()> {
        let pods: Api<Pod> = self.namespace.api();
        let config = watcher::Config::default().labels(&format!("app={app}"));
        let what = format!("{app} on {} spot and {} on-demand", wanted.0, wanted.1);
        self.cluster.wait_for_list(&pods, config, &what, limit, |pods| split(pods) == Some(wanted)).await?;
        Ok(())
    }

    async fn patch(&self, name: &str, patch: Value) -> anyhow::Result<()> {
        self.deployments().patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    async fn scale(&self, name: &str, replicas: u32) -> anyhow::Result<()> {
        self.patch(name, json!({"spec": {"replicas": replicas}})).await
    }

    /// Those in earnest, however they were answered.
    async fn evictions(&self) -> anyhow::Result<Vec<AuditEvent>> {
        let events = self.cluster.audit_events().await?;
        let is_eviction = |e: &AuditEvent| e.verb == "create" && e.is_about("pods", "eviction");
        Ok(events.into_iter().filter(|e| is_eviction(e) && !e.request_uri.contains("dryRun=")).collect())
    }

    async fn committed_evictions(&self) -> anyhow::Result<usize> {
        Ok(self.evictions().await?.iter().filter(|e| e.is_committed_write()).count())
    }

    async fn missed(&self, app: &str) -> anyhow::Result<usize> {
        Ok(missed(&self.cluster.audit_events().await?, app))
    }

    /// For each eviction of the Deployment's pods: when the Deployment was last read before it, and when it came. A
    /// move is decided after that read, and a cooldown counts from the decision: the eviction may take its time.
    async fn moves_of(&self, name: &str) -> anyhow::Result<Vec<(Timestamp, Timestamp)>> {
        let events = self.cluster.audit_events().await?;
        let is_read = |e: &&AuditEvent| {
            let ours = e.verb == "get" && e.is_about("deployments", "") && e.user_agent.starts_with("groundcrew/");
            ours && e.object_ref.as_ref().is_some_and(|o| o.name == name)
        };
        let reads: Vec<Timestamp> = events.iter().filter(is_read).map(|e| e.request_received_timestamp).collect();
        let pods = format!("{name}-");
        let is_move = |e: &&AuditEvent| {
            let evicted = e.is_about("pods", "eviction") && e.is_committed_write();
            evicted && e.object_ref.as_ref().is_some_and(|o| o.name.starts_with(&pods))
        };
        let timed = |e: &AuditEvent| -> anyhow::Result<(Timestamp, Timestamp)> {
            let at = e.request_received_timestamp;
            let read = reads.iter().copied().filter(|read| *read < at).max();
            Ok((read.context("evicted without a look")?, at))
        };
        events.iter().filter(is_move).map(timed).collect()
    }

    async fn reasons(&self) -> anyhow::Result<BTreeMap<String, usize>> {
        let events: Api<Event> = self.namespace.api();
        let mut reasons = BTreeMap::new();
        for event in events.list(&ListParams::default()).await? {
            if event.reporting_component.as_deref() == Some("groundcrew") {
                *reasons.entry(event.reason.unwrap_or_default()).or_default() += 1;
            }
        }
        Ok(reasons)
    }

    async fn wait_event(&self, about: &str, reason: &str) -> anyhow::Result<()> {
        let events: Api<Event> = self.namespace.api();
        let is = |e: &Event| e.reason.as_deref() == Some(reason) && e.involved_object.name.as_deref() == Some(about);
        let what = format!("{reason} about {about}");
        let said = |events: &[&Event]| events.iter().any(|e| is(e));
        self.cluster.wait_for_list(&events, watcher::Config::default(), &what, SOON, said).await?;
        Ok(())
    }

    async fn cordon(&self, on: bool) -> anyhow::Result<()> {
        let nodes: Api<Node> = Api::all(self.cluster.client());
        for name in ["spot-0", "spot-1"] {
            let patch = Patch::Merge(json!({"spec": {"unschedulable": on}}));
            nodes.patch(name, &PatchParams::default(), &patch).await?;
        }
        Ok(())
    }
}

#[path = "spread/answers.rs"]
mod answers;
#[path = "spread/faults.rs"]
mod faults;
#[path = "spread/gate.rs"]
mod gate;
#[path = "spread/many.rs"]
mod many;
#[path = "spread/scope.rs"]
mod scope;
#[path = "spread/still.rs"]
mod still;

#[tokio::test(flavor = "multi_thread")]
async fn creating_scaling_and_rolling_out_keep_the_split_without_one_eviction() -> anyhow::Result<()> {
    let scene = scene("").await?;
    let rule = [("spot-percentage", "60"), ("min-on-demand", "2")];
    let created = scene.create(&workload::<Deployment>("Deployment", "web", 10, &rule)).await?;
    scene.create(&workload::<Deployment>("Deployment", "plain", 3, &[])).await?;
    scene.settles("web", (6, 4)).await?;
    for (replicas, wanted) in [(8, (4, 4)), (7, (4, 3)), (5, (3, 2)), (3, (1, 2)), (2, (0, 2)), (1, (0, 1))] {
        scene.scale("web", replicas).await?;
        scene.settles("web", wanted).await.with_context(|| format!("scaled to {replicas}"))?;
    }
    for (replicas, wanted) in [(3, (1, 2)), (10, (6, 4)), (4, (2, 2)), (10, (6, 4))] {
        scene.scale("web", replicas).await?;
        scene.settles("web", wanted).await.with_context(|| format!("scaled to {replicas}"))?;
    }
    let before = scene.deployments().get("web").await?;
    assert_eq!(before.spec.as_ref().map(|s| &s.template), created.spec.as_ref().map(|s| &s.template));

    let stamp = json!({"spec": {"template": {"metadata": {"annotations": {"v": "2"}}}}});
    scene.patch("web", stamp).await?;
    let rolled = |d: &Deployment| {
        d.status.as_ref().is_some_and(|s| {
            s.updated_replicas == Some(10) && s.replicas == Some(10) && s.observed_generation == d.metadata.generation
        })
    };
    scene.cluster.wait_for(&scene.deployments(), "web", "rolled out", 2 * SOON, rolled).await?;
    scene.settles("web", (6, 4)).await?;
    a_dry_run_takes_no_place(&scene).await?;
    let missed = scene.missed("web").await?;
    let evictions = scene.committed_evictions().await?;
    assert!(evictions <= missed, "{evictions} evictions, {missed} pods not admitted by us");
    Ok(())
}

/// What the API server only asks about must not count for the pod that comes next.
async fn a_dry_run_takes_no_place(scene: &Scene) -> anyhow::Result<()> {
    scene.scale("web", 4).await?;
    scene.settles("web", (2, 2)).await?;
    let pods: Api<Pod> = scene.namespace.api();
    let listed = pods.list(&ListParams::default().labels("app=web")).await?;
    let mut one_more = listed.items.into_iter().next().context("no pod")?;
    one_more.metadata = kube::api::ObjectMeta {
        generate_name: one_more.metadata.generate_name,
        labels: one_more.metadata.labels,
        owner_references: one_more.metadata.owner_references,
        ..Default::default()
    };
    let spec = one_more.spec.as_mut().context("no spec")?;
    (spec.node_name, spec.node_selector) = (None, None);
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let asked = pods.create(&dry, &one_more).await?;
    let class = |pod: Pod| pod.spec.and_then(|s| s.node_selector).unwrap_or_default().into_values().next();
    assert_eq!(class(asked).as_deref(), Some("spot"), "a dry run is answered like any other review");
    scene.scale("web", 5).await?;
    scene.settles("web", (3, 2)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_percentage_moves_one_pod_at_a_time_and_ends_exact() -> anyhow::Result<()> {
    let scene = scene(QUICK).await?;
    scene.create(&budget("web", "web", 1)).await?;
    scene.create(&workload::<Deployment>("Deployment", "web", 5, &[("spot-percentage", "0")])).await?;
    scene.settles("web", (0, 5)).await?;
    let before = scene.deployments().get("web").await?.spec;
    // A stranger with the same label, but nobody's replica.
    let mut stranger = groundcrew_testbed::objects::pod("stranger");
    stranger.metadata.labels = Some([("app".to_owned(), "web".to_owned())].into());
    stranger.spec.as_mut().expect("a spec").node_name = Some("od-0".into());
    let stranger = scene.create(&stranger).await?;
    let changed = json!({"metadata": {"annotations": {"spotalis.io/spot-percentage": "100"}}});
    scene.patch("web", changed).await?;
    scene.settles_within("web", (5, 0), 3 * SOON).await?;
    assert_eq!(scene.deployments().get("web").await?.spec, before);

    let evictions = scene.evictions().await?;
    let committed: Vec<_> = evictions.iter().filter(|e| e.is_committed_write()).collect();
    let most = 5 + scene.missed("web").await?;
    assert!((5..=most).contains(&committed.len()), "one eviction per pod, not {}", committed.len());
    for pair in scene.moves_of("web").await?.windows(2) {
        let apart = pair[0].0.duration_until(pair[1].1);
        assert!(apart.as_millis() >= 1000, "{apart:?} between two moves");
    }
    for eviction in &committed {
        let body = eviction.request_object.as_ref().context("no body")?;
        let preconditions = &body["deleteOptions"]["preconditions"];
        assert!(preconditions["uid"].is_string() && preconditions["resourceVersion"].is_string(), "{body}");
    }
    let events: Api<Event> = scene.namespace.api();
    let both = |events: &[&Event]| {
        let said = |reason: &str| events.iter().any(|e| e.reason.as_deref() == Some(reason));
        said("PodRescheduled") && said("ReconciliationSuccess")
    };
    scene.cluster.wait_for_list(&events, watcher::Config::default(), "both events", SOON, both).await?;
    let now = scene.namespace.api::<Pod>().get("stranger").await?;
    assert_eq!((now.uid(), &now.metadata.deletion_timestamp), (stranger.uid(), &None), "not our pod");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stateful_set_is_placed_by_ordinal_and_moves_its_highest_ordinal_first() -> anyhow::Result<()> {
    let scene = scene(QUICK).await?;
    scene.create(&workload::<StatefulSet>("StatefulSet", "db", 4, &[("spot-percentage", "0")])).await?;
    scene.settles("db", (0, 4)).await?;
    let sets: Api<StatefulSet> = scene.namespace.api();
    let before = sets.get("db").await?;
    let changed = json!({"metadata": {"annotations": {"spotalis.io/spot-percentage": "50"}}});
    sets.patch("db", &PatchParams::default(), &Patch::Merge(changed)).await?;
    scene.settles_within("db", (2, 2), 2 * SOON).await?;
    let evicted: Vec<String> = scene
        .evictions()
        .await?
        .iter()
        .filter(|e| e.is_committed_write())
        .filter_map(|e| e.object_ref.as_ref().map(|o| o.name.clone()))
        .collect();
    let missed = scene.missed("db").await?;
    assert!(evicted == ["db-3", "db-1"] || (missed > 0 && evicted.len() <= 2 + missed), "{evicted:?}, {missed} missed");
    let after = sets.get("db").await?;
    assert_eq!(after.spec, before.spec, "nobody writes specs or templates");
    let revision = |set: &StatefulSet| set.status.as_ref().and_then(|s| s.update_revision.clone());
    assert_eq!(revision(&after), revision(&before), "no rolling restart");
    Ok(())
}
