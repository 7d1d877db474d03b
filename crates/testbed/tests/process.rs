//! Life and death of the process: probes, SIGTERM, and what it leaves in the cluster.

use std::time::Duration;

use groundcrew_testbed::{Cluster, Groundcrew, Layer, fetch};
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::Api;
use tokio::time::Instant;

const SOON: Duration = Duration::from_secs(30);

async fn status(groundcrew: &Groundcrew, path: &str) -> anyhow::Result<u16> {
    Ok(fetch::get(groundcrew.health_addr(), path).await?.0)
}

#[tokio::test(flavor = "multi_thread")]
async fn alive_without_an_api_server_and_ready_again_when_it_is_back() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let groundcrew = Groundcrew::builder(&cluster).start().await?;
    cluster.webhook_answers().await?;
    cluster.stop_apiserver().await?;
    assert_eq!(status(&groundcrew, "/livez").await?, 200);
    assert_eq!(status(&groundcrew, "/healthz").await?, 200);
    cluster.start_apiserver().await?;
    cluster.webhook_answers().await?;
    groundcrew.wait_metric("groundcrew_leader 1", SOON).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_makes_it_unready_first_gives_the_lease_back_and_ends_in_time() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let mut attempts = 0;
    // Unready for two seconds: a machine that stands still may miss that once.
    while !ends_in_order(&cluster).await? {
        attempts += 1;
        assert!(attempts < 3, "it closed its sockets while still ready");
    }

    let leases: Api<Lease> = Api::namespaced(cluster.client(), "groundcrew-system");
    let holder = leases.get("groundcrew").await?.spec.and_then(|spec| spec.holder_identity);
    assert_eq!(holder.unwrap_or_default(), "");
    let successor = Groundcrew::builder(&cluster).name("successor").start().await?;
    let began = Instant::now();
    successor.wait_metric("groundcrew_leader 1", SOON).await?;
    // A lease that was not given back would keep it for 15 s.
    assert!(began.elapsed() < Duration::from_secs(8), "takeover took {:?}", began.elapsed());
    Ok(())
}

/// Whether the probe said "not ready" before the sockets closed.
async fn ends_in_order(cluster: &Cluster) -> anyhow::Result<bool> {
    // Takes connections and never answers: spans that nobody wants must not keep the process.
    let collector = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let endpoint = format!("http://{}", collector.local_addr()?);
    let builder = Groundcrew::builder(cluster).env("GROUNDCREW_TRACING__OTLP_ENDPOINT", endpoint);
    let mut groundcrew = builder.start().await?;
    groundcrew.wait_metric("groundcrew_leader 1", SOON).await?;
    let (health, began) = (groundcrew.health_addr(), Instant::now());
    let unready = tokio::spawn(async move {
        // Until the sockets close the probe must say what is happening.
        loop {
            match fetch::get(health, "/readyz").await {
                Ok((503, _)) => return true,
                Ok(_) if began.elapsed() < SOON => tokio::time::sleep(Duration::from_millis(20)).await,
                _ => return false,
            }
        }
    });
    let (status, took) = groundcrew.terminate().await?;
    assert!(status.success() && took < Duration::from_secs(10), "{status} after {took:?}");
    Ok(unready.await?)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_somebody_deleted_is_made_anew() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let groundcrew = Groundcrew::builder(&cluster).start().await?;
    groundcrew.wait_metric("groundcrew_leader 1", SOON).await?;
    let leases: Api<Lease> = Api::namespaced(cluster.client(), "groundcrew-system");
    let old = leases.get("groundcrew").await?;
    leases.delete("groundcrew", &Default::default()).await?;
    let held = |lease: &Lease| {
        let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref());
        lease.metadata.uid != old.metadata.uid && holder.is_some_and(|holder| !holder.is_empty())
    };
    cluster.wait_for(&leases, "groundcrew", "held again", SOON, held).await?;
    groundcrew.wait_metric("groundcrew_leader 1", SOON).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn spans_reach_a_collector() -> anyhow::Result<()> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    let collector = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let endpoint = format!("http://{}", collector.local_addr()?);
    let cluster = Cluster::start(Layer::Api).await?;
    let groundcrew = Groundcrew::builder(&cluster).env("GROUNDCREW_TRACING__OTLP_ENDPOINT", endpoint).start().await?;
    cluster.webhook_answers().await?;
    let received = tokio::time::timeout(2 * SOON, async {
        loop {
            let (mut socket, _) = collector.accept().await?;
            let mut text = String::new();
            let mut bytes = vec![0; 64 * 1024];
            let complete = |text: &str| text.contains("/v1/traces") && text.contains("review");
            // Head and body need not come at once; whoever says no more waits for an answer.
            while let Ok(Ok(n @ 1..)) = tokio::time::timeout(Duration::from_secs(5), socket.read(&mut bytes)).await {
                text += &String::from_utf8_lossy(bytes.get(..n).unwrap_or_default());
                if complete(&text) {
                    break;
                }
            }
            let _ = socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await;
            if complete(&text) {
                return anyhow::Ok(());
            }
        }
    });
    received.await??;
    assert!(!groundcrew.log()?.contains("panicked"));
    Ok(())
}
