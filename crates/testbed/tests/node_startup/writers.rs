//! Other writers of the same list: none of their taints is lost, none comes back.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::future::try_join_all;
use groundcrew_testbed::{AuditEvent, Cluster, Groundcrew, Layer};
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};

use crate::support::*;

const WRITERS: usize = 4;
const NODES: usize = 8;
/// Each writer's, over all nodes.
const PER_SECOND: u64 = 50;

/// Adds and removes its own taint by read and replace, as most controllers do; how often it wrote.
async fn quarrel(cluster: &Cluster, writer: usize, until: tokio::time::Instant) -> anyhow::Result<usize> {
    let api: Api<Node> = Api::all(cluster.connect().await?);
    let key = format!("example.com/writer-{writer}");
    let mut ticks = tokio::time::interval(Duration::from_millis(1000 / PER_SECOND));
    let mut written = 0;
    for round in 0.. {
        ticks.tick().await;
        if tokio::time::Instant::now() > until {
            break;
        }
        let mut node = api.get(&format!("n{}", (round + writer) % NODES)).await?;
        let (name, version) = (node.name_any(), node.resource_version());
        let list = node.spec.get_or_insert_default().taints.get_or_insert_default();
        match list.iter().position(|t| t.key == key) {
            Some(at) => drop(list.remove(at)),
            None => list.insert(0, parse(json!({"key": key, "value": "x", "effect": "NoSchedule"}))),
        }
        let taints = json!({"metadata": {"resourceVersion": version}, "spec": {"taints": list}});
        match api.patch(&name, &PatchParams::default(), &Patch::Merge(taints)).await {
            Ok(_) => written += 1,
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(other) => return Err(other.into()),
        }
    }
    Ok(written)
}

fn list(event: &AuditEvent) -> Vec<Value> {
    event.response_at("/spec/taints").and_then(Value::as_array).cloned().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn four_hostile_writers_lose_nothing_and_get_nothing_back() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let _groundcrew = Groundcrew::builder(&cluster).config_yaml(&config("engine: none")).start().await?;
    let set = init_set(&cluster, "agent", "init", json!({})).await?;
    let mut pods = Vec::new();
    for i in 0..NODES {
        held_node(&cluster, &format!("n{i}")).await?;
        pods.push(init_pod(&cluster, &set, &format!("n{i}")).await?);
    }
    let until = tokio::time::Instant::now() + Duration::from_secs(12);
    let quarrels = try_join_all((0..WRITERS).map(|writer| quarrel(&cluster, writer, until)));
    let release = async {
        for pod in &pods {
            tokio::time::sleep(Duration::from_millis(700)).await;
            make_ready(&cluster, pod).await?;
        }
        anyhow::Ok(())
    };
    let (written, _) = tokio::try_join!(quarrels, release)?;
    for i in 0..NODES {
        wait_released(&cluster, &format!("n{i}")).await?;
    }
    let events = cluster.audit_events().await?;
    let mut writes: Vec<&AuditEvent> =
        events.iter().filter(|e| e.is_committed_write() && e.is_about("nodes", "") && e.verb != "delete").collect();
    let version = |e: &AuditEvent| {
        e.response_at("/metadata/resourceVersion").and_then(Value::as_str).and_then(|v| v.parse::<u64>().ok())
    };
    writes.sort_by_key(|e| version(e));
    let mut last: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    let mut ours = BTreeSet::new();
    for event in writes {
        let Some(node) = event.object_key() else { continue };
        let now = list(event);
        if event.user_agent.starts_with("groundcrew/") {
            let mut expected = last.get(&node).cloned().unwrap_or_default();
            expected.retain(|t| t["key"] != KEY);
            assert_eq!(now, expected, "our write of {node} changed more than our taint");
            assert!(ours.insert(node.clone()), "{node} was released twice");
        }
        last.insert(node, now);
    }
    assert_eq!(ours.len(), NODES);
    println!("hostile writers: {written:?} writes beside {NODES} releases");
    Ok(())
}
