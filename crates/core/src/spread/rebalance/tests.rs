use proptest::prelude::*;
use rstest::rstest;

use super::super::memory::Drought;
use super::super::place::{Credit, next};
use super::super::split::Share;
use super::*;
use crate::cron::{Schedule, Window};

const NOW: Timestamp = Timestamp::constant(1_800_000_000, 0);

fn rule(percentage: u8, floor: u32) -> Rule {
    Rule { share: Share { percentage, floor }, window: None }
}

fn at(seconds: i64) -> Timestamp {
    later(NOW, Duration::from_secs(u64::try_from(seconds).unwrap()))
}

/// A stable Deployment with so many pods on spot and on-demand.
struct World {
    workload: Workload,
    pods: Vec<Pod>,
    memory: Memory,
    takes: bool,
    turn: bool,
}

fn pod(name: usize, class: Class) -> Pod {
    Pod {
        name: format!("p{name:03}"),
        uid: format!("u{name}"),
        version: "1".into(),
        class,
        bound: true,
        ready: true,
        terminating: false,
        leaving: false,
        exempt: false,
        unschedulable_since: None,
        rank: None,
        own_cost: true,
        ordinal: None,
        budgets: Budgets::Allow,
    }
}

fn world(kind: Kind, spot: u32, on_demand: u32) -> World {
    let replicas = spot + on_demand;
    let classes = (0..replicas).map(|i| if i < spot { Class::Spot } else { Class::OnDemand });
    let pods = classes.enumerate().map(|(i, class)| {
        let ordinal = (kind == Kind::StatefulSet).then(|| u32::try_from(i).unwrap());
        Pod { ordinal, ..pod(i, class) }
    });
    let workload = Workload {
        kind,
        ending: false,
        paused: false,
        generation: 1,
        observed_generation: 1,
        replicas,
        current: replicas,
        ready: replicas,
        updated: replicas,
        available: replicas,
        first_ordinal: 0,
    };
    World { workload, pods: pods.collect(), memory: Memory::default(), takes: true, turn: true }
}

impl World {
    fn decide(&self, rule: &Rule, now: Timestamp) -> Verdict {
        let seen = Seen { workload: &self.workload, pods: &self.pods, memory: &self.memory, turn: self.turn };
        decide(rule, Limits::default(), seen, |_| self.takes, now)
    }

    /// The pod's successor, on the class that `land` says.
    fn replace(&mut self, name: &str, land: impl Fn(Class) -> Class) {
        let pod = self.pods.iter_mut().find(|p| p.name == name).unwrap();
        pod.class = land(pod.class);
        pod.uid.push('+');
    }

    fn why(&self, rule: &Rule) -> Why {
        match self.decide(rule, NOW) {
            Verdict::Rest { why, .. } | Verdict::Remember { why, .. } => why,
            other => panic!("{other:?}"),
        }
    }
}

fn deployment(spot: u32, on_demand: u32) -> World {
    world(Kind::Deployment, spot, on_demand)
}

#[test]
fn an_exact_split_rests() {
    assert_eq!(deployment(6, 4).why(&rule(60, 2)), Why::Balanced);
}

#[test]
fn a_pod_of_the_class_with_too_many_makes_way() {
    match deployment(9, 1).decide(&rule(60, 2), NOW) {
        Verdict::Move { from: Class::Spot, to: Class::OnDemand, memory, .. } => {
            assert_eq!((memory.moved, memory.moving.unwrap().excess), (Some(NOW), 3));
        }
        other => panic!("{other:?}"),
    }
}

type Change = fn(&mut World);

#[rstest]
#[case::paused(|w: &mut World| w.workload.paused = true, Why::Unstable(Unstable::Paused))]
#[case::unobserved(|w: &mut World| w.workload.generation = 2, Why::Unstable(Unstable::Unobserved))]
#[case::rollout(|w: &mut World| w.workload.updated = 3, Why::Unstable(Unstable::Rollout))]
#[case::surge(|w: &mut World| w.workload.current = 11, Why::Unstable(Unstable::Rollout))]
#[case::scaled(|w: &mut World| w.workload.replicas = 11, Why::Unstable(Unstable::Rollout))]
#[case::unready(|w: &mut World| w.workload.ready = 9, Why::Unstable(Unstable::Unavailable))]
#[case::unavailable(|w: &mut World| w.workload.available = 9, Why::Unstable(Unstable::Unavailable))]
#[case::terminating(|w: &mut World| w.pods[0].terminating = true, Why::Unstable(Unstable::Pods))]
#[case::missing(|w: &mut World| { w.pods.pop(); }, Why::Unstable(Unstable::Pods))]
#[case::status_is_ahead_of_the_pods(|w: &mut World| w.pods[3].ready = false, Why::Unstable(Unstable::Unready))]
#[case::unbound(|w: &mut World| w.pods[3].bound = false, Why::Unstable(Unstable::Unready))]
#[case::cooldown(|w: &mut World| w.memory.moved = Some(NOW - jiff::SignedDuration::from_secs(9)), Why::Cooldown)]
#[case::exempt(|w: &mut World| w.pods.iter_mut().for_each(|p| p.exempt = true), Why::Exempt)]
#[case::no_node(|w: &mut World| w.takes = false, Why::NoNode(Class::OnDemand))]
#[case::budget(
    |w: &mut World| w.pods.iter_mut().for_each(|p| p.budgets = Budgets::Deny("b".into())), Why::Budget(Budgets::Deny("b".into())))]
#[case::turn(|w: &mut World| w.turn = false, Why::Turn)]
#[case::deleted(|w: &mut World| w.workload.ending = true, Why::Nothing)]
fn each_condition_alone_keeps_the_pod(#[case] change: Change, #[case] why: Why) {
    let mut world = deployment(9, 1);
    change(&mut world);
    assert_eq!(world.why(&rule(60, 2)), why);
}

#[test]
fn outside_its_window_a_workload_wakes_when_it_opens() {
    let window = Window { schedule: Schedule::parse("0 2 * * *").unwrap(), duration: Duration::from_secs(60) };
    let rule = Rule { window: Some(window), ..rule(60, 2) };
    let opens: Timestamp = "2027-01-16T02:00:00Z".parse().unwrap();
    assert_eq!(deployment(9, 1).decide(&rule, NOW), Verdict::Rest { why: Why::Window, until: Some(opens) });
    assert!(matches!(deployment(9, 1).decide(&rule, opens), Verdict::Move { .. }));
}

#[test]
fn a_pod_whose_budget_allows_it_goes_though_others_may_not() {
    let mut world = deployment(9, 1);
    world.pods.iter_mut().for_each(|p| p.budgets = Budgets::Several(vec!["a".into(), "b".into()]));
    world.pods[4].budgets = Budgets::Allow;
    assert!(matches!(world.decide(&rule(60, 2), NOW), Verdict::Move { pod, .. } if pod.name == "p004"));
}

#[test]
fn pods_of_leaving_nodes_are_neither_counted_nor_moved() {
    let mut world = deployment(7, 3);
    world.pods[0].leaving = true;
    assert_eq!(world.why(&rule(60, 2)), Why::Balanced);
    world.pods.iter_mut().filter(|p| p.class == Class::OnDemand).for_each(|p| p.leaving = true);
    assert_eq!(world.why(&rule(60, 4)), Why::Balanced);
}

#[test]
fn a_stateful_set_moves_its_highest_ordinal_whose_slot_is_of_the_other_class() {
    let world = world(Kind::StatefulSet, 0, 6);
    // Slots: on-demand, spot, on-demand, spot, on-demand, spot.
    assert!(matches!(world.decide(&rule(50, 0), NOW), Verdict::Move { pod, .. } if pod.name == "p005"));
}

#[test]
fn ordinals_may_start_later() {
    let mut world = world(Kind::StatefulSet, 0, 6);
    world.workload.first_ordinal = 1;
    world.pods.iter_mut().for_each(|p| p.ordinal = p.ordinal.map(|o| o + 1));
    assert!(matches!(world.decide(&rule(50, 0), NOW), Verdict::Move { pod, .. } if pod.name == "p005"));
}

#[test]
fn two_moves_that_do_not_help_are_the_last_until_something_changes() {
    let rule = rule(60, 2);
    let mut world = deployment(9, 1);
    let mut now = NOW;
    let mut moves = 0;
    for _ in 0..20 {
        now = later(now, Duration::from_secs(11));
        match world.decide(&rule, now) {
            // The replacement lands on the same class again, not admitted by us.
            Verdict::Move { pod, memory, .. } => {
                (world.memory, moves) = (memory, moves + 1);
                world.replace(&pod.name, |class| class);
            }
            Verdict::Remember { memory, .. } => world.memory = memory,
            Verdict::Rest { why, .. } => assert_eq!(why, Why::NoProgress),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(moves, 2);
    world.workload.generation = 2;
    world.workload.observed_generation = 2;
    assert!(matches!(world.decide(&rule, now), Verdict::Move { .. }));
}

#[test]
fn a_move_is_over_when_its_workload_is_at_rest_and_the_next_waits_for_the_cooldown() {
    let rule = rule(60, 2);
    let mut world = deployment(9, 1);
    let Verdict::Move { pod, memory, .. } = world.decide(&rule, NOW) else { panic!() };
    world.memory = memory;
    // The cache has not seen the eviction yet.
    assert_eq!(world.decide(&rule, at(1)), Verdict::Rest { why: Why::Cooldown, until: Some(at(10)) });
    world.replace(&pod.name, Class::other);
    let Verdict::Remember { why: Why::Cooldown, memory } = world.decide(&rule, at(3)) else { panic!() };
    assert_eq!((memory.moving.as_ref(), memory.moved), (None, Some(NOW)), "it counts no more, but is not forgotten");
    world.memory = memory;
    assert_eq!(world.decide(&rule, at(9)), Verdict::Rest { why: Why::Cooldown, until: Some(at(10)) });
    assert!(matches!(world.decide(&rule, at(10)), Verdict::Move { .. }));
}

#[test]
fn an_eviction_that_got_lost_is_no_move_and_is_tried_again() {
    let rule = rule(60, 2);
    let mut world = deployment(9, 1);
    let mut now = NOW;
    for _ in 0..5 {
        now = later(now, Duration::from_secs(11));
        let Verdict::Move { memory, .. } = world.decide(&rule, now) else { panic!("given up for nothing") };
        world.memory = memory;
    }
    assert_eq!(world.memory.futile, 0);
}

#[test]
fn pods_that_wait_for_spot_in_vain_are_replaced_and_return_one_first() {
    let rule = rule(100, 0);
    let mut world = deployment(4, 0);
    world.workload.ready = 3;
    world.pods[3].bound = false;
    world.pods[3].ready = false;
    world.pods[3].unschedulable_since = Some(NOW);
    assert_eq!(
        world.decide(&rule, at(30)),
        Verdict::Rest { why: Why::Unstable(Unstable::Unavailable), until: Some(at(60)) }
    );
    let Verdict::Remember { why: Why::Dry, memory } = world.decide(&rule, at(60)) else { panic!() };
    assert_eq!(memory.drought, Some(Drought { since: at(60), cap: 0, times: 1, trial: false }));
    world.memory = memory;
    assert_eq!(world.decide(&rule, at(60)), Verdict::Rest { why: Why::Dry, until: Some(at(61)) });
    assert!(matches!(world.decide(&rule, at(61)), Verdict::Replace { pod, to: Class::OnDemand } if pod.name == "p003"));

    world.pods[3] = pod(4, Class::OnDemand);
    world.workload.ready = 4;
    assert_eq!(world.decide(&rule, at(120)), Verdict::Rest { why: Why::Drought, until: Some(at(660)) });
    let Verdict::Remember { why: Why::Return, memory } = world.decide(&rule, at(660)) else { panic!() };
    world.memory = memory;
    assert_eq!(world.memory.spot_cap(), Some(4));
    let Verdict::Move { to: Class::Spot, memory, .. } = world.decide(&rule, at(661)) else { panic!() };
    world.memory = memory;
    world.pods[3] = pod(5, Class::Spot);
    let Verdict::Remember { why: Why::DroughtOver, memory } = world.decide(&rule, at(700)) else { panic!() };
    assert!(memory.is_empty(), "{memory:?}");
}

fn waiting(pod: Pod, since: Timestamp) -> Pod {
    Pod { bound: false, ready: false, unschedulable_since: Some(since), ..pod }
}

impl World {
    /// One pod anew, as admission places it while spot takes nothing.
    fn recreate(&mut self, rule: &Rule, at: usize, now: Timestamp) {
        let lost = self.pods.remove(at);
        let peers: Vec<Peer> = self.pods.iter().map(|p| Peer { class: p.class, rank: p.rank }).collect();
        let wanted = Some(self.workload.replicas);
        let class = next(rule.share, wanted, &peers, self.memory.spot_cap(), &mut Credit::default()).class;
        let new = Pod { name: lost.name + "+", uid: lost.uid + "+", ..pod(0, class) };
        self.pods.insert(at, if class == Class::Spot { waiting(new, now) } else { new });
    }
}

/// Nodes of spot are lost one after the other: what each loss leaves without a node ends on on-demand.
#[test]
fn in_a_drought_spot_that_is_lost_later_falls_back_too() {
    let rule = rule(100, 0);
    let mut world = deployment(4, 0);
    let mut now = NOW;
    for lost in [0..2, 2..4] {
        lost.for_each(|at| world.recreate(&rule, at, now));
        for _ in 0..4 {
            now = later(now, Duration::from_secs(60));
            match world.decide(&rule, now) {
                Verdict::Remember { memory, .. } => world.memory = memory,
                Verdict::Replace { pod, .. } => {
                    let at = world.pods.iter().position(|p| p.name == pod.name).unwrap();
                    world.recreate(&rule, at, now);
                }
                _ => {}
            }
        }
        assert!(world.pods.iter().all(|p| p.bound), "{:?}", world.pods);
    }
    assert_eq!(live(&world.pods), Split { spot: 0, on_demand: 4 });
}

#[test]
fn spot_falls_back_though_no_on_demand_node_is_there_yet() {
    let rule = rule(100, 0);
    let mut world = deployment(4, 0);
    world.takes = false;
    world.workload.ready = 3;
    world.pods[3] = waiting(pod(3, Class::Spot), NOW);
    let Verdict::Remember { why: Why::Dry, memory } = world.decide(&rule, at(60)) else { panic!() };
    world.memory = memory;
    assert!(matches!(world.decide(&rule, at(61)), Verdict::Replace { pod, to: Class::OnDemand } if pod.name == "p003"));
}

#[test]
fn a_pod_that_waits_for_on_demand_as_well_tries_spot_when_the_workload_may_return() {
    let rule = rule(100, 0);
    let mut world = deployment(3, 1);
    world.workload.ready = 3;
    world.memory.drought = Some(Drought { since: NOW, cap: 0, times: 1, trial: false });
    world.pods[3] = waiting(pod(3, Class::OnDemand), NOW);
    assert!(matches!(world.decide(&rule, at(599)), Verdict::Rest { why: Why::Unstable(_), .. }));
    world.takes = false;
    assert!(matches!(world.decide(&rule, at(600)), Verdict::Rest { why: Why::Unstable(_), .. }));
    world.takes = true;
    let Verdict::Remember { why: Why::Return, memory } = world.decide(&rule, at(600)) else { panic!() };
    world.memory = memory;
    assert!(matches!(world.decide(&rule, at(601)), Verdict::Replace { pod, to: Class::Spot } if pod.name == "p003"));
    // Its successor waits, too: no other follows, and in the end the drought goes on.
    world.pods[3] = waiting(pod(4, Class::Spot), at(601));
    assert!(matches!(world.decide(&rule, at(602)), Verdict::Rest { why: Why::Unstable(_), .. }));
    let Verdict::Remember { why: Why::Dry, memory } = world.decide(&rule, at(661)) else { panic!() };
    assert_eq!(memory.drought, Some(Drought { since: at(661), cap: 0, times: 2, trial: false }));
    // One whose place is on on-demand has nothing to try.
    world.pods[3] = waiting(pod(5, Class::OnDemand), NOW);
    let half = Rule { share: Share { percentage: 75, floor: 0 }, window: None };
    assert!(matches!(world.decide(&half, at(9000)), Verdict::Rest { why: Why::Unstable(_), .. }));
}

/// Their nodes were cordoned when spot ran dry, and are not any more.
#[test]
fn a_drought_takes_nothing_away_that_runs_on_spot() {
    let rule = rule(100, 0);
    let mut world = deployment(3, 1);
    world.memory.drought = Some(Drought { since: NOW, cap: 0, times: 1, trial: false });
    assert_eq!(world.decide(&rule, at(60)), Verdict::Rest { why: Why::Drought, until: Some(at(600)) });
    let Verdict::Remember { why: Why::Return, memory } = world.decide(&rule, at(600)) else { panic!() };
    assert_eq!(memory.spot_cap(), Some(4));
    // A rule that wants less on spot is another matter.
    let fewer = Rule { share: Share { percentage: 50, floor: 0 }, window: None };
    assert!(matches!(world.decide(&fewer, at(60)), Verdict::Move { from: Class::Spot, .. }));
}

#[test]
fn a_trial_that_fails_waits_twice_as_long() {
    let rule = rule(100, 0);
    let mut world = deployment(4, 0);
    world.memory.drought = Some(Drought { since: NOW, cap: 4, times: 1, trial: true });
    world.workload.ready = 3;
    world.pods[3] = Pod { bound: false, ready: false, unschedulable_since: Some(at(600)), ..pod(9, Class::Spot) };
    let Verdict::Remember { memory, .. } = world.decide(&rule, at(660)) else { panic!() };
    world.memory = memory;
    world.pods[3] = pod(10, Class::OnDemand);
    world.workload.ready = 4;
    assert_eq!(world.decide(&rule, at(700)), Verdict::Rest { why: Why::Drought, until: Some(at(660 + 1200)) });
}

/// A node of spot would take the pod by all that is known of it, and does not: no use to try that for ever.
#[test]
fn two_trials_that_fail_are_the_last_until_something_changes() {
    let rule = rule(100, 0);
    let mut world = deployment(3, 1);
    world.memory.drought = Some(Drought { since: NOW, cap: 0, times: 1, trial: false });
    let (mut now, mut lost) = (NOW, 0);
    for look in 0..10_000 {
        now = later(now, Duration::from_secs(60));
        match world.decide(&rule, now) {
            Verdict::Remember { memory, .. } => world.memory = memory,
            Verdict::Move { memory, .. } => {
                (world.memory, lost) = (memory, lost + 1);
                world.pods[3] = Pod { rank: Some(4), ..waiting(pod(100 + look, Class::Spot), now) };
                world.workload.ready = 3;
            }
            Verdict::Replace { .. } => {
                world.pods[3] = Pod { rank: Some(4), ..pod(200 + look, Class::OnDemand) };
                world.workload.ready = 4;
            }
            Verdict::Rest { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(lost, 2, "pods that were well");
    assert!(matches!(world.decide(&rule, now), Verdict::Rest { why: Why::NoProgress, .. }));
    world.workload.generation = 2;
    world.workload.observed_generation = 2;
    assert!(matches!(world.decide(&rule, now), Verdict::Remember { why: Why::Return, .. }));
}

#[test]
fn ranks_are_mended_only_where_the_cost_is_ours() {
    let mut world = deployment(2, 2);
    assert_eq!(world.why(&rule(50, 0)), Why::Balanced);
    world.pods.iter_mut().for_each(|p| p.own_cost = false);
    let Verdict::Rank { pods } = world.decide(&rule(50, 0), NOW) else { panic!() };
    assert_eq!(pods.len(), 4);
}

proptest! {
    /// The replacement is admitted right: every start ends exact, after as many moves as pods were wrong.
    #[test]
    fn moving_ends_exact_and_never_lowers_the_floor(
        percentage in 0u8..=100, floor in 0u32..20, spot in 0u32..20, on_demand in 0u32..20, stateful in any::<bool>(),
    ) {
        let rule = rule(percentage, floor);
        let mut world = world(if stateful { Kind::StatefulSet } else { Kind::Deployment }, spot, on_demand);
        let wanted = rule.split(spot + on_demand);
        let wrong = live(&world.pods).spot.abs_diff(wanted.spot);
        let mut now = NOW;
        let mut moves = 0;
        for _ in 0..100 {
            now = later(now, Duration::from_secs(11));
            match world.decide(&rule, now) {
                Verdict::Move { pod: moved, from, memory, .. } => {
                    moves += 1;
                    world.memory = memory;
                    if from == Class::OnDemand {
                        prop_assert!(live(&world.pods).on_demand > floor.min(spot + on_demand));
                    }
                    let ordinal = world.pods.iter().find(|p| p.name == moved.name).unwrap().ordinal;
                    let admitted = ordinal.map(|ordinal| rule.share.class_of(ordinal + 1));
                    world.replace(&moved.name, |class| admitted.unwrap_or(class.other()));
                }
                Verdict::Remember { memory, .. } => world.memory = memory,
                Verdict::Rest { why, .. } => { prop_assert!(matches!(why, Why::Balanced | Why::Nothing)); break; }
                other => panic!("{other:?}"),
            }
        }
        prop_assert_eq!(moves, wrong);
        prop_assert_eq!(live(&world.pods), wanted);
        prop_assert!(world.memory.is_empty());
    }
}
