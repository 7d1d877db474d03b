use std::collections::BTreeMap;

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
    places.remove(&3, at(101));
    assert_eq!(places.settle(at(101)), [Move::Start(10)]);
}

#[test]
fn ten_thousand_pods_of_one_namespace_do_not_starve_another() {
    let mut places = with(10, &[("a", 0..10_000)]);
    places.settle(at(0));
    places.add("b", 10_001, at(1));
    assert_eq!(places.settle(at(1)), [Move::Suspend(9), Move::Start(10_001)]);
    places.remove(&10_001, at(2));
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
    places.remove(&0, at(1));
    places.remove(&1, at(1));
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

/// Warm-ups of so many seconds, second by second: what runs, and when each is through.
struct Node {
    places: Places<u32>,
    now: u64,
    pods: Vec<(&'static str, u64)>,
    running: Vec<u32>,
    /// Namespaces that had a place in the last second.
    served: Vec<&'static str>,
    done: BTreeMap<u32, u64>,
}

impl Node {
    fn new(max: usize) -> Self {
        Self {
            places: Places::new(max),
            now: 0,
            pods: Vec::new(),
            running: Vec::new(),
            served: Vec::new(),
            done: BTreeMap::new(),
        }
    }

    fn arrive(&mut self, namespace: &'static str, seconds: u64) -> u32 {
        let key = u32::try_from(self.pods.len()).unwrap();
        self.pods.push((namespace, seconds));
        self.places.add(namespace, key, at(self.now));
        key
    }

    fn second(&mut self) {
        for step in self.places.settle(at(self.now)) {
            match step {
                Move::Start(key) | Move::Resume(key) => self.running.push(key),
                Move::Suspend(key) => self.running.retain(|k| *k != key),
            }
        }
        self.now += 1;
        self.served = self.running.iter().map(|key| self.pods[*key as usize].0).collect();
        for key in std::mem::take(&mut self.running) {
            let left = &mut self.pods[key as usize].1;
            *left -= 1;
            if *left == 0 {
                self.places.remove(&key, at(self.now));
                self.done.insert(key, self.now);
            } else {
                self.running.push(key);
            }
        }
    }

    fn until_done(&mut self, key: u32) -> u64 {
        while !self.done.contains_key(&key) {
            self.second();
            assert!(self.now < 100_000, "never");
        }
        self.done[&key]
    }

    fn held(&self, namespace: &str) -> usize {
        self.running.iter().filter(|key| self.pods[**key as usize].0 == namespace).count()
    }

    fn waiting(&self, namespace: &str) -> usize {
        let present = |key: &u32| self.pods[*key as usize].0 == namespace && !self.done.contains_key(key);
        (0..self.pods.len() as u32).filter(present).count() - self.held(namespace)
    }
}

#[test]
fn ten_thousand_five_minute_warm_ups_cost_another_namespace_no_second() {
    let mut node = Node::new(10);
    for _ in 0..10_000 {
        node.arrive("crowd", 300);
    }
    (0..7).for_each(|_| node.second());
    let one = node.arrive("quiet", 30);
    assert_eq!(node.until_done(one), 7 + 30);
    // Ten at once get half of the places: two rounds.
    let ten: Vec<u32> = (0..10).map(|_| node.arrive("quiet", 30)).collect();
    let last = ten.into_iter().map(|key| node.until_done(key)).max();
    assert_eq!(last, Some(37 + 60));
    assert_eq!(node.held("crowd"), 5, "settled anew with the next second");
    node.second();
    assert_eq!(node.held("crowd"), 10);
}

#[test]
fn a_crowd_of_short_ones_does_not_keep_the_only_place() {
    let mut node = Node::new(1);
    for _ in 0..1_000 {
        node.arrive("crowd", 5);
    }
    node.second();
    let long = node.arrive("quiet", 60);
    assert!(node.until_done(long) <= 130, "half of the time is its own: {:?}", node.done.get(&long));
}

#[test]
fn a_five_minute_warm_up_of_ones_own_namespace_costs_its_own_place_only() {
    let mut node = Node::new(10);
    let long = node.arrive("a", 300);
    let short: Vec<u32> = (0..90).map(|_| node.arrive("a", 10)).collect();
    let last = short.into_iter().map(|key| node.until_done(key)).max();
    assert_eq!(last, Some(100), "nine places, ten rounds");
    assert_eq!(node.until_done(long), 300);
}

const NAMESPACES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(32))]

    #[test]
    fn everybody_gets_its_share_whatever_the_others_do(
        max in 1_usize..6,
        arrivals in proptest::collection::vec((0_usize..6, 0_u64..120, 1_u64..300), 1..60),
    ) {
        let mut node = Node::new(max);
        let mut without = [0_u64; 6];
        while node.done.len() < arrivals.len() {
            let now = node.now;
            for (who, _, seconds) in arrivals.iter().filter(|(_, at, _)| *at == now) {
                node.arrive(NAMESPACES[*who], *seconds);
            }
            let before = node.done.len();
            node.second();
            for (i, namespace) in NAMESPACES.iter().enumerate() {
                let waits = node.waiting(namespace) > 0 && !node.served.contains(namespace);
                without[i] = if waits { without[i] + 1 } else { 0 };
                let turns = u64::try_from(6_usize.div_ceil(max)).unwrap();
                proptest::prop_assert!(without[i] <= TURN.as_secs() * turns, "{without:?}");
            }
            // Only a second in which nobody left shows what was settled.
            if node.done.len() != before {
                continue;
            }
            let waiting = NAMESPACES.map(|n| node.waiting(n));
            let held = NAMESPACES.map(|n| node.held(n));
            let active = (0..6).filter(|i| waiting[*i] + held[*i] > 0).count();
            proptest::prop_assert!(node.running.len() <= max);
            if waiting.iter().sum::<usize>() > 0 {
                proptest::prop_assert_eq!(node.running.len(), max, "a place idles");
            }
            for i in 0..6 {
                if waiting[i] > 0 && active <= max {
                    proptest::prop_assert!(held[i] >= max / active, "{held:?} {waiting:?}");
                }
            }
            proptest::prop_assert!(node.now < 100_000);
        }
    }
}
