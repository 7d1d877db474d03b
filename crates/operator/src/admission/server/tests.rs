use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::routing::{get, post};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use prometheus_client::registry::Registry;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream as ClientStream;

use super::*;
use crate::admission::certs::mint::Minted;
use crate::admission::certs::testing::{ca, eventually, leaf, pair};
use crate::admission::tls::certificates;

mod crowd;

type Io = ClientStream<TcpStream>;

/// A running server, and what a test needs to disturb it.
struct Scene {
    address: SocketAddr,
    ca: Minted,
    serving: Arc<ServingCert>,
    metrics: Metrics,
    shutdown: CancellationToken,
    done: tokio::task::JoinHandle<Result<(), rustls::Error>>,
    /// `/slow` answers when it gets a permit.
    gate: Arc<Semaphore>,
    waiting: Arc<AtomicUsize>,
}

/// Too long to be met by accident on a busy machine; a test of one of them sets [`BRIEF`].
fn limits() -> Limits {
    Limits {
        connections: 8,
        handshake: Duration::from_secs(30),
        header: Duration::from_secs(30),
        idle: Duration::from_secs(30),
        linger: Duration::from_millis(200),
        drain: Duration::from_secs(30),
        streams: 16,
    }
}

const BRIEF: Duration = Duration::from_millis(300);
/// Longer than a stall, shorter than the limits above: what ends by itself only then has failed.
const FAR: Duration = Duration::from_secs(20);

impl Scene {
    async fn start(limits: Limits) -> Self {
        let ca = ca();
        let mut registry = Registry::default();
        let serving = ServingCert::register(&mut registry);
        serving.swap(pair(&leaf(&ca, 600)));
        let metrics = Metrics::register(&mut registry);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = CancellationToken::new();
        let (gate, waiting) = (Arc::new(Semaphore::new(0)), Arc::new(AtomicUsize::new(0)));
        let (at_gate, counter) = (Arc::clone(&gate), Arc::clone(&waiting));
        // Takes the body, so that it stays unread until the gate opens.
        let slow = move |_body: Body| async move {
            counter.fetch_add(1, Ordering::SeqCst);
            at_gate.acquire().await.unwrap().forget();
            "slow"
        };
        let counter = Arc::clone(&waiting);
        let read = move |body: Body| async move {
            counter.fetch_add(1, Ordering::SeqCst);
            body.collect().await.unwrap();
            "read"
        };
        let router = Router::new()
            .route("/", get(async || "hello"))
            .route("/read", post(read))
            .route("/slow", get(slow.clone()).post(slow))
            .route("/echo", post(async |body: Bytes| body))
            .layer(axum::extract::DefaultBodyLimit::disable());
        let done =
            tokio::spawn(serve(listener, Arc::clone(&serving), router, limits, shutdown.clone(), metrics.clone()));
        Self { address, ca, serving, metrics, shutdown, done, gate, waiting }
    }

    async fn connect(&self, alpn: &[u8]) -> std::io::Result<Io> {
        connect(self.address, &self.ca, alpn).await
    }

    async fn http1(&self) -> Http1 {
        Http1::over(self.connect(b"http/1.1").await.unwrap()).await
    }

    async fn http2(&self) -> Http2 {
        Http2::over(self.connect(b"h2").await.unwrap()).await
    }

    async fn in_flight(&self, count: usize) {
        eventually("requests in flight", || self.waiting.load(Ordering::SeqCst) == count).await;
    }
}

async fn connect(address: SocketAddr, trusted: &Minted, alpn: &[u8]) -> std::io::Result<Io> {
    secure(TcpStream::connect(address).await?, trusted, alpn).await
}

async fn secure(socket: TcpStream, trusted: &Minted, alpn: &[u8]) -> std::io::Result<Io> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(certificates(trusted.cert.as_bytes()).unwrap());
    let mut config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![alpn.to_vec()];
    let name = ServerName::try_from("localhost").unwrap();
    let stream = TlsConnector::from(Arc::new(config)).connect(name, socket).await?;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(alpn));
    Ok(stream)
}

struct Http1(hyper::client::conn::http1::SendRequest<Full<Bytes>>);

impl Http1 {
    async fn over(stream: Io) -> Self {
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        Self(sender)
    }

    async fn get(&mut self, path: &str) -> hyper::Result<String> {
        self.0.ready().await?;
        text(self.0.send_request(request(path)).await?).await
    }
}

#[derive(Clone)]
struct Http2(hyper::client::conn::http2::SendRequest<Full<Bytes>>);

impl Http2 {
    async fn over(stream: Io) -> Self {
        let executor = TokioExecutor::new();
        let (sender, connection) = hyper::client::conn::http2::handshake(executor, TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        Self(sender)
    }

    async fn get(&mut self, path: &str) -> hyper::Result<String> {
        self.0.ready().await?;
        text(self.0.send_request(request(path)).await?).await
    }
}

fn request(path: &str) -> http::Request<Full<Bytes>> {
    let uri = format!("https://localhost{path}");
    http::Request::builder().uri(uri).header("host", "localhost").body(Full::default()).unwrap()
}

async fn text(response: http::Response<hyper::body::Incoming>) -> hyper::Result<String> {
    assert_eq!(response.status(), 200);
    let bytes = response.into_body().collect().await?.to_bytes();
    Ok(String::from_utf8(bytes.to_vec()).unwrap())
}

/// The server ends the connection: an end of file, or an error.
async fn closed_by_server(stream: &mut Io) {
    let mut sink = Vec::new();
    timeout(FAR, stream.read_to_end(&mut sink)).await.expect("still open").ok();
}

#[tokio::test]
async fn both_protocols_answer() {
    let scene = Scene::start(limits()).await;
    assert_eq!(scene.http1().await.get("/").await.unwrap(), "hello");
    assert_eq!(scene.http2().await.get("/").await.unwrap(), "hello");
}

#[tokio::test]
async fn a_three_megabyte_body_arrives_over_both_protocols() {
    let scene = Scene::start(limits()).await;
    let body = Bytes::from(vec![b'x'; 3 * 1024 * 1024]);
    let post =
        || http::Request::post("https://localhost/echo").header("host", "localhost").body(Full::new(body.clone()));
    let one = scene.http1().await.0.send_request(post().unwrap()).await.unwrap();
    let two = scene.http2().await.0.send_request(post().unwrap()).await.unwrap();
    assert_eq!(text(one).await.unwrap().len(), body.len());
    assert_eq!(text(two).await.unwrap().len(), body.len());
}

#[tokio::test]
async fn a_body_that_is_not_read_yet_does_not_hold_up_the_others() {
    let scene = Scene::start(limits()).await;
    let client = scene.http2().await;
    let post = |path: &str| {
        let body = Full::new(Bytes::from(vec![b'x'; 1024 * 1024]));
        http::Request::post(format!("https://localhost{path}")).body(body).unwrap()
    };
    let waiting: Vec<_> = (0..6)
        .map(|_| {
            let (mut client, request) = (client.clone(), post("/slow"));
            tokio::spawn(async move { text(client.0.send_request(request).await?).await })
        })
        .collect();
    scene.in_flight(6).await;
    let answer = timeout(FAR, client.clone().0.send_request(post("/echo"))).await;
    assert_eq!(text(answer.expect("held up").unwrap()).await.unwrap().len(), 1024 * 1024);
    scene.gate.add_permits(6);
    for answer in waiting {
        assert_eq!(answer.await.unwrap().unwrap(), "slow");
    }
}

#[tokio::test]
async fn idle_connections_make_room_for_a_newcomer() {
    let scene = Scene::start(limits()).await;
    let mut regular = scene.http2().await;
    assert_eq!(regular.get("/").await.unwrap(), "hello");
    let mut idle = Vec::new();
    for count in 0..60 {
        let alpn: &[u8] = if count % 2 == 0 { b"h2" } else { b"http/1.1" };
        idle.push(scene.connect(alpn).await);
    }
    assert_eq!(scene.http1().await.get("/").await.unwrap(), "hello");
    assert_eq!(regular.get("/").await.unwrap(), "hello", "who has asked before is not sent away for who has not");
    eventually("room was made", || scene.metrics.closed_so_far(Closed::made_room) >= 53).await;
    eventually("no more than allowed are open", || scene.metrics.open_now() <= 8).await;
    assert_eq!(scene.metrics.closed_so_far(Closed::refused), 0);
}

#[tokio::test]
async fn unfinished_handshakes_make_room_too() {
    let scene = Scene::start(limits()).await;
    let mut silent = Vec::new();
    for _ in 0..50 {
        silent.push(TcpStream::connect(scene.address).await.unwrap());
    }
    assert_eq!(scene.http2().await.get("/").await.unwrap(), "hello");
    eventually("no more than allowed are open", || scene.metrics.open_now() <= 8).await;
}

#[tokio::test]
async fn a_connection_with_a_request_in_flight_is_never_sent_away() {
    let scene = Scene::start(Limits { connections: 2, ..limits() }).await;
    let mut first = scene.http1().await;
    let mut second = scene.http2().await;
    let busy = tokio::spawn(async move { (first.get("/slow").await, second.get("/slow").await) });
    scene.in_flight(1).await;
    scene.gate.add_permits(1);
    scene.in_flight(2).await;
    // The first is idle now and goes; then both places are taken.
    let mut third = scene.http1().await;
    let busy_too = tokio::spawn(async move { third.get("/slow").await });
    scene.in_flight(3).await;
    assert!(scene.connect(b"h2").await.is_err());
    assert_eq!(scene.metrics.closed_so_far(Closed::refused), 1);
    scene.gate.add_permits(2);
    let (first, second) = busy.await.unwrap();
    assert_eq!((first.unwrap(), second.unwrap()), ("slow".to_owned(), "slow".to_owned()));
    assert_eq!(busy_too.await.unwrap().unwrap(), "slow");
}

#[tokio::test]
async fn a_handshake_that_does_not_come_is_given_up() {
    let scene = Scene::start(Limits { handshake: BRIEF, ..limits() }).await;
    let mut silent = TcpStream::connect(scene.address).await.unwrap();
    let mut byte = [0];
    let read = timeout(FAR, silent.read(&mut byte)).await.expect("still open");
    assert_eq!(read.unwrap_or(0), 0);
    eventually("counted", || scene.metrics.closed_so_far(Closed::handshake) == 1).await;
}

#[tokio::test]
async fn a_header_sent_drop_by_drop_is_cut_off() {
    let scene = Scene::start(Limits { header: BRIEF, ..limits() }).await;
    let mut slow = scene.connect(b"http/1.1").await.unwrap();
    slow.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
    let dripping = async {
        loop {
            sleep(Duration::from_millis(50)).await;
            if slow.write_all(b"x-drop: 1\r\n").await.is_err() || slow.flush().await.is_err() {
                return;
            }
        }
    };
    timeout(FAR, dripping).await.expect("still open");
    assert_eq!(scene.metrics.closed_so_far(Closed::slow_header), 1);
}

#[tokio::test]
async fn a_kept_alive_connection_may_be_idle_longer_than_a_header_may_take() {
    let scene = Scene::start(Limits { header: BRIEF, ..limits() }).await;
    let mut client = scene.http1().await;
    assert_eq!(client.get("/").await.unwrap(), "hello");
    sleep(Duration::from_millis(900)).await;
    assert_eq!(client.get("/").await.unwrap(), "hello");
}

#[tokio::test]
async fn idle_connections_are_closed_in_the_end() {
    let scene = Scene::start(Limits { idle: BRIEF, ..limits() }).await;
    let mut one = scene.connect(b"http/1.1").await.unwrap();
    let mut two = scene.connect(b"h2").await.unwrap();
    closed_by_server(&mut one).await;
    closed_by_server(&mut two).await;
    eventually("counted", || scene.metrics.closed_so_far(Closed::idle) == 2).await;
    assert_eq!(scene.metrics.open_now(), 0);
}

#[tokio::test]
async fn a_new_certificate_disturbs_no_connection() {
    let scene = Scene::start(limits()).await;
    let (mut one, mut two) = (scene.http1().await, scene.http2().await);
    assert_eq!(one.get("/").await.unwrap(), "hello");
    assert_eq!(two.get("/").await.unwrap(), "hello");
    let next = ca();
    scene.serving.swap(pair(&leaf(&next, 600)));
    assert_eq!(one.get("/").await.unwrap(), "hello");
    assert_eq!(two.get("/").await.unwrap(), "hello");
    assert!(connect(scene.address, &scene.ca, b"h2").await.is_err(), "the old CA is not enough any more");
    let fresh = connect(scene.address, &next, b"h2").await.unwrap();
    assert_eq!(Http2::over(fresh).await.get("/").await.unwrap(), "hello");
}

#[tokio::test]
async fn requests_in_flight_are_answered_before_the_end() {
    let scene = Scene::start(limits()).await;
    let (mut one, mut two) = (scene.http1().await, scene.http2().await);
    let mut idle = scene.connect(b"h2").await.unwrap();
    let answers = tokio::spawn(async move { tokio::join!(one.get("/slow"), two.get("/slow")) });
    scene.in_flight(2).await;
    scene.shutdown.cancel();
    closed_by_server(&mut idle).await;
    eventually("no newcomers", || std::net::TcpStream::connect(scene.address).is_err()).await;
    scene.gate.add_permits(2);
    let (one, two) = answers.await.unwrap();
    assert_eq!((one.unwrap(), two.unwrap()), ("slow".to_owned(), "slow".to_owned()));
    timeout(FAR, scene.done).await.expect("still serving").unwrap().unwrap();
}

#[tokio::test]
async fn a_request_that_never_ends_does_not_hold_up_the_end() {
    let scene = Scene::start(Limits { drain: BRIEF, ..limits() }).await;
    let mut client = scene.http1().await;
    let answer = tokio::spawn(async move { client.get("/slow").await });
    scene.in_flight(1).await;
    scene.shutdown.cancel();
    timeout(FAR, scene.done).await.expect("still serving").unwrap().unwrap();
    assert!(answer.await.unwrap().is_err());
}

#[tokio::test]
async fn without_a_certificate_handshakes_fail_and_the_loop_goes_on() {
    let mut registry = Registry::default();
    let serving = ServingCert::register(&mut registry);
    let metrics = Metrics::register(&mut registry);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new().route("/", get(async || "hello"));
    tokio::spawn(serve(listener, Arc::clone(&serving), router, limits(), CancellationToken::new(), metrics));
    let ca = ca();
    assert!(connect(address, &ca, b"h2").await.is_err());
    serving.swap(pair(&leaf(&ca, 600)));
    let stream = connect(address, &ca, b"h2").await.unwrap();
    assert_eq!(Http2::over(stream).await.get("/").await.unwrap(), "hello");
}
