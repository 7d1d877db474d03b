//! Agents that die, roll and are late; bursts and storms.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures::future::join_all;
use groundcrew_testbed::{Cluster, Groundcrew, Layer};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use serde_json::json;

use crate::support::{NODE, QUICK, SOON, Server, add_node, agent, asking, gated, is_open, message, reason, up};

#[tokio::test(flavor = "multi_thread")]
async fn the_leader_opens_the_gates_of_an_agent_that_is_gone() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    add_node(&cluster, NODE).await?;
    let _operator = Groundcrew::builder(&cluster).config_yaml(QUICK).start().await?;
    let mut agent = agent(&cluster, "agent").await?;
    let namespace = cluster.namespace("gone").await?;
    let pods: Api<Pod> = namespace.api();
    let server = Server::start().await?;
    up(&pods, asking("first", &server, &[("requests", "1"), ("duration", "1s")])).await?;
    cluster.wait_for(&pods, "first", "warm", SOON, is_open).await?;
    up(&pods, asking("under-way", &server, &[("requests", "60"), ("duration", "60s")])).await?;
    server.wait_hits(3).await?;
    agent.kill().await?;
    let died = std::time::Instant::now();
    up(&pods, asking("later", &server, &[("failure-policy", "closed")])).await?;
    for name in ["under-way", "later"] {
        let opened = cluster.wait_for(&pods, name, "gate open", SOON, is_open).await?;
        assert_eq!(reason(&opened), "AgentUnavailable");
        assert!(message(&opened).contains(" of node node-a has not been heard of since "), "{}", message(&opened));
    }
    assert!(died.elapsed() < Duration::from_secs(40), "{:?}", died.elapsed());
    // The agent comes back and finds everything done.
    let before = server.hits().len();
    let leases: Api<Lease> = Api::namespaced(cluster.client(), "groundcrew-system");
    let holder = |lease: &Lease| lease.spec.as_ref().and_then(|spec| spec.holder_identity.clone());
    let lease = "groundcrew-agent.node-a";
    let dead = holder(&leases.get(lease).await?);
    let _back = crate::support::agent(&cluster, "back").await?;
    cluster.wait_for(&leases, lease, "held by the new agent", SOON, |lease| holder(lease) != dead).await?;
    // The leader hears of it by its watch.
    tokio::time::sleep(Duration::from_secs(1)).await;
    up(&pods, asking("marker", &server, &[("requests", "1"), ("duration", "1s")])).await?;
    cluster.wait_for(&pods, "marker", "warm", SOON, |p| reason(p) == "WarmupComplete").await?;
    assert_eq!(server.hits().len(), before + 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_killed_at_each_request_costs_one_repetition() -> anyhow::Result<()> {
    const N: usize = 8;
    let cluster = Cluster::start(Layer::Api).await?;
    add_node(&cluster, NODE).await?;
    let mut first = agent(&cluster, "first").await?;
    let namespace = cluster.namespace("killed").await?;
    let pods: Api<Pod> = namespace.api();
    // One pod per index: its server leaves request i without an answer until the agent has died in it.
    let dead = Arc::new(AtomicBool::new(false));
    let mut servers = Vec::new();
    for index in 0..N {
        let (dead, seen) = (Arc::clone(&dead), AtomicUsize::new(0));
        let server = Server::telling(move |_, _| {
            let held = seen.fetch_add(1, Ordering::SeqCst) == index && !dead.load(Ordering::SeqCst);
            (!held).then(|| (200, String::new()).into())
        });
        let server = server.await?;
        let settings = [("requests", "8"), ("mode", "asap"), ("duration", "5m")];
        up(&pods, asking(&format!("p{index}"), &server, &settings)).await?;
        servers.push(server);
    }
    for (index, server) in servers.iter().enumerate() {
        server.wait_hits(index + 1).await?;
    }
    first.kill().await?;
    dead.store(true, Ordering::SeqCst);
    let before: Vec<usize> = servers.iter().map(|server| server.hits().len()).collect();
    let _second = agent(&cluster, "second").await?;
    let open = |pods: &[&Pod]| pods.len() == N && pods.iter().all(|p| is_open(p));
    cluster.wait_for_list(&pods, watcher::Config::default(), "all open", 2 * SOON, open).await?;
    for (index, server) in servers.iter().enumerate() {
        let total = server.hits().len();
        assert_eq!(total, before[index] + N, "killed in request {index}: {before:?}");
        assert!(total <= 2 * N, "killed in request {index}: {total}");
        assert_eq!(reason(&pods.get(&format!("p{index}")).await?), "WarmupComplete");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolled_agent_hands_over_and_no_request_is_repeated() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    add_node(&cluster, NODE).await?;
    let mut old = agent(&cluster, "old").await?;
    let namespace = cluster.namespace("roll").await?;
    let pods: Api<Pod> = namespace.api();
    let server = Server::start().await?;
    up(&pods, asking("web", &server, &[("requests", "40"), ("duration", "8s")])).await?;
    server.wait_hits(5).await?;
    // Both are there for a while, as in a surge.
    let _new = agent(&cluster, "new").await?;
    server.wait_hits(10).await?;
    let (status, took) = old.terminate().await?;
    assert!(status.success() && took < Duration::from_secs(10), "{status} {took:?}");
    let warm = cluster.wait_for(&pods, "web", "gate open", SOON, is_open).await?;
    assert_eq!((reason(&warm), server.hits().len()), ("WarmupComplete", 40), "{}", message(&warm));
    assert!(message(&warm).contains("/40 requests succeeded"), "{}", message(&warm));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_pods_at_once_are_all_warmed_ten_at_a_time() -> anyhow::Result<()> {
    const PODS: usize = 200;
    let cluster = Cluster::start(Layer::Api).await?;
    add_node(&cluster, NODE).await?;
    let _agent = agent(&cluster, "agent").await?;
    let (big, small) = (cluster.namespace("big").await?, cluster.namespace("small").await?);
    let pods: Api<Pod> = big.api();
    let servers = join_all((0..PODS).map(|_| Server::start())).await.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    let settings = [("requests", "5"), ("duration", "1s")];
    for (i, chunk) in servers.chunks(20).enumerate() {
        let created = chunk.iter().enumerate().map(|(j, server)| {
            let name = format!("p{}", i * 20 + j);
            let pods = pods.clone();
            async move { up(&pods, asking(&name, server, &settings)).await }
        });
        join_all(created).await.into_iter().collect::<anyhow::Result<()>>()?;
    }
    // A pod of another namespace is not behind them all.
    let other = Server::start().await?;
    up(&small.api(), asking("quick", &other, &settings)).await?;
    let started = std::time::Instant::now();
    cluster.wait_for(&small.api::<Pod>(), "quick", "warm", SOON, |p| reason(p) == "WarmupComplete").await?;
    let took = started.elapsed();
    // A machine that stalls does so for the others, too: had it been behind them, at most ten would be left.
    let cold = pods.list(&ListParams::default()).await?.iter().filter(|p| reason(p) != "WarmupComplete").count();
    assert!(took < Duration::from_secs(8) || cold > 20, "{took:?}, {cold} of the others not warm");

    let warm = |pods: &[&Pod]| pods.len() == PODS && pods.iter().all(|p| reason(p) == "WarmupComplete");
    cluster.wait_for_list(&pods, watcher::Config::default(), "all warm", 3 * SOON, warm).await?;
    assert!(servers.iter().all(|server| server.hits().len() == 5));
    let spans: Vec<_> = servers.iter().map(|s| (s.hits()[0].at, s.hits()[4].at)).collect();
    let at_once = spans.iter().map(|(at, _)| spans.iter().filter(|(from, to)| from <= at && at <= to).count()).max();
    assert!(at_once <= Some(10), "{at_once:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_of_other_writers_repeats_no_request_and_a_replaced_pod_gets_only_its_own() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    add_node(&cluster, NODE).await?;
    let _agent = agent(&cluster, "agent").await?;
    let namespace = cluster.namespace("storm").await?;
    let pods: Api<Pod> = namespace.api();
    let server = Server::start().await?;
    let storm = tokio::spawn({
        let pods = pods.clone();
        async move {
            for i in 0_u32.. {
                let label = Patch::Merge(json!({"metadata": {"labels": {"storm": i.to_string()}}}));
                let _ = pods.patch("web", &PatchParams::default(), &label).await;
            }
        }
    });
    up(&pods, asking("web", &server, &[("requests", "20"), ("duration", "2s")])).await?;
    let warm = cluster.wait_for(&pods, "web", "gate open", SOON, is_open).await?;
    storm.abort();
    assert_eq!((reason(&warm), server.hits().len()), ("WarmupComplete", 20));

    // Deleted: nothing more is sent. Replaced under its name and address: only what the new pod asks for is.
    let place = Server::start().await?;
    let to = |path: &str| place.hits().iter().filter(|hit| hit.head.starts_with(&format!("get {path} "))).count();
    up(&pods, asking("leaving", &place, &[("requests", "600"), ("duration", "60s"), ("endpoint", "/old")])).await?;
    place.wait_hits(5).await?;
    pods.delete("leaving", &DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() }).await?;
    up(&pods, asking("leaving", &place, &[("requests", "20"), ("duration", "2s"), ("endpoint", "/new")])).await?;
    let warm = cluster.wait_for(&pods, "leaving", "gate open", SOON, is_open).await?;
    let old = to("/old");
    assert_eq!((reason(&warm), to("/new")), ("WarmupComplete", 20));
    let marker = Server::start().await?;
    up(&pods, asking("marker", &marker, &[("requests", "2"), ("duration", "2s")])).await?;
    cluster.wait_for(&pods, "marker", "gate open", SOON, is_open).await?;
    assert_eq!((to("/old"), to("/new")), (old, 20), "nothing came in the meantime");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn turned_off_or_removed_it_leaves_no_gate_shut() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    add_node(&cluster, NODE).await?;
    let namespace = cluster.namespace("last").await?;
    let pods: Api<Pod> = namespace.api();
    let server = Server::start().await?;

    // The agents are gone with the feature; their leases tell the leader that there may be gates of ours.
    let (_, _) = agent(&cluster, "agent").await?.terminate().await?;
    up(&pods, asking("off-ready", &server, &[("failure-policy", "closed")])).await?;
    pods.create(&PostParams::default(), &gated(asking("off-pending", &server, &[]))).await?;
    let _off = Groundcrew::builder(&cluster).config_yaml("warmup: {enabled: false}\n").start().await?;
    for name in ["off-ready", "off-pending"] {
        let opened = cluster.wait_for(&pods, name, "gate open", SOON, is_open).await?;
        assert_eq!(reason(&opened), "AgentUnavailable");
        assert_eq!(message(&opened), "warm-up is turned off; ready without warm-up");
    }
    let leases: Api<Lease> = Api::namespaced(cluster.client(), "groundcrew-system");
    cluster.wait_gone(&leases, "groundcrew-agent.node-a", 2 * SOON).await?;

    // It has done its part: a gate that comes later is somebody else's.
    up(&pods, asking("ready", &server, &[])).await?;
    pods.create(&PostParams::default(), &gated(asking("pending", &server, &[]))).await?;
    let mut command = Groundcrew::builder(&cluster).command("open-gates").spawn().await?;
    assert!(command.wait_exit(SOON).await?.success(), "{}", command.log()?);
    assert!(command.log()?.contains("2 gates opened"), "{}", command.log()?);
    for name in ["ready", "pending"] {
        assert_eq!(reason(&pods.get(name).await?), "AgentUnavailable");
    }
    Ok(())
}
