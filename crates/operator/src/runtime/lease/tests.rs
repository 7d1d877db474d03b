//! Candidates on an in-memory Lease under virtual time, with every fault the lease has to stand.

mod chaos;
mod world;

use std::sync::{Arc, Mutex};

use serde_json::Value;

use super::*;
use world::{Candidate, Server};

const S: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

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

#[tokio::test(start_paused = true)]
async fn a_restarted_process_of_the_same_pod_waits_only_for_the_last_write_of_the_one_before() {
    for (pod, least, most) in [(Some("agent"), S * 5, S * 6), (Some("agen"), S * 14, S * 17), (None, S * 14, S * 17)] {
        let server = Server::with(Some(vacant("default", "groundcrew")));
        let mut before = Candidate::start(&server, "agent_abcdef", 1);
        before.leads().await;
        before.crash();
        let start = Instant::now();
        let after = Candidate::start_in(&server, "agent_ghijkl", pod, 2);
        after.leads().await;
        let took = start.elapsed();
        assert!(took >= least && took < most, "{pod:?}: {took:?}");
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

/// A server that hangs has the last write of the old leader in hand when it goes on, and five seconds for it.
#[tokio::test(start_paused = true)]
async fn nobody_takes_over_right_after_the_server_was_stuck() {
    let server = Server::with(Some(vacant("default", "groundcrew")));
    let mut a = Candidate::start(&server, "a", 1);
    a.leads().await;
    let b = Candidate::start(&server, "b", 2);
    sleep(S * 3).await;
    let free = Instant::now() + S * 40;
    server.lock().unwrap().stuck_until = Some(free);
    a.crash();
    b.leads().await;
    let waited = Instant::now() - free;
    assert!(waited >= S * 5 && waited < S * 20, "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_not_given_back_while_a_write_given_up_may_still_land() {
    let server = Server::with(Some(vacant("default", "groundcrew")));
    let a = Candidate::start(&server, "a", 1);
    a.leads().await;
    let permit = a.leadership.permit(S).unwrap();
    permit.run(std::future::pending::<()>()).await.unwrap_err();
    a.shutdown.cancel();
    sleep(S * 5).await;
    assert_eq!(held_by(&server).as_deref(), Some("a"));
}
