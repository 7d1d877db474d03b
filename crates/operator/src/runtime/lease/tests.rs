//! Candidates on an in-memory Lease under virtual time, with every fault the lease has to stand.

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

use super::*;

const S: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

/// The API server, as far as one Lease goes.
#[derive(Default)]
struct Server {
    lease: Option<Value>,
    version: u64,
    stuck_until: Option<Instant>,
}

impl Server {
    fn with(lease: Option<Lease>) -> Arc<Mutex<Self>> {
        let server = Arc::new(Mutex::new(Self::default()));
        if let Some(lease) = lease {
            server.lock().unwrap().put(serde_json::to_value(lease).unwrap());
        }
        server
    }

    fn put(&mut self, mut lease: Value) -> (u16, Value) {
        self.version += 1;
        lease["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.lease = Some(lease.clone());
        (200, lease)
    }

    fn edit(&mut self, patch: &Value) {
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

    fn is_stuck(&self) -> Option<Instant> {
        self.stuck_until.filter(|until| Instant::now() < *until)
    }

    async fn unstuck(server: &Mutex<Self>) {
        loop {
            let Some(until) = server.lock().unwrap().is_stuck() else { return };
            sleep_until(until).await;
        }
    }

    fn record(&self) -> Record {
        Record::of(&serde_json::from_value(self.lease.clone().unwrap()).unwrap())
    }
}

/// The line between one candidate and the server.
#[derive(Default)]
struct Link {
    cut: bool,
    refuse_writes: Option<u16>,
    lose: f64,
    slow: Duration,
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

struct Candidate {
    leadership: Leadership,
    link: Arc<Mutex<Link>>,
    stopped: Arc<Mutex<Instant>>,
    shutdown: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
}

impl Candidate {
    fn start(server: &Arc<Mutex<Server>>, name: &str, seed: u64) -> Self {
        let link = Arc::new(Mutex::new(Link::default()));
        let settings = LeaseSettings { seed, ..LeaseSettings::new("default", "groundcrew", name) };
        let (elector, leadership) = Elector::new(client(server, &link, seed), settings);
        let stopped = Arc::new(Mutex::new(Instant::now()));
        let mut candidate = Self { leadership, link, stopped, shutdown: CancellationToken::new(), tasks: Vec::new() };
        let shutdown = candidate.shutdown.clone();
        candidate.spawn(elector.run(shutdown));
        candidate
    }

    fn spawn(&mut self, work: impl Future<Output = ()> + Send + 'static) {
        let process = Process { work: Box::pin(work), stopped: Arc::clone(&self.stopped), wake: None };
        self.tasks.push(tokio::spawn(process));
    }

    fn crash(&mut self) {
        for task in self.tasks.drain(..) {
            task.abort();
        }
    }

    async fn leads(&self) {
        self.leadership.watch().wait_for(|leading| *leading).await.unwrap();
    }

    async fn stops_leading(&self) {
        self.leadership.watch().wait_for(|leading| !*leading).await.unwrap();
    }
}

fn held_by(server: &Arc<Mutex<Server>>) -> Option<String> {
    server.lock().unwrap().record().holder
}

#[tokio::test(start_paused = true)]
async fn a_vacant_lease_is_taken_at_once_and_the_record_is_right() {
    let server = Server::with(Some(vacant("default", "groundcrew")));
    server.lock().unwrap().edit(&json!({ "metadata": { "annotations": { "state": "kept" } } }));
    let start = Instant::now();
    let a = Candidate::start(&server, "a", 1);
    a.leads().await;
    assert!(start.elapsed() < S);
    let taken = server.lock().unwrap().record();
    assert_eq!((taken.holder.as_deref(), taken.seconds, taken.transitions), (Some("a"), Some(15), Some(0)));
    assert_eq!(taken.acquired, taken.renewed);
    sleep(S * 60).await;
    assert!(a.leadership.is_leader());
    let renewed = server.lock().unwrap().record();
    assert_eq!((renewed.acquired, renewed.transitions), (taken.acquired, Some(0)));
    assert!(renewed.renewed > taken.renewed);
    assert_eq!(server.lock().unwrap().lease.as_ref().unwrap()["metadata"]["annotations"]["state"], "kept");
}

#[tokio::test(start_paused = true)]
async fn graceful_exit_hands_over_within_two_seconds_and_after_the_last_write() {
    let server = Server::with(Some(vacant("default", "groundcrew")));
    server.lock().unwrap().edit(&json!({ "metadata": { "annotations": { "state": "kept" } } }));
    let a = Candidate::start(&server, "a", 1);
    a.leads().await;
    let b = Candidate::start(&server, "b", 2);
    sleep(S * 5).await;
    let permit = a.leadership.permit(DEADLINE).unwrap();
    a.shutdown.cancel();
    sleep(S).await;
    assert!(!a.leadership.is_leader() && !b.leadership.is_leader(), "a's write is still under way");
    drop(permit);
    let start = Instant::now();
    b.leads().await;
    assert!(start.elapsed() < S * 2, "{:?}", start.elapsed());
    let record = server.lock().unwrap().record();
    assert_eq!((record.holder.as_deref(), record.transitions), (Some("b"), Some(1)));
    assert_eq!(server.lock().unwrap().lease.as_ref().unwrap()["metadata"]["annotations"]["state"], "kept");
}

#[tokio::test(start_paused = true)]
async fn crash_is_taken_over_after_the_lease_and_not_before() {
    for seed in 0..12 {
        let server = Server::with(Some(vacant("default", "groundcrew")));
        let mut a = Candidate::start(&server, "a", seed);
        a.leads().await;
        let b = Candidate::start(&server, "b", seed + 1000);
        sleep(S * 20 + MS * 37 * u32::try_from(seed).unwrap()).await;
        a.crash();
        let start = Instant::now();
        b.leads().await;
        // Renewed at most 2.2 s before the crash, seen at most one poll after it.
        let took = start.elapsed();
        assert!(took > S * 12 && took < S * 16, "{took:?}");
    }
}

/// A confirmed write counts from before it was sent: whoever saw it first has been waiting since then.
#[tokio::test(start_paused = true)]
async fn a_late_answer_does_not_lengthen_the_term() {
    for seed in 0..10 {
        let server = Server::with(Some(vacant("default", "groundcrew")));
        let a = Candidate::start(&server, "a", seed);
        a.leads().await;
        a.link.lock().unwrap().slow = MS * 1400;
        let before = server.lock().unwrap().version + 1;
        while server.lock().unwrap().version <= before {
            sleep(MS).await;
        }
        let committed = Instant::now();
        // The answer to this one still arrives, no other does.
        sleep(MS * 1430).await;
        a.link.lock().unwrap().cut = true;
        a.stops_leading().await;
        assert!(committed.elapsed() <= S * 10, "seed {seed}: led for {:?}", committed.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn refused_renewals_end_leadership_after_ten_seconds_and_others_follow() {
    let server = Server::with(Some(vacant("default", "groundcrew")));
    let a = Candidate::start(&server, "a", 1);
    a.leads().await;
    let b = Candidate::start(&server, "b", 2);
    a.link.lock().unwrap().refuse_writes = Some(403);
    let start = Instant::now();
    a.stops_leading().await;
    assert!(start.elapsed() <= S * 10);
    b.leads().await;
    assert!(start.elapsed() < S * 17);
}

#[tokio::test(start_paused = true)]
async fn deleted_lease_is_written_again_by_its_leader() {
    let server = Server::with(Some(vacant("default", "groundcrew")));
    let a = Candidate::start(&server, "a", 1);
    a.leads().await;
    let b = Candidate::start(&server, "b", 2);
    sleep(S * 3).await;
    server.lock().unwrap().lease = None;
    sleep(S * 3).await;
    assert_eq!(held_by(&server).as_deref(), Some("a"));
    assert!(a.leadership.is_leader() && !b.leadership.is_leader());
}

#[tokio::test(start_paused = true)]
async fn missing_lease_is_waited_out() {
    let server = Server::with(None);
    let start = Instant::now();
    let a = Candidate::start(&server, "a", 1);
    a.leads().await;
    assert!(start.elapsed() >= S * 18 && start.elapsed() < S * 20, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn foreign_records_end_leadership_and_are_waited_out_whatever_their_clock_says() {
    let forgeries = [
        json!({ "holderIdentity": "stranger", "renewTime": "2199-01-01T00:00:00.000000Z" }),
        json!({ "holderIdentity": "stranger", "renewTime": "1999-01-01T00:00:00.000000Z" }),
        json!({ "holderIdentity": "b" }),
        json!({ "holderIdentity": null }),
        json!({ "leaseDurationSeconds": 100_000 }),
        Value::Null,
    ];
    for spec in forgeries {
        let server = Server::with(Some(vacant("default", "groundcrew")));
        let a = Candidate::start(&server, "a", 1);
        a.leads().await;
        let b = Candidate::start(&server, "b", 2);
        sleep(S * 3).await;
        server.lock().unwrap().edit(&json!({ "spec": spec.clone() }));
        let start = Instant::now();
        a.stops_leading().await;
        assert!(start.elapsed() < S * 3, "{spec}");
        tokio::select! {
            () = a.leads() => {}
            () = b.leads() => {}
        }
        assert!(start.elapsed() > S * 14 && start.elapsed() < S * 21, "{spec}: {:?}", start.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn edits_of_metadata_do_not_cost_leadership_or_lengthen_a_dead_one() {
    let server = Server::with(Some(vacant("default", "groundcrew")));
    let mut a = Candidate::start(&server, "a", 1);
    a.leads().await;
    let b = Candidate::start(&server, "b", 2);
    let annotator = tokio::spawn({
        let server = Arc::clone(&server);
        async move {
            for n in 0.. {
                server.lock().unwrap().edit(&json!({ "metadata": { "annotations": { "n": format!("{n}") } } }));
                sleep(MS * 700).await;
            }
        }
    });
    sleep(S * 60).await;
    assert!(a.leadership.is_leader());
    a.crash();
    let start = Instant::now();
    b.leads().await;
    assert!(start.elapsed() < S * 17);
    annotator.abort();
}

#[tokio::test(start_paused = true)]
async fn a_lost_reply_is_recognised_as_our_own_write() {
    let server = Server::with(Some(vacant("default", "groundcrew")));
    let a = Candidate::start(&server, "a", 1);
    a.link.lock().unwrap().lose = 0.5;
    a.leads().await;
    let b = Candidate::start(&server, "b", 2);
    for _ in 0..600 {
        sleep(S).await;
        assert!(!(a.leadership.is_leader() && b.leadership.is_leader()));
    }
}

/// The candidates of one run and what they did wrong.
#[derive(Default)]
struct Cluster {
    candidates: Vec<Leadership>,
    wrong: Vec<String>,
    commits: u32,
}

impl Cluster {
    fn check(&mut self, what: &str) {
        let leaders = self.candidates.iter().filter(|candidate| candidate.is_leader()).count();
        if leaders > 1 {
            self.wrong.push(format!("{what}: {leaders} leaders"));
        }
    }

    fn commit(&mut self, author: &Leadership) {
        self.commits += 1;
        // The author itself may have stopped; nobody else may have begun.
        let others = self.candidates.iter().filter(|other| !Arc::ptr_eq(&other.0, &author.0));
        let leading = others.filter(|other| other.is_leader()).count();
        if leading > 0 {
            self.wrong.push("a write was made while another candidate led".into());
        }
    }
}

/// Keeps writing while permitted. Half of the writes leave the process at once and take effect on their own, up to
/// the end of their permit, whatever happens to the process.
async fn writes(leadership: Leadership, server: Arc<Mutex<Server>>, cluster: Arc<Mutex<Cluster>>, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    loop {
        sleep(MS * random.u32(10..400)).await;
        let Some(permit) = leadership.permit(DEADLINE) else { continue };
        let (takes, detached) = (MS * random.u32(0..6000), random.bool());
        let commit = {
            let (cluster, author) = (Arc::clone(&cluster), leadership.clone());
            async move {
                sleep(takes).await;
                cluster.lock().unwrap().commit(&author);
            }
        };
        let stuck = server.lock().unwrap().is_stuck().is_some();
        if stuck {
            // Arrived at a server that hangs: carried out when it goes on, within the deadline that came with it.
            let (server, cluster, author) = (Arc::clone(&server), Arc::clone(&cluster), leadership.clone());
            tokio::spawn(async move {
                Server::unstuck(&server).await;
                sleep(takes.min(MS * 4900)).await;
                cluster.lock().unwrap().commit(&author);
            });
            let _ = permit.run(std::future::pending::<()>()).await;
        } else if detached {
            tokio::spawn(permit.run(commit));
        } else {
            let _ = permit.run(commit).await;
        }
    }
}

fn start_one(server: &Arc<Mutex<Server>>, cluster: &Arc<Mutex<Cluster>>, random: &mut fastrand::Rng) -> Candidate {
    let seed = random.u64(..);
    let mut candidate = Candidate::start(server, &format!("candidate-{seed:x}"), seed);
    cluster.lock().unwrap().candidates.push(candidate.leadership.clone());
    candidate.spawn(writes(candidate.leadership.clone(), Arc::clone(server), Arc::clone(cluster), seed));
    candidate
}

fn disturb(candidate: &mut Candidate, server: &Arc<Mutex<Server>>, random: &mut fastrand::Rng) -> &'static str {
    let mut link = candidate.link.lock().unwrap();
    match random.u8(0..15) {
        0..3 => {
            link.cut = !link.cut;
            "cut or mended"
        }
        3 => {
            link.lose = if link.lose > 0.0 { 0.0 } else { 0.3 };
            "losing"
        }
        4 => {
            link.slow = if link.slow.is_zero() { S * 3 } else { Duration::ZERO };
            "slow"
        }
        5 => {
            link.refuse_writes =
                if link.refuse_writes.is_some() { None } else { random.choice([403, 409, 429, 500, 503]) };
            "refused"
        }
        6..9 => {
            *candidate.stopped.lock().unwrap() = Instant::now() + MS * random.u32(100..60_000);
            "stopped"
        }
        9 => {
            server.lock().unwrap().lease = None;
            "deleted"
        }
        10 => {
            let holder = random.choice([json!("stranger"), Value::Null, json!("")]);
            server.lock().unwrap().edit(&json!({ "spec": { "holderIdentity": holder } }));
            "forged"
        }
        11 => {
            server.lock().unwrap().edit(&json!({ "metadata": { "annotations": { "n": random.u32(..).to_string() } } }));
            "annotated"
        }
        12 => {
            server.lock().unwrap().stuck_until = Some(Instant::now() + MS * random.u32(100..40_000));
            "server stuck"
        }
        13 => {
            candidate.shutdown.cancel();
            "shut down"
        }
        _ => {
            drop(link);
            candidate.crash();
            "crashed"
        }
    }
}

/// Five minutes of trouble, then peace: safe throughout, and one leader in the end.
async fn one_run(seed: u64) -> u32 {
    let mut random = fastrand::Rng::with_seed(seed);
    let server = Server::with(random.bool().then(|| vacant("default", "groundcrew")));
    let cluster: Arc<Mutex<Cluster>> = Arc::default();
    let mut candidates: Vec<_> = (0..3).map(|_| start_one(&server, &cluster, &mut random)).collect();
    let end = Instant::now() + S * 300;
    let mut last = "start";
    while Instant::now() < end {
        let next = Instant::now() + MS * random.u32(50..6000);
        while Instant::now() < next {
            sleep(MS * 25).await;
            cluster.lock().unwrap().check(last);
        }
        let which = random.usize(0..candidates.len());
        last = disturb(&mut candidates[which], &server, &mut random);
        let gone = matches!(last, "crashed" | "shut down");
        if gone {
            let old = std::mem::replace(&mut candidates[which], start_one(&server, &cluster, &mut random));
            // A process that was told to stop is gone after 10 s.
            tokio::spawn(async move {
                sleep(S * 10).await;
                drop(old.tasks.iter().map(JoinHandle::abort).collect::<Vec<_>>());
            });
        }
    }
    for candidate in &candidates {
        *candidate.link.lock().unwrap() = Link::default();
        *candidate.stopped.lock().unwrap() = Instant::now();
    }
    server.lock().unwrap().stuck_until = None;
    // A stopped process or server wakes within a minute, a lease takes 20 s.
    for _ in 0..85 {
        sleep(S).await;
        cluster.lock().unwrap().check("peace");
    }
    let leaders = candidates.iter().filter(|candidate| candidate.leadership.is_leader()).count();
    for candidate in &mut candidates {
        candidate.crash();
    }
    let cluster = cluster.lock().unwrap();
    assert!(cluster.wrong.is_empty(), "seed {seed}: {:?}", cluster.wrong);
    assert_eq!(leaders, 1, "seed {seed}: leaders at peace");
    cluster.commits
}

#[tokio::test(start_paused = true)]
async fn never_two_leaders_whatever_happens() {
    let seeds = std::env::var("GROUNDCREW_LEASE_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(12);
    let mut commits = 0;
    for seed in 0..seeds {
        commits += one_run(seed).await;
    }
    assert!(commits > seeds as u32 * 20, "only {commits} writes: the runs show nothing");
}
