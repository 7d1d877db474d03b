//! Other writers of the same list: none of their taints is lost, none comes back.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::try_join_all;
use futures::{StreamExt, TryStreamExt, stream};
use groundcrew_testbed::{Cluster, Groundcrew, KwokNode, Layer};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::runtime::watcher::{self, Event, watcher};
use serde_json::json;

use crate::judge;
use crate::support::*;

const WRITERS: usize = 4;
const NODES: usize = 32;
/// Each writer's, over all nodes; a few more than fifty, since some meet another list than the one seen.
const PER_SECOND: u64 = 58;
const AT_ONCE: usize = 24;
const QUARREL: Duration = Duration::from_secs(12);

/// The nodes as a controller's cache shows them, its own writes included.
#[derive(Clone, Default)]
struct View(Arc<Mutex<BTreeMap<String, Node>>>);

impl View {
    fn see(&self, node: Node) {
        let version = |node: &Node| node.resource_version().and_then(|v| v.parse::<u64>().ok());
        let mut nodes = self.0.lock().expect("unpoisoned");
        let newer = nodes.get(&node.name_any()).is_none_or(|known| version(known) < version(&node));
        if newer {
            nodes.insert(node.name_any(), node);
        }
    }

    fn get(&self, name: &str) -> Option<Node> {
        self.0.lock().expect("unpoisoned").get(name).cloned()
    }

    async fn follow(self, api: Api<Node>) -> anyhow::Result<()> {
        let mut events = std::pin::pin!(watcher(api, watcher::Config::default()));
        while let Some(event) = events.try_next().await? {
            if let Event::InitApply(node) | Event::Apply(node) = event {
                self.see(node);
            }
        }
        anyhow::bail!("the watch of the hostile writers ended")
    }
}

/// Puts its own taint first, or takes it away from where it was last seen; whether that landed.
async fn toggle(api: &Api<Node>, view: &View, name: &str, key: &str) -> anyhow::Result<bool> {
    let Some(node) = view.get(name) else { return Ok(false) };
    let own = json!({"key": key, "value": "x", "effect": "PreferNoSchedule"});
    let patch = match taints(&node).iter().position(|t| t.key == key) {
        Some(at) => {
            let path = format!("/spec/taints/{at}");
            json!([{"op": "test", "path": path, "value": own}, {"op": "remove", "path": path}])
        }
        None if taints(&node).is_empty() => json!([{"op": "add", "path": "/spec/taints", "value": [own]}]),
        None => json!([{"op": "add", "path": "/spec/taints/0", "value": own}]),
    };
    match api.patch(name, &PatchParams::default(), &Patch::<()>::Json(parse(patch))).await {
        Ok(node) => {
            view.see(node);
            Ok(true)
        }
        Err(kube::Error::Api(status)) if matches!(status.code, 409 | 422) => Ok(false),
        Err(other) => Err(other.into()),
    }
}

/// How often it wrote per second.
async fn quarrel(cluster: &Cluster, view: &View, writer: usize) -> anyhow::Result<f64> {
    let api: Api<Node> = Api::all(cluster.connect().await?);
    let key = format!("example.com/writer-{writer}");
    let began = tokio::time::Instant::now();
    let ticks = tokio::time::interval(Duration::from_micros(1_000_000 / PER_SECOND));
    let rounds = stream::unfold((writer * NODES / WRITERS, ticks), |(round, mut ticks)| async move {
        ticks.tick().await;
        Some((round, (round + 1, ticks)))
    });
    let landed = rounds
        .take_until(tokio::time::sleep(QUARREL))
        .map(|round| {
            let (api, key) = (&api, &key);
            async move { toggle(api, view, &format!("n{:02}", round % NODES), key).await }
        })
        .buffer_unordered(AT_ONCE)
        .try_fold(0.0, async |sum, landed| Ok(sum + f64::from(u8::from(landed))));
    Ok(landed.await? / began.elapsed().as_secs_f64())
}

#[tokio::test(flavor = "multi_thread")]
async fn four_hostile_writers_lose_nothing_and_get_nothing_back() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Controllers).await?;
    let yaml = config("engine: none\nreadyBy: annotation");
    let _groundcrew = Groundcrew::builder(&cluster).config_yaml(&yaml).start().await?;
    for i in 0..NODES {
        cluster.add_kwok_node(KwokNode::new(&format!("n{i:02}")).taint(KEY, "wait", "NoSchedule")).await?;
    }
    init_set(&cluster, "agent", "init", json!({})).await?;
    let one_each = |pods: &[&Pod]| pods.len() == NODES;
    cluster.wait_for_list(&system_pods(&cluster), watcher::Config::default(), "init pods", LONG, one_each).await?;

    let view = View::default();
    let following = tokio::spawn(view.clone().follow(Api::all(cluster.connect().await?)));
    let quarrels = try_join_all((0..WRITERS).map(|writer| quarrel(&cluster, &view, writer)));
    let release = async {
        for pod in system_pods(&cluster).list(&ListParams::default()).await? {
            tokio::time::sleep(QUARREL / (2 * NODES as u32)).await;
            let ready = Patch::Merge(json!({"metadata": {"annotations": {"startup.k8s.io/ready": "true"}}}));
            system_pods(&cluster).patch(&pod.name_any(), &PatchParams::default(), &ready).await?;
        }
        anyhow::Ok(())
    };
    let (rates, ()) = tokio::try_join!(quarrels, release)?;
    following.abort();
    for i in 0..NODES {
        wait_released(&cluster, &format!("n{i:02}")).await?;
    }
    let events = cluster.audit_events().await?;
    let releases = judge::releases(&events)?;
    assert_eq!(judge::let_go(&events, &releases).len(), NODES);
    println!("hostile writers: {rates:.0?} writes per second beside {NODES} releases");
    Ok(())
}
