//! Three candidates, everything that can go wrong at random, and an eye on them all.

use std::sync::{Arc, Mutex};

use serde_json::Value;
use tokio::task::JoinHandle;

use super::super::*;
use super::world::{Candidate, Link, Server};
use super::{MS, S};

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
            let mut server = server.lock().unwrap();
            server.stuck_until = server.stuck_until.max(Some(Instant::now() + MS * random.u32(100..40_000)));
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
    // Six minutes of trouble each; more of them by hand.
    let seeds = std::env::var("GROUNDCREW_LEASE_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(12);
    let mut commits = 0;
    for seed in 0..seeds {
        commits += one_run(seed).await;
    }
    assert!(commits > seeds as u32 * 20, "only {commits} writes: the runs show nothing");
}
