use proptest::prelude::*;
use rstest::rstest;

use super::*;
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);

fn init_only(pods: &[DaemonPod]) -> Verdict {
    verdict(&built_in(&common()), &node("n"), &[daemon_set("agent")], pods)
}

#[rstest]
#[case::ready(&[pod("agent").ready()], released())]
#[case::annotated_though_unready(&[pod("agent").annotated()], released())]
#[case::unready(&[pod("agent")], waits_for(vec![not_ready("agent")]))]
#[case::absent(&[], waits_for(vec![no_pod("agent")]))]
#[case::terminating(&[DaemonPod { ending: true, ..pod("agent").ready() }], waits_for(vec![no_pod("agent")]))]
#[case::older_than_the_node(&[DaemonPod { created: at(-1), ..pod("agent").ready() }], waits_for(vec![no_pod("agent")]))]
#[case::of_the_nodes_first_second(&[DaemonPod { created: at(0), ..pod("agent").ready() }], released())]
#[case::old_unready_beside_new_ready(&[pod("agent"), pod("agent").ready()], released())]
#[case::label_lost(&[pod("agent").ready().component("other")], waits_for(vec![no_pod("agent")]))]
fn the_init_pod_decides(#[case] pods: &[DaemonPod], #[case] expected: Verdict) {
    assert_eq!(init_only(pods), expected);
}

#[test]
fn taint_stays_while_one_of_two_init_daemon_sets_is_unready() {
    let sets = [daemon_set("agent"), daemon_set("cni")];
    let rules = built_in(&common());
    let one = verdict(&rules, &node("n"), &sets, &[pod("agent").ready(), pod("cni")]);
    assert_eq!(one, waits_for(vec![not_ready("cni")]));
    assert_eq!(verdict(&rules, &node("n"), &sets, &[pod("agent").ready(), pod("cni").ready()]), released());
}

#[test]
fn without_any_init_daemon_set_the_node_stays_held() {
    assert_eq!(verdict(&built_in(&common()), &node("n"), &[], &[]), waits_for(vec![Unmet::NoInitDaemonSet]));
}

#[test]
fn a_node_without_the_taint_is_left_alone() {
    let free = node("n").without(KEY);
    let verdict = verdict(&built_in(&common()), &free, &[daemon_set("agent")], &[pod("agent").ready()]);
    assert_eq!(verdict, Verdict::Leave(Leave::NotHeld));
}

#[test]
fn only_held_nodes_are_worth_a_look_unless_idle_ones_are_tainted_late() {
    let rules = built_in(&common());
    let free = node("n").without(KEY);
    assert!(rules.concern(&node("n").taints) && !rules.concern(&free.taints));
    assert!(Rules { backfill: true, ..rules }.concern(&free.taints));
}

#[rstest]
#[case::other_effect(KEY, "wait", "NoExecute")]
#[case::other_value(KEY, "forever", "NoSchedule")]
fn the_same_key_with_another_part_is_somebody_elses(#[case] key: &str, #[case] value: &str, #[case] effect: &str) {
    let foreign = node("n").without(KEY).taint(key, value, effect);
    let verdict = verdict(&built_in(&common()), &foreign, &[daemon_set("agent")], &[pod("agent").ready()]);
    assert_eq!(verdict, Verdict::Leave(Leave::NotHeld));
}

#[test]
fn a_node_on_its_way_out_is_left_alone() {
    let going = NodeFacts { deleting: true, ..node("n") };
    assert_eq!(
        verdict(&built_in(&common()), &going, &[daemon_set("agent")], &[pod("agent").ready()]),
        Verdict::Leave(Leave::Deleting)
    );
}

#[test]
fn annotation_only_mode_wants_the_annotation() {
    let rules = built_in(&Common { ready_by: ReadyBy::Annotation, ..common() });
    let waiting = Unmet::NotAnnotated { daemon_set: agent(), pod: "agent-x7k2p".to_owned() };
    let sets = [daemon_set("agent")];
    assert_eq!(verdict(&rules, &node("n"), &sets, &[pod("agent").ready()]), waits_for(vec![waiting]));
    assert_eq!(verdict(&rules, &node("n"), &sets, &[pod("agent").annotated()]), released());
}

#[test]
fn a_ready_node_is_held_for_the_shortest_hold() {
    let rules = built_in(&Common { min_hold: 30 * SECOND, ..common() });
    let (sets, pods) = ([daemon_set("agent")], [pod("agent").ready()]);
    let early = verdicts(&rules, &node("n"), &sets, &pods, at(29));
    assert_eq!(early, [Verdict::Wait { until: Some(at(30)), why: Waiting::MinHold }]);
    assert_eq!(verdicts(&rules, &node("n"), &sets, &pods, at(30)), [released()]);
}

fn with_timeout(then: OnTimeout) -> Rules {
    built_in(&Common { timeout: Some(Timeout { after: 300 * SECOND, then }), ..common() })
}

#[rstest]
#[case(OnTimeout::Keep, Verdict::Wait { until: None, why: Waiting::TimedOut(vec![not_ready("agent")]) })]
#[case(OnTimeout::Release, Verdict::Release(Released::TimedOut(vec![not_ready("agent")])))]
fn when_its_time_is_up_the_rule_says_keep_or_release(#[case] then: OnTimeout, #[case] expected: Verdict) {
    let (sets, pods) = ([daemon_set("agent")], [pod("agent")]);
    let before = verdicts(&with_timeout(then), &node("n"), &sets, &pods, at(299));
    assert_eq!(before, [Verdict::Wait { until: Some(at(300)), why: Waiting::For(vec![not_ready("agent")]) }]);
    let after = verdicts(&with_timeout(then), &node("n"), &sets, &pods, at(300));
    assert!(after[0].timed_out());
    assert_eq!(after, [expected]);
}

#[test]
fn an_overdue_node_that_becomes_ready_is_released_as_ready() {
    let late =
        verdicts(&with_timeout(OnTimeout::Keep), &node("n"), &[daemon_set("agent")], &[pod("agent").ready()], at(900));
    assert_eq!(late, [released()]);
}

#[test]
fn a_late_taint_counts_its_time_from_when_it_was_added() {
    let mut held = node("n");
    held.taints[1].time_added = Some(crate::timestamp::text(at(1000)));
    let seen = verdicts(&with_timeout(OnTimeout::Release), &held, &[daemon_set("agent")], &[], at(1100));
    assert_eq!(seen[0].until(), Some(at(1300)));
}

#[test]
fn phases_end_in_their_order() {
    let rules = two_phases(&common());
    let held = node("n").taint(keys::STARTUP_PREINIT, "wait", "NoSchedule");
    let sets = [daemon_set("early").component("preinit"), daemon_set("agent")];
    let late_first = [pod("agent").ready(), pod("early").component("preinit")];
    let waiting = Waiting::EarlierPhase { taint: "startup.k8s.io/preinit=wait:NoSchedule".to_owned() };
    assert_eq!(
        verdicts(&rules, &held, &sets, &late_first, at(9)),
        [waits_for(vec![not_ready("early")]), Verdict::Wait { until: None, why: waiting }]
    );
    let first_done = [pod("agent"), pod("early").component("preinit").ready()];
    assert_eq!(verdicts(&rules, &held, &sets, &first_done, at(9)), [released(), waits_for(vec![not_ready("agent")])]);
    let both = [pod("agent").ready(), pod("early").component("preinit").ready()];
    assert_eq!(verdicts(&rules, &held, &sets, &both, at(9)), [released(), released()]);
}

#[test]
fn each_phase_has_its_own_init_label() {
    let held = node("n").taint(keys::STARTUP_PREINIT, "wait", "NoSchedule");
    let seen = verdicts(&two_phases(&common()), &held, &[daemon_set("agent")], &[pod("agent").ready()], at(9));
    assert_eq!(seen[0], waits_for(vec![Unmet::NoInitDaemonSet]));
}

#[test]
fn a_retired_rule_lets_go_at_once() {
    let mut rules = built_in(&Common { min_hold: 3600 * SECOND, ..common() });
    rules.rules[0].retired = true;
    assert_eq!(verdict(&rules, &node("n"), &[], &[]), Verdict::Release(Released::RuleGone));
}

#[test]
fn the_next_look_is_at_the_nearest_deadline() {
    let rules = with_timeout(OnTimeout::Keep);
    let held = node("n");
    let seen = Seen { node: &held, daemon_sets: &[], pods: &[], user_pods: false };
    assert_eq!(decide(&rules, &seen, at(1)).next(), Some(at(300)));
    assert_eq!(decide(&rules, &seen, at(301)).next(), None, "an overdue node needs no timer");
}

#[test]
fn a_timeout_beyond_the_calendar_never_comes() {
    let timeout = Some(Timeout { after: Duration::MAX, then: OnTimeout::Release });
    let rules = built_in(&Common { timeout, ..common() });
    assert!(verdict(&rules, &node("n"), &[], &[]).holds());
}

#[test]
fn a_verdict_reads_as_a_sentence() {
    let seen = init_only(&[pod("agent")]).to_string();
    assert_eq!(seen, "pod agent-x7k2p of DaemonSet kube-system/agent is not ready");
    let rules = with_timeout(OnTimeout::Release);
    let late = verdicts(&rules, &node("n"), &[daemon_set("agent")], &[], at(301));
    assert_eq!(late[0].to_string(), "timed out and released: DaemonSet kube-system/agent has no live pod here");
    assert_eq!(held_for(&rules.rules[0], &node("n"), at(75)), "1m15s");
}

fn any_pod() -> impl Strategy<Value = DaemonPod> {
    (0..3_usize, any::<bool>(), any::<bool>(), any::<bool>(), -2..3_i64).prop_map(
        |(set, ending, annotated, ready, created)| DaemonPod {
            ending,
            annotated,
            ready,
            created: at(created),
            ..pod(["a", "b", "c"][set])
        },
    )
}

proptest! {
    /// S6: the release of every DaemonSet's live pod, and nothing less.
    #[test]
    fn released_exactly_when_every_init_daemon_set_has_a_live_ready_pod(
        pods in proptest::collection::vec(any_pod(), 0..7), sets in 1..4_usize,
    ) {
        let sets: Vec<DaemonSetFacts> = ["a", "b", "c"].into_iter().take(sets).map(daemon_set).collect();
        let known: Vec<DaemonPod> =
            pods.into_iter().filter(|p| sets.iter().any(|ds| ds.uid == p.owner_uid)).collect();
        let done = |ds: &DaemonSetFacts| known.iter().any(|p| {
            p.owner_uid == ds.uid && !p.ending && p.created >= BORN && (p.annotated || p.ready)
        });
        let verdict = verdict(&built_in(&common()), &node("n"), &sets, &known);
        prop_assert_eq!(verdict == released(), sets.iter().all(done));
    }

    /// More readiness never turns a release back into a wait.
    #[test]
    fn readiness_is_monotone(pods in proptest::collection::vec(any_pod(), 0..7), which in any::<prop::sample::Index>()) {
        let sets = [daemon_set("a"), daemon_set("b"), daemon_set("c")];
        let before = verdict(&built_in(&common()), &node("n"), &sets, &pods);
        let mut more = pods.clone();
        if !more.is_empty() {
            let at = which.index(more.len());
            more[at].ready = true;
        }
        let after = verdict(&built_in(&common()), &node("n"), &sets, &more);
        prop_assert!(before != released() || after == released());
    }
}
