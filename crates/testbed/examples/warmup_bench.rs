//! How fast a gate opens, how many pods one agent warms at once, and what that costs it.
//!
//! ```console
//! $ cargo build --release --workspace && cargo run --release -p groundcrew-testbed --example warmup_bench
//! ```

#![allow(
    clippy::print_stdout,
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "a program to read numbers from"
)]

use std::collections::HashMap;
use std::time::{Duration, Instant};

use futures::future::join_all;
use futures::{StreamExt, TryStreamExt};
use groundcrew_testbed::{Cluster, Groundcrew, Layer};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::Api;
use kube::runtime::{WatchStreamExt, watcher};

#[path = "../tests/warmup/support.rs"]
#[allow(dead_code, reason = "shared with the tests")]
mod support;

use support::{NODE, Server, add_node, asking, is_open, up};

const PODS: usize = 500;

/// Resident memory in KiB, and how much of it is not the program's own file, which all processes of a node share.
fn resident(pid: u32) -> (u64, u64) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let of = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0)
    };
    (of("VmRSS:"), of("RssAnon:"))
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    add_node(&cluster, NODE).await?;
    let limits = format!("warmup: {{maxConcurrent: {PODS}, maxRps: 2000}}\n");
    let agent = Groundcrew::builder(&cluster).name("agent").agent(NODE).config_yaml(&limits).start().await?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let pid = agent.pid().unwrap_or(0);
    let (all, own) = resident(pid);
    println!("agent idle: {all} KiB resident, {own} of them its own");

    let namespace = cluster.namespace("bench").await?;
    let pods: Api<Pod> = namespace.api();
    let servers = join_all((0..PODS).map(|_| Server::start())).await.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    let opened = tokio::spawn({
        let pods = pods.clone();
        async move {
            let mut seen: HashMap<String, Instant> = HashMap::new();
            let mut events = watcher(pods, watcher::Config::default()).applied_objects().boxed();
            while let Some(pod) = events.try_next().await? {
                if is_open(&pod) {
                    seen.entry(pod.name_any()).or_insert_with(Instant::now);
                }
                if seen.len() == PODS {
                    break;
                }
            }
            anyhow::Ok(seen)
        }
    });
    let started = Instant::now();
    for (i, chunk) in servers.chunks(25).enumerate() {
        let made = chunk.iter().enumerate().map(|(j, server)| {
            let (pods, name) = (pods.clone(), format!("p{}", i * 25 + j));
            async move { up(&pods, asking(&name, server, &[("requests", "30"), ("duration", "30s")])).await }
        });
        join_all(made).await.into_iter().collect::<anyhow::Result<()>>()?;
    }
    let mut most = (0, 0);
    while !opened.is_finished() && started.elapsed() < Duration::from_secs(240) {
        most = most.max(resident(pid));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let opened = opened.await??;
    let mut delays: Vec<Duration> = servers
        .iter()
        .enumerate()
        .filter_map(|(i, server)| Some(*opened.get(&format!("p{i}"))? - server.hits().last()?.at))
        .collect();
    delays.sort_unstable();
    let at = |q: f64| delays[((delays.len() - 1) as f64 * q) as usize];
    println!("{PODS} pods at once: {} open after {:?}", opened.len(), started.elapsed());
    println!(
        "gate open after the last response, as a watcher sees it: p50 {:?} p99 {:?} max {:?}",
        at(0.5),
        at(0.99),
        at(1.0)
    );
    println!("agent with {PODS} warm-ups: {} KiB resident at most, {} of them its own", most.0, most.1);
    Ok(())
}
