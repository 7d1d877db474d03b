use rstest::rstest;
use std::time::Duration;

use super::*;
use crate::node_startup::guard::Outcome;
use crate::node_startup::report::{Blockers, Reason, Tally, announce, outcome, would_hold};

fn timed(then: OnTimeout) -> Rules {
    built_in(&Common { timeout: Some(Timeout { after: Duration::from_secs(30), then }), ..common() })
}

fn told(rules: &Rules, pods: &[DaemonPod], now: Timestamp) -> (Reason, String) {
    let node = node("n");
    let verdict = verdicts(rules, &node, &[daemon_set("agent")], pods, now).remove(0);
    let told = announce(&rules.rules[0], &node, &verdict, now).unwrap();
    (told.reason, told.note)
}

#[test]
fn events_name_the_daemon_set_that_blocks_and_since_when() {
    let rules = timed(OnTimeout::Keep);
    let held = "initializing: held by startup.k8s.io/initializing=wait:NoSchedule: \
                pod agent-x7k2p of DaemonSet kube-system/agent is not ready";
    assert_eq!(told(&rules, &[pod("agent")], at(5)), (Reason::Held, held.to_owned()));
    let late =
        "initializing: after 31s: timed out and kept: pod agent-x7k2p of DaemonSet kube-system/agent is not ready";
    assert_eq!(told(&rules, &[pod("agent")], at(31)), (Reason::TimedOut, late.to_owned()));
    let done = "initializing: ready after 12s";
    assert_eq!(told(&rules, &[pod("agent").ready()], at(12)), (Reason::Completed, done.to_owned()));
}

#[test]
fn reasons_are_spelled_as_users_grep_them() {
    let names: Vec<(&str, bool)> = Reason::ALL.iter().map(|r| (r.name(), r.is_warning())).collect();
    let expected =
        [("StartupHeld", false), ("StartupCompleted", false), ("StartupTimedOut", true), ("InitPodCannotRun", true)];
    assert_eq!(names, expected);
}

#[test]
fn a_status_counts_and_names_nobody() {
    let rules = timed(OnTimeout::Keep);
    let sets = [daemon_set_from("agent", json!({"containers": []}))];
    let mut tally = Tally::default();
    tally.count(&verdicts(&rules, &node("a"), &[daemon_set("agent")], &[], at(5))[0]);
    tally.count(&verdicts(&rules, &node("b"), &[daemon_set("agent")], &[], at(50))[0]);
    tally.count(&verdicts(&rules, &node("c"), &sets, &[], at(5))[0]);
    tally.count(&verdicts(&rules, &node("d").without(KEY), &sets, &[], at(5))[0]);
    assert_eq!(tally, Tally { held: 3, timed_out: 1, cannot_run: 1, would_hold: 0 });
}

#[test]
fn a_node_counts_as_held_until_its_release_is_written() {
    let (rule, _) = Draft { name: "r".to_owned(), all_daemon_sets: true, deleting: true, ..Draft::default() }.compile();
    let held = node("n").taint(&rule.taint.key, "wait", "NoSchedule");
    let rules = Rules { rules: vec![rule], ..Rules::default() };
    let mut tally = Tally::default();
    tally.count(&verdict(&rules, &held, &[], &[]));
    assert_eq!(tally.held, 1, "the rule would go, and its taint with nobody to lift it stay");
}

#[test]
fn blockers_are_counted_with_the_first_node_that_waits() {
    let rules = built_in(&common());
    let sets = [daemon_set("agent"), daemon_set("cni")];
    let mut blockers = Blockers::default();
    blockers.count(&verdicts(&rules, &node("a"), &sets, &[], at(9))[0], at(7));
    blockers.count(&verdicts(&rules, &node("b"), &sets, &[pod("agent").ready()], at(9))[0], at(3));
    let of = |name: &str| blockers.0[&Named::new("kube-system", name)];
    assert_eq!((of("agent"), of("cni")), ((1, at(7)), (2, at(3))));
}

fn ended(rules: &Rules, node: &NodeFacts, pods: &[DaemonPod], now: Timestamp) -> Option<(Outcome, Timestamp)> {
    let sets = [daemon_set("agent")];
    let seen = Seen { node, daemon_sets: &sets, pods, user_pods: false };
    let verdict = &decide(rules, &seen, now).verdicts[0].1;
    outcome(rules, &rules.rules[0], &seen, verdict, false, now)
}

#[rstest]
#[case::still_held(node("n"), &[], 5, None)]
#[case::ready(node("n"), &[pod("agent").ready()], 5, Some((Outcome::Ready, at(5))))]
#[case::overdue_since_its_deadline(node("n"), &[], 50, Some((Outcome::TimedOut, at(30))))]
#[case::completed_before_a_restart(node("n").without(KEY).annotate(keys::STARTUP_COMPLETED_AT, "1763000009"), &[], 50,
    Some((Outcome::Ready, at(9))))]
#[case::let_go_unready(gone_late(), &[], 50, Some((Outcome::TimedOut, at(9))))]
#[case::let_go_and_ready_since(gone_late(), &[pod("agent").ready()], 50, Some((Outcome::Ready, at(9))))]
#[case::never_held(node("n").without(KEY), &[], 50, None)]
fn outcomes_feed_the_guard(
    #[case] node: NodeFacts,
    #[case] pods: &[DaemonPod],
    #[case] now: i64,
    #[case] expected: Option<(Outcome, Timestamp)>,
) {
    assert_eq!(ended(&timed(OnTimeout::Keep), &node, pods, at(now)), expected);
}

/// A node without the taint of a rule of the cluster's own, which held it before; 30 seconds is its patience.
fn ended_custom(then: OnTimeout, deleting: bool, pods: &[DaemonPod], now: i64) -> Option<(Outcome, Timestamp)> {
    let timeout = Some(Duration::from_secs(30));
    let draft =
        Draft { name: "r".to_owned(), daemon_sets: vec![agent()], timeout, on_timeout: then, ..Draft::default() };
    let (rules, node, sets) = (custom(draft), NodeFacts { deleting, ..node("n") }, [daemon_set("agent")]);
    let seen = Seen { node: &node, daemon_sets: &sets, pods, user_pods: false };
    let verdict = &decide(&rules, &seen, at(now)).verdicts[0].1;
    outcome(&rules, &rules.rules[0], &seen, verdict, true, at(now))
}

#[rstest]
#[case::let_go_unready(OnTimeout::Release, false, &[], 31, Some((Outcome::TimedOut, at(30))))]
#[case::ready_since(OnTimeout::Release, false, &[pod("agent").ready()], 40, Some((Outcome::Ready, at(40))))]
#[case::let_go_by_hand(OnTimeout::Release, false, &[], 20, Some((Outcome::Ready, at(20))))]
#[case::overdue_and_let_go_by_hand(OnTimeout::Keep, false, &[], 40, Some((Outcome::Ready, at(40))))]
#[case::thrown_away(OnTimeout::Release, true, &[], 20, None)]
fn a_node_that_a_rule_held_and_holds_no_more_counts_for_how_it_was_let_go(
    #[case] then: OnTimeout,
    #[case] deleting: bool,
    #[case] pods: &[DaemonPod],
    #[case] now: i64,
    #[case] expected: Option<(Outcome, Timestamp)>,
) {
    assert_eq!(ended_custom(then, deleting, pods, now), expected);
}

fn gone_late() -> NodeFacts {
    let node = node("n").without(KEY);
    node.annotate(keys::STARTUP_COMPLETED_AT, "1763000009").annotate(keys::STARTUP_TIMED_OUT_AT, "1763000009")
}

#[test]
fn a_dry_rule_says_whom_it_would_hold() {
    let dry = |dry_run| custom(Draft { name: "r".to_owned(), daemon_sets: vec![agent()], dry_run, ..Draft::default() });
    let (node, sets) = (node("n"), [daemon_set("agent")]);
    let held = |rules: &Rules, pods: &[DaemonPod]| {
        would_hold(rules, &rules.rules[0], &Seen { node: &node, daemon_sets: &sets, pods, user_pods: false })
    };
    assert!(held(&dry(true), &[pod("agent")]));
    assert!(!held(&dry(true), &[pod("agent").ready()]));
    assert!(!held(&dry(false), &[pod("agent")]));
}
