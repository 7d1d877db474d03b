use super::*;

const fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn started(moves: &[Move<u32>]) -> Vec<u32> {
    moves.iter().filter_map(|m| if let Move::Start(key) = m { Some(*key) } else { None }).collect()
}

fn with(max: usize, pods: &[(&str, std::ops::Range<u32>)]) -> Places<u32> {
    let mut places = Places::new(max);
    for (namespace, keys) in pods {
        keys.clone().for_each(|key| places.add(namespace, key, at(0)));
    }
    places
}

#[test]
fn one_namespace_alone_gets_every_place_in_order_of_arrival() {
    let mut places = with(10, &[("a", 0..200)]);
    assert_eq!(started(&places.settle(at(0))), (0..10).collect::<Vec<_>>());
    assert!(places.settle(at(100)).is_empty());
    places.remove(&3);
    assert_eq!(places.settle(at(101)), [Move::Start(10)]);
}

#[test]
fn ten_thousand_pods_of_one_namespace_do_not_starve_another() {
    let mut places = with(10, &[("a", 0..10_000)]);
    places.settle(at(0));
    places.add("b", 10_001, at(1));
    assert_eq!(places.settle(at(1)), [Move::Suspend(9), Move::Start(10_001)]);
    places.remove(&10_001);
    assert_eq!(places.settle(at(2)), [Move::Resume(9)]);
}

#[test]
fn places_are_split_evenly_between_those_who_want_them() {
    let mut places = with(10, &[("a", 0..100), ("b", 100..200), ("c", 200..202)]);
    let moves = places.settle(at(0));
    let of = |range: std::ops::Range<u32>| started(&moves).iter().filter(|key| range.contains(key)).count();
    assert_eq!((of(0..100), of(100..200), of(200..202)), (4, 4, 2));
    assert_eq!(places.running(), 10);
}

#[test]
fn a_settled_share_is_left_alone() {
    let mut places = with(3, &[("a", 0..100), ("b", 100..200)]);
    places.settle(at(0));
    assert!(places.settle(at(1_000)).is_empty());
}

#[test]
fn more_namespaces_than_places_take_turns() {
    let mut places = with(1, &[("a", 0..1), ("b", 1..2), ("c", 2..3)]);
    let mut ran = [0_u32; 3];
    let mut current = started(&places.settle(at(0)))[0];
    for second in 0..300 {
        ran[current as usize] += 1;
        for step in places.settle(at(second)) {
            if let Move::Start(key) | Move::Resume(key) = step {
                current = key;
            }
        }
        assert_eq!(places.running(), 1);
    }
    assert!(ran.iter().all(|seconds| (90..=110).contains(seconds)), "{ran:?}");
    assert!(places.next_turn().is_some());
}

#[test]
fn what_is_removed_holds_no_place() {
    let mut places = with(2, &[("a", 0..2)]);
    places.settle(at(0));
    places.remove(&0);
    places.remove(&1);
    assert_eq!((places.running(), places.next_turn()), (0, None));
}

fn run(rate: &mut Rate<&'static str>, from_millis: u64, to_millis: u64) -> Vec<&'static str> {
    let mut granted = Vec::new();
    for millis in from_millis..to_millis {
        while let Some(ticket) = rate.grant(Duration::from_millis(millis)) {
            granted.push(ticket);
        }
    }
    granted
}

#[test]
fn requests_per_second_are_kept() {
    let mut rate = Rate::new(100, at(0));
    (0..1_000).for_each(|_| rate.wait("a", "a"));
    assert_eq!(run(&mut rate, 0, 5_000).len(), 500);
}

#[test]
fn a_namespace_with_a_long_line_gets_only_its_share() {
    let mut rate = Rate::new(100, at(0));
    (0..10_000).for_each(|_| rate.wait("a", "a"));
    (0..100).for_each(|_| rate.wait("b", "b"));
    let granted = run(&mut rate, 0, 1_000);
    let b = granted.iter().filter(|ticket| **ticket == "b").count();
    assert!((49..=51).contains(&b), "{b} of {}", granted.len());
    let rest = run(&mut rate, 1_000, 3_000);
    assert_eq!(rest.iter().filter(|ticket| **ticket == "b").count(), 100 - b);
}

#[test]
fn nobody_waiting_means_no_wait_up_to_a_tenth_of_a_second() {
    let mut rate: Rate<()> = Rate::new(100, at(0));
    let taken = (0..100).filter(|_| rate.try_take(at(5))).count();
    assert_eq!(taken, 10);
    assert_eq!(rate.next_grant(), None);
    rate.wait("a", ());
    assert!(!rate.try_take(at(5)), "whoever waits comes first");
    let next = rate.next_grant().unwrap();
    assert!(next > at(5) && next <= at(5) + Duration::from_millis(11), "{next:?}");
    rate.give_back();
    assert!(rate.grant(at(5)).is_some());
}
