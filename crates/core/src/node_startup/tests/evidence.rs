use rstest::rstest;

use super::*;

fn tolerating(tolerations: Value) -> DaemonSetFacts {
    daemon_set_from("agent", json!({"containers": [], "tolerations": tolerations}))
}

fn own() -> Value {
    json!({"key": KEY, "operator": "Exists", "effect": "NoSchedule"})
}

fn not_ready_taint() -> Value {
    json!({"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoSchedule"})
}

fn first(rules: &Rules, node: &NodeFacts, set: DaemonSetFacts) -> Verdict {
    verdict(rules, node, &[set], &[])
}

#[test]
fn a_template_that_does_not_tolerate_the_taint_can_never_be_ready() {
    let taint = format!("{KEY}:NoSchedule");
    let unmet = vec![Unmet::CannotTolerate { daemon_set: agent(), taint }];
    let seen = first(&built_in(&common()), &node("n"), tolerating(json!([not_ready_taint()])));
    assert_eq!(seen.to_string(), format!("cannot ever be ready: {}", unmet[0]));
    assert_eq!(seen, Verdict::CannotEver { until: None, unmet });
}

#[test]
fn a_toleration_of_another_value_does_not_help() {
    let wrong = json!([not_ready_taint(), {"key": KEY, "operator": "Equal", "value": "true"}]);
    assert!(matches!(first(&built_in(&common()), &node("n"), tolerating(wrong)), Verdict::CannotEver { .. }));
}

#[rstest]
#[case::not_ready_yet("node.kubernetes.io/not-ready")]
#[case::cloud("node.cloudprovider.kubernetes.io/uninitialized")]
#[case::cni("node.cilium.io/agent-not-ready")]
#[case::other_startup("startup-taint.cluster-autoscaler.kubernetes.io/disk")]
fn a_taint_that_passes_makes_the_daemon_set_late_not_unwanted(#[case] key: &str) {
    let held = node("n").without("node.kubernetes.io/not-ready").taint(key, "", "NoSchedule");
    let unmet = Unmet::BlockedByTaint { daemon_set: agent(), taint: format!("{key}:NoSchedule") };
    assert_eq!(first(&built_in(&common()), &held, tolerating(json!([own()]))), waits_for(vec![unmet]));
}

#[rstest]
#[case::selector(json!({"containers": [], "nodeSelector": {"gpu": "true"}}))]
#[case::node_name(json!({"containers": [], "nodeName": "other"}))]
#[case::affinity(json!({"containers": [], "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
    "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]}}}}))]
fn a_daemon_set_that_belongs_elsewhere_is_not_waited_for(#[case] spec: Value) {
    assert_eq!(first(&built_in(&common()), &node("n"), daemon_set_from("agent", spec)), released());
}

#[test]
fn a_taint_that_stays_means_the_daemon_set_belongs_elsewhere() {
    let dedicated = node("n").taint("dedicated", "db", "NoSchedule");
    assert_eq!(first(&built_in(&common()), &dedicated, tolerating(json!([own(), not_ready_taint()]))), released());
    let preferred = node("n").taint("dedicated", "db", "PreferNoSchedule");
    let seen = first(&built_in(&common()), &preferred, tolerating(json!([own(), not_ready_taint()])));
    assert_eq!(seen, waits_for(vec![no_pod("agent")]), "PreferNoSchedule keeps nobody away");
}

#[test]
fn before_the_cloud_has_labelled_the_node_nobody_knows_who_belongs_there() {
    let fresh = node("n").taint("node.cloudprovider.kubernetes.io/uninitialized", "true", "NoSchedule");
    let gpu = || daemon_set_from("agent", json!({"containers": [], "nodeSelector": {"gpu": "true"}}));
    assert_eq!(first(&built_in(&common()), &fresh, gpu()), waits_for(vec![Unmet::Unlabelled]));
    let sets = [daemon_set("everywhere"), gpu(), DaemonSetFacts { named: Named::new("gpu", "other"), ..gpu() }];
    let others_ready = [pod("everywhere").ready()];
    let unlabelled = waits_for(vec![Unmet::Unlabelled]);
    assert_eq!(verdict(&built_in(&common()), &fresh, &sets, &others_ready), unlabelled, "one is here, two may come");
    let named = custom(Draft { daemon_sets: vec![agent()], ..draft() });
    let all = custom(Draft { all_daemon_sets: true, ..draft() });
    for rules in [named, all] {
        let held = fresh.clone().without(KEY).taint("example.com/gpu", "wait", "NoSchedule");
        let tolerant = daemon_set_from(
            "agent",
            json!({"containers": [], "nodeSelector": {"gpu": "true"}, "tolerations": [{"operator": "Exists"}]}),
        );
        assert_eq!(verdict(&rules, &held, &[tolerant], &[]), unlabelled);
    }
}

#[test]
fn no_label_of_the_cloud_moves_a_daemon_set_that_names_another_node() {
    let fresh = node("n").taint("node.cloudprovider.kubernetes.io/uninitialized", "true", "NoSchedule");
    let pinned = daemon_set_from("agent", json!({"containers": [], "nodeName": "other"}));
    assert_eq!(first(&built_in(&common()), &fresh, pinned), released());
}

#[test]
fn a_daemon_set_that_is_being_deleted_is_not_waited_for() {
    let going = DaemonSetFacts { deleting: true, ..daemon_set("old") };
    let sets = [going, daemon_set("agent")];
    assert_eq!(verdict(&built_in(&common()), &node("n"), &sets, &[pod("old"), pod("agent").ready()]), released());
}

#[rstest]
#[case::unready(pod("stray"), waits_for(vec![not_ready("stray")]))]
#[case::ready(pod("stray").ready(), released())]
fn an_init_pod_counts_before_its_daemon_set_is_known(#[case] stray: DaemonPod, #[case] expected: Verdict) {
    assert_eq!(verdict(&built_in(&common()), &node("n"), &[], &[stray]), expected);
}

#[test]
fn only_the_init_namespaces_count() {
    let rules = built_in(&Common { init_namespaces: vec!["platform".to_owned()], ..common() });
    let foreign = verdict(&rules, &node("n"), &[daemon_set("agent")], &[pod("agent").ready()]);
    assert_eq!(foreign, waits_for(vec![Unmet::NoInitDaemonSet]));
    let own = DaemonSetFacts { named: Named::new("platform", "agent"), ..daemon_set("agent") };
    let ready = DaemonPod { named: Named::new("platform", "agent-x"), ..pod("agent").ready() };
    assert_eq!(verdict(&rules, &node("n"), &[own], &[ready]), released());
}

#[test]
fn the_first_phase_must_tolerate_the_second_but_not_the_other_way_round() {
    let held = node("n").without("node.kubernetes.io/not-ready").taint(keys::STARTUP_PREINIT, "wait", "NoSchedule");
    let only = |key: &str| json!([{"key": key, "operator": "Exists"}]);
    let sets = [tolerating(only(keys::STARTUP_PREINIT)).component("preinit"), tolerating(only(KEY))];
    let seen = verdicts(&two_phases(&common()), &held, &sets, &[], at(9));
    assert!(matches!(&seen[0], Verdict::CannotEver { unmet, .. } if unmet[0].to_string().contains(KEY)));
    let blocked = Unmet::BlockedByTaint { daemon_set: agent(), taint: format!("{}:NoSchedule", keys::STARTUP_PREINIT) };
    assert_eq!(seen[1], waits_for(vec![blocked]));
}

fn draft() -> Draft {
    Draft { name: "gpu".to_owned(), taint_key: Some("example.com/gpu".to_owned()), ..Draft::default() }
}

fn gpu_node() -> NodeFacts {
    node("n").without(KEY).taint("example.com/gpu", "wait", "NoSchedule")
}

#[test]
fn a_named_daemon_set_must_exist_and_be_ready() {
    let rules = custom(Draft { daemon_sets: vec![agent()], ..draft() });
    let missing = verdict(&rules, &gpu_node(), &[], &[]);
    assert_eq!(missing, waits_for(vec![Unmet::MissingDaemonSet { daemon_set: agent() }]));
    let sets = [daemon_set("agent").component("whatever")];
    assert_eq!(
        verdict(&rules, &gpu_node(), &sets, &[pod("agent").component("x")]),
        waits_for(vec![not_ready("agent")])
    );
    assert_eq!(verdict(&rules, &gpu_node(), &sets, &[pod("agent").component("x").ready()]), released());
}

#[test]
fn all_daemon_sets_means_those_that_can_run_while_the_node_is_held() {
    let rules = custom(Draft { all_daemon_sets: true, ..draft() });
    let shy = daemon_set_from("shy", json!({"containers": []}));
    let elsewhere = daemon_set_from(
        "gpu",
        json!({"containers": [], "nodeSelector": {"gpu": "true"},
        "tolerations": [{"operator": "Exists"}]}),
    );
    let sets = [daemon_set("cni"), daemon_set("proxy"), shy, elsewhere];
    let seen = verdict(&rules, &gpu_node(), &sets, &[pod("cni").ready()]);
    assert_eq!(seen, waits_for(vec![no_pod("proxy")]));
    assert_eq!(verdict(&rules, &gpu_node(), &sets, &[pod("cni").ready(), pod("proxy").ready()]), released());
    assert_eq!(verdict(&rules, &gpu_node(), &[], &[]), released(), "none at all is all of them");
}

#[test]
fn node_conditions_are_evidence() {
    let rules = custom(Draft { conditions: vec![("GPUReady".to_owned(), "True".to_owned())], ..draft() });
    let absent = verdict(&rules, &gpu_node(), &[], &[]);
    assert_eq!(absent.to_string(), "condition GPUReady is absent, not True");
    assert!(verdict(&rules, &gpu_node().condition("GPUReady", "Unknown"), &[], &[]).holds());
    assert_eq!(verdict(&rules, &gpu_node().condition("GPUReady", "True"), &[], &[]), released());
}

#[test]
fn all_needs_of_a_rule_must_be_met_at_once() {
    let rules = custom(Draft {
        conditions: vec![("GPUReady".to_owned(), "True".to_owned())],
        daemon_sets: vec![agent()],
        ..draft()
    });
    let sets = [daemon_set("agent")];
    assert!(verdict(&rules, &gpu_node(), &sets, &[pod("agent").ready()]).holds());
    assert!(verdict(&rules, &gpu_node().condition("GPUReady", "True"), &sets, &[]).holds());
    let both = verdict(&rules, &gpu_node().condition("GPUReady", "True"), &sets, &[pod("agent").ready()]);
    assert_eq!(both, released());
}

#[rstest]
#[case::all_ready(&[("a", true), ("b", true)], true, true)]
#[case::one_unready(&[("a", true), ("b", false)], true, false)]
#[case::one_unreported(&[("a", true)], true, false)]
#[case::none_reported(&[], true, false)]
#[case::pod_unready(&[("a", true), ("b", true)], false, false)]
fn a_pod_is_ready_when_all_its_containers_and_itself_are(
    #[case] reports: &[(&str, bool)],
    #[case] pod_ready: bool,
    #[case] expected: bool,
) {
    assert_eq!(reports_ready(&["a", "b"], reports, pod_ready), expected);
}

#[rstest]
#[case("true", true)]
#[case("True", false)]
#[case("1", false)]
#[case("", false)]
fn the_early_ready_annotation_is_exactly_true(#[case] value: &str, #[case] expected: bool) {
    assert_eq!(annotated_ready(&map(&[(keys::STARTUP_READY, value)])), expected);
}

#[test]
fn daemon_pods_tolerate_what_their_controller_lets_them() {
    let plain = daemon_set_from("agent", json!({"containers": []}));
    let host = daemon_set_from("agent", json!({"containers": [], "hostNetwork": true}));
    let tired = node("n").without(KEY).without("node.kubernetes.io/not-ready");
    let tired = ["disk-pressure", "memory-pressure", "pid-pressure", "unschedulable", "network-unavailable"]
        .iter()
        .fold(tired, |node, key| node.taint(&format!("node.kubernetes.io/{key}"), "", "NoSchedule"))
        .taint("node.kubernetes.io/unreachable", "", "NoExecute");
    let blocking: Vec<&str> = plain.untolerated(&tired).map(|t| t.key.as_str()).collect();
    assert_eq!(blocking, ["node.kubernetes.io/network-unavailable"]);
    assert_eq!(host.untolerated(&tired).count(), 0);
}
