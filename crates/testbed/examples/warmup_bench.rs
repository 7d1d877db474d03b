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

use anyhow::Context;
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

/// Pods that come in groups, and how long after its last response each gate was open.
struct Wave {
    pods: usize,
    group: usize,
    /// From one group to the next, besides the time it takes to create them.
    pause: Duration,
    warmup: [(&'static str, &'static str); 2],
}

impl Wave {
    async fn run(&self, pods: &Api<Pod>) -> anyhow::Result<Vec<Duration>> {
        let servers = join_all((0..self.pods).map(|_| Server::start())).await;
        let servers = servers.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
        let opened = tokio::spawn(opened(pods.clone(), self.pods));
        for (i, group) in servers.chunks(self.group).enumerate() {
            let made = group.iter().enumerate().map(|(j, server)| {
                let name = format!("p{}", i * self.group + j);
                async move { up(pods, asking(&name, server, &self.warmup)).await }
            });
            join_all(made).await.into_iter().collect::<anyhow::Result<()>>()?;
            tokio::time::sleep(self.pause).await;
        }
        let opened = tokio::time::timeout(Duration::from_secs(240), opened).await???;
        let delay = |(i, server): (usize, &Server)| Some(*opened.get(&format!("p{i}"))? - server.hits().last()?.at);
        let mut delays: Vec<Duration> = servers.iter().enumerate().filter_map(delay).collect();
        delays.sort_unstable();
        Ok(delays)
    }
}

/// When the gate of each of so many pods was seen open.
async fn opened(pods: Api<Pod>, count: usize) -> anyhow::Result<HashMap<String, Instant>> {
    let mut seen: HashMap<String, Instant> = HashMap::new();
    let mut events = watcher(pods, watcher::Config::default()).applied_objects().boxed();
    while seen.len() < count {
        let pod = events.try_next().await?.context("the watch ended")?;
        if is_open(&pod) {
            seen.entry(pod.name_any()).or_insert_with(Instant::now);
        }
    }
    Ok(seen)
}

fn tell(delays: &[Duration]) {
    let at = |q: f64| delays[((delays.len() - 1) as f64 * q) as usize];
    println!(
        "gate open after the last response, as a watcher sees it: p50 {:?} p99 {:?} max {:?}",
        at(0.5),
        at(0.99),
        at(1.0)
    );
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

    let few = Wave {
        pods: 200,
        group: 1,
        pause: Duration::from_millis(100),
        warmup: [("requests", "10"), ("duration", "1s")],
    };
    let namespace = cluster.namespace("few").await?;
    println!("one pod after the other, about ten a second:");
    tell(&few.run(&namespace.api()).await?);

    let namespace = cluster.namespace("many").await?;
    let many = Wave { pods: PODS, group: 25, pause: Duration::ZERO, warmup: [("requests", "30"), ("duration", "30s")] };
    let (started, mut most) = (Instant::now(), (0, 0));
    let pods = namespace.api();
    let mut run = std::pin::pin!(many.run(&pods));
    let delays = loop {
        match tokio::time::timeout(Duration::from_millis(200), &mut run).await {
            Ok(delays) => break delays?,
            Err(_) => most = most.max(resident(pid)),
        }
    };
    println!("{PODS} pods at once: all open after {:?}", started.elapsed());
    tell(&delays);
    println!("agent with {PODS} warm-ups: {} KiB resident at most, {} of them its own", most.0, most.1);
    Ok(())
}
