use rstest::rstest;

use super::*;

fn rules() -> Rules {
    Rules { backfill: true, ..built_in(&common()) }
}

/// Joined while nobody was there to taint it.
fn missed() -> NodeFacts {
    node("n").without(KEY)
}

fn seen(rules: &Rules, node: &NodeFacts, user_pods: bool) -> Verdict {
    let seen = Seen { node, daemon_sets: &[], pods: &[], user_pods };
    decide(rules, &seen, at(60)).verdicts.remove(0).1
}

#[rstest]
#[case::idle(missed(), Verdict::Taint)]
#[case::completed(missed().annotate(keys::STARTUP_COMPLETED_AT, "1763000001"), Verdict::Leave(Leave::NotHeld))]
#[case::empty_completion_is_none(missed().annotate(keys::STARTUP_COMPLETED_AT, ""), Verdict::Taint)]
#[case::control_plane(missed().label("node-role.kubernetes.io/control-plane", ""), Verdict::Leave(Leave::NotHeld))]
#[case::old_control_plane(missed().label("node-role.kubernetes.io/master", ""), Verdict::Leave(Leave::NotHeld))]
#[case::system_pool(missed().label("kubernetes.azure.com/mode", "system"), Verdict::Leave(Leave::NotHeld))]
#[case::user_pool(missed().label("kubernetes.azure.com/mode", "user"), Verdict::Taint)]
#[case::going(NodeFacts { deleting: true, ..missed() }, Verdict::Leave(Leave::Deleting))]
#[case::foreign_value_in_our_place(missed().taint(KEY, "other", "NoSchedule"), Verdict::Leave(Leave::NotHeld))]
fn backfill_takes_only_idle_nodes_that_were_missed(#[case] node: NodeFacts, #[case] expected: Verdict) {
    assert_eq!(seen(&rules(), &node, false), expected);
}

#[test]
fn a_busy_node_is_left_alone() {
    assert_eq!(seen(&rules(), &missed(), true), Verdict::Leave(Leave::NotHeld));
}

#[test]
fn nobody_is_tainted_late_while_too_many_time_out() {
    let stopped = Rules { stopped: ["initializing".to_owned()].into(), ..rules() };
    assert_eq!(seen(&stopped, &missed(), false), Verdict::Leave(Leave::NotHeld));
}

#[test]
fn backfill_is_off_unless_asked_for() {
    assert_eq!(seen(&built_in(&common()), &missed(), false), Verdict::Leave(Leave::NotHeld));
}

#[rstest]
#[case::anybodys("default", Some("ReplicaSet"), false, true)]
#[case::bare("default", None, false, true)]
#[case::daemon("default", Some("DaemonSet"), false, false)]
#[case::finished("default", Some("Job"), true, false)]
#[case::system("kube-system", Some("ReplicaSet"), false, false)]
#[case::public("kube-public", None, false, false)]
fn who_counts_as_a_user_pod(
    #[case] namespace: &str,
    #[case] owner: Option<&str>,
    #[case] finished: bool,
    #[case] expected: bool,
) {
    assert_eq!(counts_as_user_pod(namespace, owner, finished), expected);
}

#[test]
fn the_late_taint_says_since_when_and_fails_on_a_node_completed_meanwhile() {
    let node = missed();
    let seen = Seen { node: &node, daemon_sets: &[], pods: &[], user_pods: false };
    let patch = decide(&rules(), &seen, at(60)).patch(&node, at(60)).unwrap();
    let written = apply(&patch, &as_json(&node)).unwrap();
    assert_eq!(
        written["spec"]["taints"][1],
        json!({"key": KEY, "value": "wait", "effect": "NoSchedule", "timeAdded": "2025-11-13T02:14:20Z"})
    );
    let completed = node.annotate(keys::STARTUP_COMPLETED_AT, "1763000001");
    assert!(apply(&patch, &as_json(&completed)).is_err());
}

#[test]
fn a_node_with_no_taints_gets_a_list() {
    let bare = NodeFacts { taints: Vec::new(), annotations: Labels::new(), ..missed() };
    let seen = Seen { node: &bare, daemon_sets: &[], pods: &[], user_pods: false };
    let patch = decide(&rules(), &seen, at(60)).patch(&bare, at(60)).unwrap();
    assert_eq!(apply(&patch, &as_json(&bare)).unwrap()["spec"]["taints"][0]["key"], KEY);
}

#[test]
fn both_phases_are_added_at_once_and_never_again_between_them() {
    let rules = Rules { backfill: true, ..two_phases(&common()) };
    let node = missed();
    let seen = Seen { node: &node, daemon_sets: &[], pods: &[], user_pods: false };
    let patch = decide(&rules, &seen, at(60)).patch(&node, at(60)).unwrap();
    let written = apply(&patch, &as_json(&node)).unwrap();
    let keys: Vec<&str> =
        written["spec"]["taints"].as_array().unwrap().iter().map(|t| t["key"].as_str().unwrap()).collect();
    assert_eq!(keys, ["node.kubernetes.io/not-ready", "startup.k8s.io/preinit", KEY]);
    let between = super::node("n");
    assert_eq!(verdicts(&rules, &between, &[], &[], at(60))[0], Verdict::Leave(Leave::NotHeld));
}

#[test]
fn a_rule_of_the_clusters_own_is_not_backfilled() {
    let rules = custom(Draft { name: "gpu".to_owned(), all_daemon_sets: true, ..Draft::default() });
    assert_eq!(seen(&Rules { backfill: true, ..rules }, &missed(), false), Verdict::Leave(Leave::NotHeld));
}
