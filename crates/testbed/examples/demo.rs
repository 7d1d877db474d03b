//! `make demo`: a real control plane, groundcrew beside it, and a pod that gets its stamp.
#![allow(clippy::print_stdout, reason = "a demo talks")]

use std::time::Duration;

use groundcrew_testbed::objects::{PodExt, pod};
use groundcrew_testbed::{Cluster, Groundcrew, Layer};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::json;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    println!("1. starting etcd and kube-apiserver");
    let cluster = Cluster::start(Layer::Api).await?;
    println!("2. starting groundcrew: certificates, webhook registration, leader election");
    let mut groundcrew = Groundcrew::builder(&cluster).start().await?;
    cluster.webhook_answers().await?;

    let namespace = cluster.namespace("demo").await?;
    let pods: Api<Pod> = namespace.api();
    println!("3. creating a pod annotated addtime");
    let created = pods.create(&PostParams::default(), &pod("new").annotated("addtime", "")).await?;
    show("   stamped in its admission patch:", &created);

    println!("4. annotating a pod that is already there");
    pods.create(&PostParams::default(), &pod("old")).await?;
    let ask = Patch::Merge(json!({"metadata": {"annotations": {"addtime": "please"}}}));
    pods.patch("old", &PatchParams::default(), &ask).await?;
    let stamped = |pod: &Pod| pod.annotations().contains_key("timestamp");
    let old = cluster.wait_for(&pods, "old", "stamped", Duration::from_secs(30), stamped).await?;
    show("   stamped by the controller:", &old);

    println!("5. stopping groundcrew: a pod is created as if it had never been there");
    let (_, took) = groundcrew.terminate().await?;
    println!("   stopped in {:.1} s, lease given back", took.as_secs_f64());
    let free = pods.create(&PostParams::default(), &pod("free").annotated("addtime", "")).await?;
    println!("   created: {}, not stamped, not blocked", free.name_any());
    Ok(())
}

fn show(what: &str, pod: &Pod) {
    let none = String::from("nothing");
    println!("{what} {} timestamp={}", pod.name_any(), pod.annotations().get("timestamp").unwrap_or(&none));
}
