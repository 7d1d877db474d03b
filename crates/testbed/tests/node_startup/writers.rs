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
/// Each writer's, over all nodes; a few more than fifty, since some meet a newer version and do not land.
const PER_SECOND: u64 = 58;
const AT_ONCE: usize = 8;
const QUARREL: Duration = Duration::from_secs(12);

/// The nodes as a controller's cache shows them.
type View = Arc<Mutex<BTreeMap<String, Node>>>;

async fn follow(api: Api<Node>, view: View) -> anyhow::Result<()> {
    let mut events = std::pin::pin!(watcher(api, watcher::Config::default()));
    while let Some(event) = events.try_next().await? {
        if let Event::InitApply(node) | Event::Apply(node) = event {
            view.lock().expect("unpoisoned").insert(node.name_any(), node);
        }
    }
    anyhow::bail!("the watch of the hostile writers ended")
}

/// Adds its own taint, or removes it, by replacing the whole list of the version it has seen, as most controllers do.
async fn toggle(api: &Api<Node>, node: Option<Node>, key: &str) -> anyhow::Result<bool> {
    let Some(mut node) = node else { return Ok(false) };
    let (name, version) = (node.name_any(), node.resource_version());
    let list = node.spec.get_or_insert_default().taints.get_or_insert_default();
    match list.iter().position(|t| t.key == key) {
        Some(at) => drop(list.remove(at)),
        None => list.insert(0, parse(json!({"key": key, "value": "x", "effect": "PreferNoSchedule"}))),
    }
    let taints = json!({"metadata": {"resourceVersion": version}, "spec": {"taints": list}});
    match api.patch(&name, &PatchParams::default(), &Patch::Merge(taints)).await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(other) => Err(other.into()),
    }
}

/// How often it wrote per second.
async fn quarrel(cluster: &Cluster, view: View, writer: usize) -> anyhow::Result<f64> {
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
            let node = view.lock().expect("unpoisoned").get(&format!("n{:02}", round % NODES)).cloned();
            toggle(&api, node, &key)
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
    let following = tokio::spawn(follow(Api::all(cluster.connect().await?), Arc::clone(&view)));
    let quarrels = try_join_all((0..WRITERS).map(|writer| quarrel(&cluster, Arc::clone(&view), writer)));
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
    let releases = judge::releases(&cluster.audit_events().await?)?;
    assert_eq!(releases.len(), NODES);
    println!("hostile writers: {rates:.0?} writes per second beside {NODES} releases");
    Ok(())
}
