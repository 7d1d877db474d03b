//! Loopback servers that stand in for pods, good and bad ones.

#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use groundcrew_core::warmup::outcome::{Outcome, Tally};
use groundcrew_core::warmup::rules::Rules;
use groundcrew_core::warmup::scenario::Scenario;
use groundcrew_load::call::Trace;
use groundcrew_load::engine::{Free, Progress};
use groundcrew_load::warm::{Ended, Work, warm};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

/// One request as a server saw it.
#[derive(Clone, Debug)]
pub struct Hit {
    pub at: Instant,
    pub head: http::request::Parts,
    pub body: Bytes,
    /// Which connection brought it.
    pub connection: usize,
}

impl Hit {
    pub fn header(&self, name: &str) -> &str {
        self.head.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

#[derive(Clone, Debug)]
pub struct Server {
    pub address: SocketAddr,
    pub hits: Arc<Mutex<Vec<Hit>>>,
}

impl Server {
    pub fn hits(&self) -> Vec<Hit> {
        self.hits.lock().unwrap().clone()
    }
}

pub type Reply = Response<Full<Bytes>>;

pub fn reply(status: u16, body: &str) -> Reply {
    Response::builder().status(status).body(Full::new(Bytes::from(body.to_owned()))).unwrap()
}

pub async fn listener(on: &str) -> TcpListener {
    TcpListener::bind(format!("{on}:0")).await.unwrap()
}

/// HTTP/1.1 and HTTP/2 without TLS; the answer is made from the request's number and what it was.
pub async fn serve(answer: impl Fn(usize, &Hit) -> Reply + Send + Sync + 'static) -> Server {
    serve_on("127.0.0.1", answer).await
}

pub async fn serve_on(on: &str, answer: impl Fn(usize, &Hit) -> Reply + Send + Sync + 'static) -> Server {
    let listener = listener(on).await;
    let server = Server { address: listener.local_addr().unwrap(), hits: Arc::default() };
    let (hits, answer) = (server.hits.clone(), Arc::new(answer));
    tokio::spawn(async move {
        for connection in 0.. {
            let (tcp, _) = listener.accept().await.unwrap();
            tokio::spawn(speak(tcp, connection, hits.clone(), answer.clone()));
        }
    });
    server
}

pub async fn speak<F: Fn(usize, &Hit) -> Reply + Send + Sync + 'static>(
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    connection: usize,
    hits: Arc<Mutex<Vec<Hit>>>,
    answer: Arc<F>,
) {
    let service = service_fn(move |request: Request<Incoming>| {
        let (hits, answer, at) = (hits.clone(), answer.clone(), Instant::now());
        async move {
            let (head, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let hit = Hit { at, head, body, connection };
            let number = {
                let mut hits = hits.lock().unwrap();
                hits.push(hit.clone());
                hits.len() - 1
            };
            Ok::<_, Infallible>(answer(number, &hit))
        }
    });
    let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(io), service).await;
}

/// A server that does as it likes with each connection.
pub async fn raw<F, Fut>(handle: F) -> SocketAddr
where
    F: Fn(TcpStream) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    let listener = listener("127.0.0.1").await;
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            tokio::spawn(handle(tcp));
        }
    });
    address
}

/// A server that takes so long for its n-th request, and when each came; both on the runtime's clock.
pub async fn timed(
    latency: impl Fn(usize) -> Duration + Send + Sync + 'static,
) -> (SocketAddr, Arc<Mutex<Vec<tokio::time::Instant>>>) {
    let arrivals: Arc<Mutex<Vec<tokio::time::Instant>>> = Arc::default();
    let (seen, latency) = (arrivals.clone(), Arc::new(latency));
    let address = raw(move |mut tcp| {
        let (seen, latency) = (seen.clone(), latency.clone());
        async move {
            while read_head(&mut tcp).await {
                let n = {
                    let mut seen = seen.lock().unwrap();
                    seen.push(tokio::time::Instant::now());
                    seen.len() - 1
                };
                tokio::time::sleep(latency(n)).await;
                let _ = tcp.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
            }
        }
    });
    (address.await, arrivals)
}

/// Reads up to the empty line; false when there is none to come.
pub async fn read_head(tcp: &mut TcpStream) -> bool {
    let mut seen = Vec::new();
    let mut byte = [0_u8; 1];
    while !seen.ends_with(b"\r\n\r\n") {
        match tcp.read(&mut byte).await {
            Ok(1) => seen.push(byte[0]),
            _ => return false,
        }
    }
    true
}

/// Rules from annotations without their prefix.
pub fn rules(port: u16, entries: &[(&str, &str)]) -> Rules {
    let port = port.to_string();
    let all = entries.iter().copied().chain([("port", port.as_str())]);
    let annotations: std::collections::BTreeMap<String, String> =
        all.map(|(key, value)| (format!("kube-booster.io/warmup-{key}"), value.to_owned())).collect();
    Rules::read::<String>(&annotations, &[]).unwrap()
}

pub struct Ran {
    pub ended: Ended,
    pub progress: Progress,
    pub took: Duration,
}

impl Ran {
    pub fn tally(&self) -> &Tally {
        match &self.ended {
            Ended::With(Outcome::Ran(tally)) => tally,
            other => panic!("{other:?}"),
        }
    }

    pub fn unable(&self) -> &str {
        match &self.ended {
            Ended::With(Outcome::Unable(why)) => why,
            other => panic!("{other:?}"),
        }
    }
}

pub async fn run(address: SocketAddr, entries: &[(&str, &str)]) -> Ran {
    run_with(address, entries, None, &CancellationToken::new()).await
}

/// On a paused clock, where servers are as slow as they say and nothing else takes time.
pub async fn run_virtually(address: SocketAddr, entries: &[(&str, &str)]) -> Ran {
    run_work(address, entries, None, &CancellationToken::new(), false).await
}

pub async fn run_with(
    address: SocketAddr,
    entries: &[(&str, &str)],
    scenario: Option<&Scenario>,
    cancel: &CancellationToken,
) -> Ran {
    run_work(address, entries, scenario, cancel, true).await
}

async fn run_work(
    address: SocketAddr,
    entries: &[(&str, &str)],
    scenario: Option<&Scenario>,
    cancel: &CancellationToken,
    precise: bool,
) -> Ran {
    let rules = rules(address.port(), entries);
    let work = Work {
        address,
        rules: &rules,
        scenario,
        sent_before: 0,
        trace: Trace::new(0xabc),
        precise,
        max_queue_wait: Duration::from_secs(300),
    };
    let (progress, started) = (Progress::default(), Instant::now());
    let ended = warm(work, &Free, cancel, &progress).await;
    Ran { ended, progress, took: started.elapsed() }
}
