use rstest::rstest;

use super::*;
use crate::node_startup::rule::{Invalid, orphaned, refuse_doubles};
use std::time::Duration;

fn draft(name: &str) -> Draft {
    Draft { name: name.to_owned(), all_daemon_sets: true, ..Draft::default() }
}

#[test]
fn the_built_in_rule_is_the_seeds() {
    let rules = built_in(&common());
    assert_eq!(rules.rules[0].taint.to_string(), "startup.k8s.io/initializing=wait:NoSchedule");
    assert_eq!(rules.rules.len(), 1);
}

#[test]
fn a_rules_own_taint_is_one_the_autoscaler_knows() {
    let (rule, _) = draft("gpu").compile();
    assert_eq!(rule.taint.to_string(), "startup-taint.cluster-autoscaler.kubernetes.io/gpu=wait:NoSchedule");
    let named = Draft {
        taint_key: Some("example.com/x".to_owned()),
        taint_value: Some("hold".to_owned()),
        effect: Some(Effect::NoExecute),
        ..draft("gpu")
    };
    assert_eq!(named.taint().to_string(), "example.com/x=hold:NoExecute");
}

#[rstest]
#[case::nothing(Draft { all_daemon_sets: false, ..draft("r") }, "spec.evidence is empty")]
#[case::hold(Draft { min_hold: Duration::from_secs(9), timeout: Some(Duration::from_secs(8)), ..draft("r") }, "spec.minHold")]
#[case::expression(Draft { expression: Some("node.".to_owned()), ..draft("r") }, "spec.evidence.expression")]
#[case::all_pods(Draft { init_pods: Some(LabelSelector::default()), ..draft("r") }, "say allDaemonSets")]
#[case::selector(Draft { node_selector: misfit(), ..draft("r") }, "spec.nodeSelector")]
#[case::taint_key(Draft { taint_key: Some("GPU driver".to_owned()), ..draft("r") }, "GPU driver=wait:NoSchedule is no taint")]
#[case::taint_value(Draft { taint_value: Some("not yet".to_owned()), ..draft("r") }, "spec.taint")]
#[case::name_too_long_for_its_key(draft(&"r".repeat(64)), "spec.taint")]
#[case::pods(Draft { init_pods: Some(misfit()), ..draft("r") }, "spec.evidence.initPods")]
fn a_rule_that_cannot_be_followed_says_why_and_taints_nobody(#[case] draft: Draft, #[case] reason: &str) {
    let (rule, invalid) = draft.compile();
    assert!(invalid.unwrap().to_string().contains(reason));
    assert!(!rule.taints());
}

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

fn pool(name: &str) -> LabelSelector {
    serde_json::from_value(json!({"matchLabels": {"pool": name}})).unwrap()
}

fn misfit() -> LabelSelector {
    serde_json::from_value(json!({"matchExpressions": [{"key": "a", "operator": "In"}]})).unwrap()
}

#[test]
fn what_a_broken_rule_holds_stays_held_until_it_is_mended() {
    let (rule, _) = Draft { expression: Some("nope".to_owned()), ..draft("r") }.compile();
    let held = node("n").taint(&rule.taint.key, "wait", "NoSchedule");
    let rules = Rules { rules: vec![rule], ..Rules::default() };
    assert!(matches!(verdict(&rules, &held, &[], &[]).unmet(), [Unmet::RuleBroken { .. }]));
}

#[test]
fn a_broken_rule_that_is_deleted_lets_go() {
    let (rule, invalid) = Draft { all_daemon_sets: false, deleting: true, ..draft("r") }.compile();
    let held = node("n").taint(&rule.taint.key, "wait", "NoSchedule");
    assert_eq!(invalid, Some(Invalid::NoEvidence));
    let rules = Rules { rules: vec![rule], ..Rules::default() };
    assert_eq!(verdict(&rules, &held, &[], &[]), Verdict::Release(Released::RuleGone));
}

#[test]
fn a_node_the_rule_no_longer_selects_is_let_go() {
    let selector = serde_json::from_value(json!({"matchLabels": {"pool": "gpu"}})).unwrap();
    let rules = custom(Draft { node_selector: selector, daemon_sets: vec![agent()], ..draft("gpu") });
    let held = node("n").taint(&rules.rules[0].taint.key, "wait", "NoSchedule");
    assert_eq!(verdict(&rules, &held, &[], &[]), Verdict::Release(Released::NotSelected));
    assert!(verdict(&rules, &held.label("pool", "gpu"), &[], &[]).holds());
}

#[test]
fn a_dry_rule_still_lets_go_of_what_it_held_before() {
    let rules = custom(Draft { dry_run: true, ..draft("r") });
    let held = node("n").taint(&rules.rules[0].taint.key, "wait", "NoSchedule");
    assert_eq!(verdict(&rules, &held, &[], &[]), released());
}

#[test]
fn two_rules_never_share_a_taint() {
    let taint_key = Some(KEY.to_owned());
    let mut rules = built_in(&common()).rules;
    rules.push(Draft { taint_key: taint_key.clone(), ..draft("thief") }.compile().0);
    rules.push(Draft { taint_key, effect: Some(Effect::NoExecute), ..draft("neighbour") }.compile().0);
    let refused = refuse_doubles(&mut rules);
    assert_eq!(refused, [("thief".to_owned(), Invalid::TaintTaken(KEY.to_owned()))].into());
    let tainting: Vec<&str> = rules.iter().filter(|rule| rule.taints()).map(|rule| rule.name.as_str()).collect();
    assert_eq!(tainting, ["initializing", "neighbour"]);
}

#[rstest]
#[case::means_other_nodes(Draft { node_selector: pool("gpu"), ..draft("thief") })]
#[case::deleted(Draft { deleting: true, ..draft("thief") })]
#[case::overdue(Draft { timeout: Some(Duration::from_secs(1)), on_timeout: OnTimeout::Release, ..draft("thief") })]
fn a_refused_rule_releases_nobody_whom_the_rule_with_that_taint_holds(#[case] thief: Draft) {
    let thief = Draft { taint_key: Some(KEY.to_owned()), ..thief };
    let mut rules = built_in(&common());
    rules.rules.push(thief.compile().0);
    refuse_doubles(&mut rules.rules);
    let held = node("n");
    let seen = Seen { node: &held, daemon_sets: &[daemon_set("agent")], pods: &[], user_pods: false };
    let decision = decide(&rules, &seen, at(60));
    assert!(decision.patch(&held, at(60)).is_none(), "{:?}", decision.verdicts);
}

#[test]
fn a_refused_rule_still_lets_go_of_its_own_value() {
    let mut rules = built_in(&common());
    let late = Draft { taint_key: Some(KEY.to_owned()), taint_value: Some("mine".to_owned()), ..draft("late") };
    rules.rules.push(Draft { deleting: true, ..late }.compile().0);
    assert_eq!(refuse_doubles(&mut rules.rules).len(), 1);
    let held = node("n").without(KEY).taint(KEY, "mine", "NoSchedule");
    assert_eq!(verdicts(&rules, &held, &[], &[], at(60))[1], Verdict::Release(Released::RuleGone));
}

#[test]
fn rules_release_independently_in_one_patch() {
    let mut rules = built_in(&common());
    rules.rules.push(Draft { daemon_sets: vec![agent()], all_daemon_sets: false, ..draft("gpu") }.compile().0);
    let key = rules.rules[1].taint.key.clone();
    let held = node("n").taint(&key, "wait", "NoSchedule");
    let sets = [daemon_set("agent")];
    let pods = [pod("agent").ready()];
    let seen = Seen { node: &held, daemon_sets: &sets, pods: &pods, user_pods: false };
    let patch = decide(&rules, &seen, at(60)).patch(&held, at(60)).unwrap();
    let written = apply(&patch, &as_json(&held)).unwrap();
    assert_eq!(written["spec"]["taints"].as_array().unwrap().len(), 1);
    assert_eq!(written["metadata"]["annotations"][keys::STARTUP_COMPLETED_AT], "1763000060");
}

#[test]
fn a_taint_that_no_rule_names_any_more_is_let_go_and_set_on_nobody() {
    let rules = built_in(&common()).rules;
    let old = TaintSpec::new("example.com/old");
    let recorded = [rules[0].taint.clone(), old.clone()];
    assert_eq!(orphaned(&rules, &recorded), std::slice::from_ref(&old));
    let past = Rule::of_the_past(old);
    let held = node("n").taint("example.com/old", "wait", "NoSchedule");
    let foreign = node("n").taint("example.com/old", "other", "NoSchedule");
    let rules = Rules { rules: vec![past], ..Rules::default() };
    assert_eq!(verdict(&rules, &held, &[], &[]), Verdict::Release(Released::RuleGone));
    assert_eq!(verdict(&rules, &foreign, &[], &[]), Verdict::Leave(Leave::NotHeld));
    assert!(!rules.holds_new(&rules.rules[0], &map(&[])));
}

#[test]
fn a_rule_with_the_name_of_a_phase_is_refused_and_taints_nobody() {
    let mut rules = built_in(&common()).rules;
    rules.push(draft("initializing").compile().0);
    let refused = refuse_doubles(&mut rules);
    assert_eq!(refused, [("initializing".to_owned(), Invalid::NameTaken("initializing".to_owned()))].into());
    assert!(rules[0].taints() && !rules[1].taints());
}
