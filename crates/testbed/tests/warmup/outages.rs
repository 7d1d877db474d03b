//! The API server is away, busy or slow while a pod is warmed: no request is repeated, and the gate opens afterwards.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use groundcrew_testbed::{Cluster, FaultyApi, Groundcrew, Layer, Proxy};
use http::{Method, StatusCode};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams};

use crate::support::{NODE, QUICK, SOON, Server, add_node, agent, asking, is_open, message, reason, up};

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_that_is_away_costs_no_request_and_no_warm_up() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    add_node(&cluster, NODE).await?;
    let operator = Groundcrew::builder(&cluster).config_yaml(QUICK).start().await?;
    operator.wait_metric("groundcrew_leader 1", SOON).await?;
    let _agent = agent(&cluster, "agent").await?;
    let namespace = cluster.namespace("away").await?;
    let pods: Api<Pod> = namespace.api();
    let server = Server::start().await?;
    up(&pods, asking("web", &server, &[("requests", "10"), ("duration", "5s")])).await?;
    server.wait_hits(2).await?;

    cluster.stop_apiserver().await?;
    server.wait_hits(10).await?;
    // Longer than an agent may be silent: the leader must not hold the outage against it.
    tokio::time::sleep(Duration::from_secs(17)).await;
    cluster.start_apiserver().await?;

    let warm = cluster.wait_for(&pods, "web", "gate open", SOON, is_open).await?;
    assert_eq!((reason(&warm), server.hits().len()), ("WarmupComplete", 10), "{}", message(&warm));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_writes_are_repeated_and_requests_are_not() -> anyhow::Result<()> {
    const REFUSALS: [u16; 6] = [409, 429, 500, 503, 504, 409];
    let cluster = Cluster::start(Layer::Api).await?;
    add_node(&cluster, NODE).await?;
    let api = FaultyApi::start(&cluster).await?;
    let agent = Groundcrew::builder(&cluster)
        .name("agent")
        .agent(NODE)
        .config_yaml(QUICK)
        .kubeconfig(&api.kubeconfig(&cluster)?)
        .start()
        .await?;
    let namespace = cluster.namespace("busy").await?;
    let pods: Api<Pod> = namespace.api();
    let cancelled = format!("kube_booster_warmup_total{{namespace=\"{}\",result=\"cancelled\"}}", namespace.name());

    // Every write of the status is refused in every way before it is taken: the start, and the end.
    let writes = AtomicUsize::new(0);
    api.refuse(move |method, uri| {
        let is_write = *method == Method::PATCH && uri.path().ends_with("/status");
        let turn = writes.fetch_add(usize::from(is_write), Ordering::SeqCst) % (REFUSALS.len() + 1);
        let refusal = REFUSALS.get(turn).filter(|_| is_write);
        refusal.map(|code| StatusCode::from_u16(*code).unwrap())
    });
    let server = Server::start().await?;
    up(&pods, asking("web", &server, &[("requests", "10"), ("duration", "1s")])).await?;
    let warm = cluster.wait_for(&pods, "web", "gate open", SOON, is_open).await?;
    assert_eq!((reason(&warm), server.hits().len()), ("WarmupComplete", 10), "{}", message(&warm));
    assert!(api.refused() >= 2 * REFUSALS.len(), "{}", api.refused());

    // A third of everything fails, watches and leases included.
    let calls = AtomicUsize::new(0);
    api.refuse(move |_, _| {
        let unlucky = calls.fetch_add(1, Ordering::SeqCst).is_multiple_of(3);
        unlucky.then_some(StatusCode::SERVICE_UNAVAILABLE)
    });
    let server = Server::start().await?;
    up(&pods, asking("lucky", &server, &[("requests", "10"), ("duration", "1s")])).await?;
    let warm = cluster.wait_for(&pods, "lucky", "gate open", SOON, is_open).await?;
    assert_eq!((reason(&warm), server.hits().len()), ("WarmupComplete", 10), "{}", message(&warm));

    // A WarmupConfig that cannot be read yet: that somebody waits is on the pod, however often the write is refused.
    let writes = AtomicUsize::new(0);
    api.refuse(move |method, uri| {
        let is_write = *method == Method::PATCH && uri.path().ends_with("/status");
        let refused = uri.path().contains("/warmupconfigs/") || (is_write && writes.fetch_add(1, Ordering::SeqCst) < 3);
        refused.then_some(StatusCode::SERVICE_UNAVAILABLE)
    });
    up(&pods, asking("config", &server, &[("config", "nowhere")])).await?;
    cluster.wait_for(&pods, "config", "queued", SOON, |p| reason(p) == "WarmupQueued").await?;
    api.heal();
    let opened = cluster.wait_for(&pods, "config", "gate open", SOON, is_open).await?;
    assert!(message(&opened).contains("WarmupConfig \"nowhere\""), "{}", message(&opened));

    // An agent that has lost its lease may not write, but it must not send to the address of a pod that is gone.
    let server = Server::start().await?;
    up(&pods, asking("leaving", &server, &[("requests", "600"), ("duration", "60s")])).await?;
    server.wait_hits(1).await?;
    api.refuse(|method, uri| {
        (*method == Method::PATCH && uri.path().contains("/leases/")).then_some(StatusCode::SERVICE_UNAVAILABLE)
    });
    agent.wait_metric("groundcrew_agent_lease 0", SOON).await?;
    pods.delete("leaving", &DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() }).await?;
    agent.wait_metric(&format!("{cancelled} 1"), SOON).await?;
    let sent = server.hits().len();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(server.hits().len(), sent);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_hears_and_says_nothing_for_a_while_goes_on_where_it_was() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    add_node(&cluster, NODE).await?;
    let proxy = Proxy::to(cluster.api_addr()).await?;
    let _agent =
        Groundcrew::builder(&cluster).name("agent").agent(NODE).config_yaml(QUICK).through(&proxy).start().await?;
    let namespace = cluster.namespace("slow").await?;
    let pods: Api<Pod> = namespace.api();
    let server = Server::start().await?;
    up(&pods, asking("web", &server, &[("requests", "10"), ("duration", "3s")])).await?;
    server.wait_hits(2).await?;
    // Its last write gets no answer, is given up after five seconds, and may land all the same.
    proxy.freeze();
    server.wait_hits(10).await?;
    let late = Server::start().await?;
    up(&pods, asking("late", &late, &[("requests", "4"), ("duration", "1s")])).await?;
    tokio::time::sleep(Duration::from_secs(7)).await;
    assert_eq!(late.hits().len(), 0, "nobody can have told it");
    proxy.thaw();
    for (name, server, requests) in [("web", &server, 10), ("late", &late, 4)] {
        let warm = cluster.wait_for(&pods, name, "gate open", SOON, is_open).await?;
        assert_eq!((reason(&warm), server.hits().len()), ("WarmupComplete", requests), "{}", message(&warm));
    }
    Ok(())
}
