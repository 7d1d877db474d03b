//! The webhook server as its callers meet it: the real API server, and those that mean no good.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use futures::{StreamExt, stream};
use groundcrew_testbed::objects::{PodExt, pod, stamped_as};
use groundcrew_testbed::{Cluster, Groundcrew, Layer};
use k8s_openapi::api::core::v1::{EnvVar, Pod};
use kube::ResourceExt;
use kube::api::{Api, PostParams};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

const SOON: Duration = Duration::from_secs(30);

mod anyone {
    //! A TLS client that asks nobody's name: who floods a server does not check certificates.
    use rustls::DigitallySignedStruct;
    use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
    use rustls::pki_types::{CertificateDer, ServerName, UnixTime};

    #[derive(Debug)]
    pub struct Trusting;

    impl ServerCertVerifier for Trusting {
        fn verify_server_cert(
            &self,
            _: &CertificateDer<'_>,
            _: &[CertificateDer<'_>],
            _: &ServerName<'_>,
            _: &[u8],
            _: UnixTime,
        ) -> Result<ServerCertVerified, rustls::Error> {
            Ok(ServerCertVerified::assertion())
        }
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            Ok(HandshakeSignatureValid::assertion())
        }
        fn verify_tls13_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            Ok(HandshakeSignatureValid::assertion())
        }
        fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
            rustls::crypto::ring::default_provider().signature_verification_algorithms.supported_schemes()
        }
    }
}

fn connector() -> anyhow::Result<TlsConnector> {
    let config = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(anyone::Trusting))
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

/// Tries twice: the server gives a handshake five seconds, and a machine may stand still for as long.
async fn connect(tls: &TlsConnector, address: SocketAddr) -> anyhow::Result<TlsStream<TcpStream>> {
    match timeout(SOON, handshake(tls, address)).await? {
        Ok(stream) => Ok(stream),
        Err(_) => timeout(SOON, handshake(tls, address)).await?,
    }
}

async fn handshake(tls: &TlsConnector, address: SocketAddr) -> anyhow::Result<TlsStream<TcpStream>> {
    let socket = TcpStream::connect(address).await?;
    Ok(tls.connect(ServerName::from(address.ip()), socket).await?)
}

/// Sends raw bytes of HTTP/1.1 and returns the status line.
async fn exchange(stream: &mut TlsStream<TcpStream>, head: &str, body: &[u8]) -> anyhow::Result<String> {
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body).await?;
    stream.flush().await?;
    status_line(stream).await
}

async fn status_line(stream: &mut TlsStream<TcpStream>) -> anyhow::Result<String> {
    let mut answer = [0; 256];
    let n = timeout(SOON, stream.read(&mut answer)).await.context("no answer")??;
    let text = String::from_utf8_lossy(answer.get(..n).unwrap_or_default()).into_owned();
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

/// The most memory the process ever had, in KiB.
fn peak_memory(groundcrew: &Groundcrew) -> anyhow::Result<u64> {
    let pid = groundcrew.pid().context("not running")?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).context("no VmHWM")?;
    Ok(line.split_whitespace().nth(1).context("no number")?.parse()?)
}

/// Half a request, then silence until the server has had enough.
async fn write_slowly(tls: &TlsConnector, address: SocketAddr, half_sent: &Semaphore) -> anyhow::Result<()> {
    let head =
        "POST /mutate-v1-pod HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n{";
    let mut stream = connect(tls, address).await?;
    stream.write_all(head.as_bytes()).await?;
    stream.flush().await?;
    half_sent.add_permits(1);
    stream.read_to_end(&mut Vec::new()).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_and_slow_writers_do_not_stop_a_review() -> anyhow::Result<()> {
    const IDLE: usize = 5000;
    /// More than there are places, and each comes again.
    const SLOW: u32 = 700;
    let cluster = Cluster::start(Layer::Api).await?;
    let groundcrew = Groundcrew::builder(&cluster).start().await?;
    cluster.webhook_answers().await?;
    let (tls, address) = (connector()?, groundcrew.webhook_addr());

    // Whoever opens so many sees the oldest closed: each handshake must work, none need live on.
    let idle: Vec<_> = stream::iter(0..IDLE).map(|_| connect(&tls, address)).buffer_unordered(32).collect().await;
    let refused = idle.iter().filter(|c| c.is_err()).count();
    let half_sent = Arc::new(Semaphore::new(0));
    let mut writers = JoinSet::new();
    for _ in 0..SLOW {
        let (tls, half_sent) = (tls.clone(), Arc::clone(&half_sent));
        writers.spawn(async move {
            loop {
                let _ = write_slowly(&tls, address, &half_sent).await;
                // Else the flood would be one of handshakes, which cost this machine as much as the server.
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        });
    }
    let _ = timeout(SOON, half_sent.acquire_many(SLOW)).await.context("the slow writers did not get in")??;
    let namespace = cluster.namespace("flood").await?;
    let pods: Api<Pod> = namespace.api();
    for i in 0..20 {
        let asking = pod(&format!("p{i}")).annotated("addtime", "");
        assert!(stamped_as(&pods, &asking).await?, "pod {i} was not stamped by admission");
    }
    assert_eq!(refused, 0, "{refused} of {IDLE} handshakes failed");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gigabyte_gets_413_with_flat_memory_and_three_megabytes_work() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let groundcrew = Groundcrew::builder(&cluster).start().await?;
    let (tls, address) = (connector()?, groundcrew.webhook_addr());
    let before = peak_memory(&groundcrew)?;

    let announced = "POST /mutate-v1-pod HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1073741824\r\n\r\n";
    assert_eq!(exchange(&mut connect(&tls, address).await?, announced, b"{").await?, "HTTP/1.1 413 Payload Too Large");

    // The same without a length: it ends when the server has had enough, with an answer or a closed connection.
    let mut stream = connect(&tls, address).await?;
    let head = "POST /mutate-v1-pod HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await?;
    let chunk = [format!("{:x}\r\n", 1 << 20).into_bytes(), vec![b' '; 1 << 20], b"\r\n".to_vec()].concat();
    let mut sent = 0;
    while sent < 1024 && timeout(SOON, stream.write_all(&chunk)).await?.is_ok() {
        sent += 1;
    }
    assert!(sent < 64, "{sent} MiB were taken");
    let grown = peak_memory(&groundcrew)? - before;
    assert!(grown < 64 * 1024, "memory grew by {grown} KiB");

    let review = serde_json::json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "1", "kind": {"group": "", "version": "v1", "kind": "Pod"}, "namespace": "a", "operation": "CREATE",
            "object": pod("big").annotated("addtime", "").annotated("big", &"x".repeat(3 << 20)),
        },
    })
    .to_string();
    let head = format!(
        "POST /mutate-v1-pod HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        review.len()
    );
    let mut status = String::new();
    // A body gets five seconds, and a machine may stand still for as long.
    for _ in 0..3 {
        let answer = exchange(&mut connect(&tls, address).await?, &head, review.as_bytes()).await;
        status = answer.unwrap_or_else(|error| error.to_string());
        if status == "HTTP/1.1 200 OK" {
            break;
        }
    }
    assert_eq!(status, "HTTP/1.1 200 OK");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_largest_pod_the_api_server_stores_is_stamped_in_its_review() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let _groundcrew = Groundcrew::builder(&cluster).start().await?;
    cluster.webhook_answers().await?;
    let namespace = cluster.namespace("big").await?;
    let pods: Api<Pod> = namespace.api();
    let mut big = pod("big").annotated("addtime", "");
    let filler = EnvVar { name: "FILLER".into(), value: Some("x".repeat(1_200_000)), value_from: None };
    for container in big.spec.iter_mut().flat_map(|spec| &mut spec.containers) {
        container.env = Some(vec![filler.clone()]);
    }
    assert!(stamped_as(&pods, &big).await?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hung_groundcrew_costs_a_pod_one_second_and_nothing_else() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let groundcrew = Groundcrew::builder(&cluster).start().await?;
    cluster.webhook_answers().await?;
    let namespace = cluster.namespace("hung").await?;
    let pods: Api<Pod> = namespace.api();
    groundcrew.pause()?;
    let mut took: Vec<Duration> = Vec::new();
    // The quickest counts: a machine may stand still once, not each time.
    while took.iter().all(|took| *took >= Duration::from_millis(1600)) {
        assert!(took.len() < 5, "the creations took {took:?}");
        let began = tokio::time::Instant::now();
        let asking = pod(&format!("a{}", took.len())).annotated("addtime", "");
        let created = pods.create(&PostParams::default(), &asking).await?;
        took.push(began.elapsed());
        assert!(!created.annotations().contains_key("timestamp"));
    }
    groundcrew.resume()?;
    Ok(())
}
