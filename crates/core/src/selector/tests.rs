#![allow(clippy::needless_pass_by_value, reason = "literals read better by value")]

use proptest::prelude::*;
use rstest::rstest;
use serde_json::{Value, json};

use super::*;

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

fn selector(json: Value) -> Result<Selector, Misfit> {
    Selector::parse(&serde_json::from_value(json).unwrap())
}

fn placement(json: Value) -> Placement {
    Placement::of(&serde_json::from_value(json).unwrap())
}

fn affinity(terms: Value) -> Placement {
    placement(json!({"containers": [], "affinity": {"nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}}))
}

fn expression(key: &str, operator: &str, values: &[&str]) -> Value {
    json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]})
}

#[rstest]
#[case::empty_matches_all(json!({}), &[], true)]
#[case::label_equal(json!({"matchLabels": {"a": "1"}}), &[("a", "1"), ("b", "2")], true)]
#[case::label_other(json!({"matchLabels": {"a": "1"}}), &[("a", "2")], false)]
#[case::in_one_of(expression("a", "In", &["1", "2"]), &[("a", "2")], true)]
#[case::in_needs_the_key(expression("a", "In", &["1"]), &[], false)]
#[case::not_in_takes_absence(expression("a", "NotIn", &["1"]), &[], true)]
#[case::not_in_refuses_the_value(expression("a", "NotIn", &["1"]), &[("a", "1")], false)]
#[case::exists(expression("a", "Exists", &[]), &[("a", "")], true)]
#[case::does_not_exist(expression("a", "DoesNotExist", &[]), &[("a", "")], false)]
fn label_selectors_match_as_kubernetes_does(#[case] json: Value, #[case] on: &[(&str, &str)], #[case] expected: bool) {
    assert_eq!(selector(json).unwrap().matches(&labels(on)), expected);
}

#[rstest]
#[case(expression("a", "In", &[]))]
#[case(expression("a", "Exists", &["1"]))]
#[case(expression("a", "Gt", &["1"]))]
#[case(expression("a", "in", &["1"]))]
fn a_label_selector_that_makes_no_sense_is_refused(#[case] json: Value) {
    assert!(selector(json).is_err());
}

#[test]
fn a_misfit_names_key_operator_and_values() {
    let misfit = selector(expression("tier", "In", &[])).unwrap_err();
    assert_eq!(misfit.to_string(), r#"operator "In" of key "tier" does not fit its 0 values"#);
}

#[rstest]
#[case::greater("Gt", &["3"], "4", true)]
#[case::not_greater("Gt", &["3"], "3", false)]
#[case::less("Lt", &["3"], "-7", true)]
#[case::label_is_no_number("Gt", &["3"], "many", false)]
#[case::bound_is_no_number("Gt", &["x"], "4", false)]
#[case::two_bounds("Lt", &["3", "9"], "1", false)]
fn numbers_compare_in_node_affinity(
    #[case] operator: &str,
    #[case] values: &[&str],
    #[case] label: &str,
    #[case] expected: bool,
) {
    let placement = affinity(json!([expression("cores", operator, values)]));
    assert_eq!(placement.allows("n", &labels(&[("cores", label)])), expected);
}

#[rstest]
#[case::the_node(json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}]), true)]
#[case::another(json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["m"]}]}]), false)]
#[case::not_another(json!([{"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["m"]}]}]), true)]
#[case::two_names(json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n", "m"]}]}]), false)]
#[case::other_field(json!([{"matchFields": [{"key": "spec.x", "operator": "In", "values": ["n"]}]}]), false)]
#[case::empty_term(json!([{}]), false)]
#[case::no_terms(json!([]), false)]
#[case::one_of_two_terms(json!([expression("a", "In", &["9"]), expression("a", "In", &["1"])]), true)]
#[case::unreadable_term_does_not_spoil_the_next(
    json!([expression("a", "Near", &["1"]), expression("a", "In", &["1"])]), true)]
#[case::both_parts_of_a_term(json!([{
    "matchExpressions": [{"key": "a", "operator": "In", "values": ["1"]}],
    "matchFields": [{"key": "metadata.name", "operator": "In", "values": ["m"]}]}]), false)]
fn affinity_terms_are_judged_as_the_scheduler_judges(#[case] terms: Value, #[case] expected: bool) {
    assert_eq!(affinity(terms).allows("n", &labels(&[("a", "1")])), expected);
}

#[test]
fn node_selector_and_affinity_must_both_hold() {
    let both = placement(json!({"containers": [], "nodeSelector": {"a": "1"}, "affinity": {"nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [expression("b", "Exists", &[])]}}}}));
    assert!(both.allows("n", &labels(&[("a", "1"), ("b", "")])));
    assert!(!both.allows("n", &labels(&[("a", "1")])));
    assert!(!both.allows("n", &labels(&[("b", "")])));
    assert!(Placement::default().allows("n", &labels(&[])));
}

struct T(&'static str, &'static str, &'static str);

impl Tainted for T {
    fn key(&self) -> &str {
        self.0
    }
    fn value(&self) -> &str {
        self.1
    }
    fn effect(&self) -> &str {
        self.2
    }
}

#[rstest]
#[case::equal(json!({"key": "k", "value": "v", "effect": "NoSchedule"}), true)]
#[case::equal_spelled(json!({"key": "k", "operator": "Equal", "value": "v"}), true)]
#[case::other_value(json!({"key": "k", "value": "w"}), false)]
#[case::other_effect(json!({"key": "k", "operator": "Exists", "effect": "NoExecute"}), false)]
#[case::exists(json!({"key": "k", "operator": "Exists"}), true)]
#[case::exists_for_any_key(json!({"operator": "Exists"}), true)]
#[case::numbers_are_gated_off(json!({"key": "k", "operator": "Gt", "value": "1"}), false)]
#[case::other_key(json!({"key": "j", "operator": "Exists"}), false)]
fn tolerations_match_as_the_scheduler_does(#[case] json: Value, #[case] expected: bool) {
    let api: api::Toleration = serde_json::from_value(json.clone()).unwrap();
    let ours: Toleration = serde_json::from_value(json).unwrap();
    assert_eq!(Toleration::from(&api), ours);
    assert_eq!(tolerated(&[ours], &T("k", "v", "NoSchedule")), expected);
}

proptest! {
    #[test]
    fn in_and_not_in_are_each_others_opposite(
        values in proptest::collection::vec("[ab]{1}", 1..3), label in proptest::option::of("[abc]{1}"),
    ) {
        let values: Vec<&str> = values.iter().map(String::as_str).collect();
        let on: Labels = label.iter().map(|l| ("k".to_owned(), l.clone())).collect();
        let is_in = selector(expression("k", "In", &values)).unwrap().matches(&on);
        let is_not_in = selector(expression("k", "NotIn", &values)).unwrap().matches(&on);
        prop_assert_ne!(is_in, is_not_in);
    }
}
