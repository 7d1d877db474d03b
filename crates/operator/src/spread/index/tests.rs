use std::sync::LazyLock;

use groundcrew_core::spread::node::Amount;
use groundcrew_core::spread::place::{count, next};
use groundcrew_core::spread::split::Share;

use super::*;

static NOW: LazyLock<Instant> = LazyLock::new(Instant::now);
const SHARE: Share = Share { percentage: 60, floor: 2 };

fn key(name: &str) -> Key {
    Key { namespace: "ns".into(), name: name.into() }
}

fn pod(placed: Placed) -> Arc<PodFacts> {
    Arc::new(PodFacts {
        uid: "u".into(),
        version: String::new(),
        owner: Some(Owner { stateful: false, name: "web-1".into(), uid: "rs".into() }),
        node: None,
        assigned: Some(placed.class),
        ready: false,
        terminating: false,
        exempt: false,
        unschedulable_since: None,
        rank: Some(placed.rank),
        own_cost: false,
        ordinal: None,
        amount: Amount::default(),
    })
}

fn place(index: &Index, wanted: u32, now: Instant, kept: bool) -> Placed {
    index.place(
        "rs",
        Some(wanted),
        now,
        kept,
        |p| p.assigned,
        |peers, credit| next(SHARE, Some(wanted), peers, None, credit),
    )
}

/// While no size is known.
fn serial(peers: &[Peer], credit: &mut Credit) -> Placed {
    next(SHARE, None, peers, None, credit)
}

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

#[test]
fn a_burst_that_nobody_has_seen_yet_is_split_exactly() {
    let index = Index::default();
    let placed: Vec<Placed> = (0..10).map(|_| place(&index, 10, *NOW, true)).collect();
    let peers: Vec<Peer> = placed.iter().map(|p| Peer { class: p.class, rank: Some(p.rank) }).collect();
    assert_eq!(count(&peers), SHARE.split(10));
}

#[test]
fn a_pod_that_appears_takes_the_place_of_its_reservation() {
    let index = Index::default();
    for i in 0..10 {
        let placed = place(&index, 10, *NOW, true);
        index.update(&key(&i.to_string()), Some(pod(placed)));
    }
    let state = index.lock();
    assert_eq!((state.groups["rs"].pods.len(), state.groups["rs"].reserved.len()), (10, 0));
}

#[test]
fn a_dry_run_leaves_no_trace() {
    let index = Index::default();
    let first = place(&index, 3, *NOW, false);
    assert_eq!(place(&index, 3, *NOW, false), first);
    assert!(index.lock().groups.is_empty());
    // Nor on what is there.
    let placed = place(&index, 10, *NOW, true);
    index.update(&key("a"), Some(pod(placed)));
    let rest = |dry_runs: usize| {
        for _ in 0..dry_runs {
            let _ = place(&index, 10, *NOW, false);
        }
        index.lock().groups["rs"].credit
    };
    assert_eq!(rest(0), rest(7));
}

#[test]
fn a_creation_that_failed_is_forgotten_when_it_is_tried_again() {
    let index = Index::default();
    let first = place(&index, 1, *NOW, true);
    assert_eq!(place(&index, 1, *NOW + seconds(2), true), first);
    // Without a ReplicaSet to compare with, it takes longer.
    let index = Index::default();
    let again = |now| index.place("rs", None, now, true, |p| p.assigned, serial).rank;
    assert_eq!((again(*NOW), again(*NOW + seconds(2)), again(*NOW + seconds(40))), (1, 2, 1));
}

#[test]
fn a_pod_that_is_gone_leaves_nothing_behind() {
    let index = Index::default();
    let placed = place(&index, 1, *NOW, true);
    index.update(&key("a"), Some(pod(placed)));
    assert_eq!(index.update(&key("a"), None).len(), 1);
    assert!(index.lock().groups.is_empty() && index.lock().owners.is_empty());
}

#[test]
fn owners_whose_pods_never_came_leave_nothing_behind() {
    let index = Index::default();
    for i in 0..100 {
        index.place(&i.to_string(), None, *NOW, true, |p| p.assigned, serial);
    }
    index.place("rs", None, *NOW + EXPIRES, true, |p| p.assigned, serial);
    assert_eq!(index.lock().groups.len(), 1);
}

#[test]
fn a_pod_that_ends_does_not_take_away_the_place_reserved_for_its_successor() {
    let index = Index::default();
    let placed = place(&index, 1, *NOW, true);
    index.update(&key("old"), Some(pod(placed)));
    let ends = |p: &PodFacts| (!p.terminating).then_some(Class::OnDemand);
    let ending = Arc::new(PodFacts { terminating: true, ..(*pod(placed)).clone() });
    index.update(&key("old"), Some(Arc::clone(&ending)));
    let successor = index.place("rs", Some(1), *NOW, true, ends, serial);
    assert_eq!(successor.rank, placed.rank);
    index.update(&key("old"), Some(ending));
    let another = index.place("rs", Some(2), *NOW, true, ends, serial);
    assert_ne!(another.rank, placed.rank, "one place was given twice");
}
