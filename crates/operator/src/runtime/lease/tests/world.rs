//! One Lease, the lines to it, and processes that can be stopped.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use http::{Method, Request, Response};
use http_body_util::BodyExt;
use kube::client::Body;
use serde_json::Value;
use tokio::{task::JoinHandle, time::sleep_until};
use tower::service_fn;

use super::super::*;
use super::MS;

/// The API server, as far as one Lease goes.
#[derive(Default)]
pub(super) struct Server {
    pub(super) lease: Option<Value>,
    pub(super) version: u64,
    pub(super) stuck_until: Option<Instant>,
}

impl Server {
    pub(super) fn with(lease: Option<Lease>) -> Arc<Mutex<Self>> {
        let server = Arc::new(Mutex::new(Self::default()));
        if let Some(lease) = lease {
            server.lock().unwrap().put(serde_json::to_value(lease).unwrap());
        }
        server
    }

    pub(super) fn put(&mut self, mut lease: Value) -> (u16, Value) {
        self.version += 1;
        lease["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.lease = Some(lease.clone());
        (200, lease)
    }

    pub(super) fn edit(&mut self, patch: &Value) {
        if let Some(mut lease) = self.lease.clone() {
            json_patch::merge(&mut lease, patch);
            self.put(lease);
        }
    }

    fn handle(&mut self, method: &Method, body: &[u8]) -> (u16, Value) {
        match (method, self.lease.clone()) {
            (&Method::POST, Some(_)) => (409, Value::Null),
            (&Method::POST, None) => self.put(serde_json::from_slice(body).unwrap()),
            (_, None) => (404, Value::Null),
            (&Method::GET, Some(lease)) => (200, lease),
            (_, Some(mut lease)) => {
                let patch: Value = serde_json::from_slice(body).unwrap();
                if patch["metadata"]["resourceVersion"] != lease["metadata"]["resourceVersion"] {
                    return (409, Value::Null);
                }
                json_patch::merge(&mut lease, &patch);
                self.put(lease)
            }
        }
    }

    pub(super) fn is_stuck(&self) -> Option<Instant> {
        self.stuck_until.filter(|until| Instant::now() < *until)
    }

    pub(super) async fn unstuck(server: &Mutex<Self>) {
        loop {
            let Some(until) = server.lock().unwrap().is_stuck() else { return };
            sleep_until(until).await;
        }
    }

    pub(super) fn record(&self) -> Record {
        Record::of(&serde_json::from_value(self.lease.clone().unwrap()).unwrap())
    }
}

/// The line between one candidate and the server.
#[derive(Default)]
pub(super) struct Link {
    pub(super) cut: bool,
    pub(super) refuse_writes: Option<u16>,
    pub(super) lose: f64,
    pub(super) slow: Duration,
}

fn client(server: &Arc<Mutex<Server>>, link: &Arc<Mutex<Link>>, seed: u64) -> Client {
    let (server, link) = (Arc::clone(server), Arc::clone(link));
    let random = Arc::new(Mutex::new(fastrand::Rng::with_seed(seed)));
    let service = service_fn(move |request: Request<Body>| {
        let (server, link, random) = (Arc::clone(&server), Arc::clone(&link), Arc::clone(&random));
        async move {
            // A line that loses something keeps silent: the caller has to time out.
            let travel = async || {
                let (delay, lost) = {
                    let (link, mut random) = (link.lock().unwrap(), random.lock().unwrap());
                    let delay = MS * random.u32(1..20) + link.slow.mul_f64(random.f64());
                    (delay, link.cut || random.f64() < link.lose)
                };
                sleep(delay).await;
                if lost {
                    std::future::pending::<()>().await;
                }
            };
            let (head, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            travel().await;
            let refused = link.lock().unwrap().refuse_writes.filter(|_| head.method != Method::GET);
            let (code, mut answer) = match refused {
                Some(code) => (code, Value::Null),
                // What has arrived is carried out, even if nobody waits for the answer any more.
                None => tokio::spawn(async move {
                    Server::unstuck(&server).await;
                    server.lock().unwrap().handle(&head.method, &body)
                })
                .await
                .unwrap(),
            };
            travel().await;
            if code >= 400 {
                answer = json!({ "kind": "Status", "status": "Failure", "code": code, "message": "no", "reason": "" });
            }
            let body = Body::from(serde_json::to_vec(&answer).unwrap());
            Ok::<_, std::convert::Infallible>(Response::builder().status(code).body(body).unwrap())
        }
    });
    Client::new(service, "default")
}

/// A process that can be stopped (SIGSTOP) and continued: while stopped nothing in it is polled.
struct Process<F> {
    work: Pin<Box<F>>,
    stopped: Arc<Mutex<Instant>>,
    wake: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl<F: Future> Future for Process<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let until = *self.stopped.lock().unwrap();
        if Instant::now() < until {
            let mut wake = Box::pin(sleep_until(until));
            let _ = wake.as_mut().poll(context);
            self.wake = Some(wake);
            return Poll::Pending;
        }
        self.work.as_mut().poll(context)
    }
}

pub(super) struct Candidate {
    pub(super) leadership: Leadership,
    pub(super) link: Arc<Mutex<Link>>,
    pub(super) stopped: Arc<Mutex<Instant>>,
    pub(super) shutdown: CancellationToken,
    pub(super) tasks: Vec<JoinHandle<()>>,
}

impl Candidate {
    pub(super) fn start(server: &Arc<Mutex<Server>>, name: &str, seed: u64) -> Self {
        Self::start_in(server, name, None, seed)
    }

    pub(super) fn start_in(server: &Arc<Mutex<Server>>, name: &str, pod: Option<&str>, seed: u64) -> Self {
        let link = Arc::new(Mutex::new(Link::default()));
        let pod = pod.map(str::to_owned);
        let settings = LeaseSettings { seed, pod, ..LeaseSettings::new("default", "groundcrew", name) };
        let (elector, leadership) = Elector::new(client(server, &link, seed), settings);
        let stopped = Arc::new(Mutex::new(Instant::now()));
        let mut candidate = Self { leadership, link, stopped, shutdown: CancellationToken::new(), tasks: Vec::new() };
        let shutdown = candidate.shutdown.clone();
        candidate.spawn(elector.run(shutdown));
        candidate
    }

    pub(super) fn spawn(&mut self, work: impl Future<Output = ()> + Send + 'static) {
        let process = Process { work: Box::pin(work), stopped: Arc::clone(&self.stopped), wake: None };
        self.tasks.push(tokio::spawn(process));
    }

    pub(super) fn crash(&mut self) {
        for task in self.tasks.drain(..) {
            task.abort();
        }
    }

    pub(super) async fn leads(&self) {
        self.leadership.watch().wait_for(|leading| *leading).await.unwrap();
    }

    pub(super) async fn stops_leading(&self) {
        self.leadership.watch().wait_for(|leading| !*leading).await.unwrap();
    }
}
