use proptest::prelude::*;
use rstest::rstest;

use super::*;
use crate::node_startup::admission::{Birth, NodeView, decide, patch};

fn birth(rules: &Rules, node: &Value) -> Vec<Birth> {
    let text = node.to_string();
    let view: NodeView<'_> = serde_json::from_str(&text).unwrap();
    rules.rules.iter().map(|rule| decide(rules, rule, &view)).collect()
}

/// The operations that a node is answered with.
fn answer(rules: &Rules, node: &Value) -> json_patch::Patch {
    let text = node.to_string();
    let view: NodeView<'_> = serde_json::from_str(&text).unwrap();
    patch(&view, rules.rules.iter().filter(|rule| decide(rules, rule, &view) == Birth::Taint))
}

fn ours() -> Value {
    json!({"key": "startup.k8s.io/initializing", "value": "wait", "effect": "NoSchedule"})
}

fn other(key: &str) -> Value {
    json!({"key": key, "effect": "NoSchedule"})
}

#[rstest]
#[case::no_taints(json!({"metadata": {"name": "n"}, "spec": {}}), json!([{"op": "add", "path": "/spec/taints", "value": [ours()]}]))]
#[case::null_taints(json!({"metadata": {}, "spec": {"taints": null}}), json!([{"op": "add", "path": "/spec/taints", "value": [ours()]}]))]
#[case::empty_list(json!({"metadata": {}, "spec": {"taints": []}}), json!([{"op": "add", "path": "/spec/taints", "value": [ours()]}]))]
#[case::some(json!({"metadata": {}, "spec": {"taints": [other("a")]}}), json!([{"op": "add", "path": "/spec/taints/-", "value": ours()}]))]
#[case::no_spec(json!({"metadata": {}}), json!([{"op": "add", "path": "/spec", "value": {"taints": [ours()]}}]))]
#[case::null_spec(json!({"metadata": {}, "spec": null}), json!([{"op": "add", "path": "/spec", "value": {"taints": [ours()]}}]))]
#[case::already_there(json!({"metadata": {}, "spec": {"taints": [other("a"), ours()]}}), json!([]))]
#[case::other_effect(
    json!({"metadata": {}, "spec": {"taints": [{"key": KEY, "value": "wait", "effect": "NoExecute"}]}}),
    json!([{"op": "add", "path": "/spec/taints/-", "value": ours()}]))]
#[case::other_value_would_be_refused(
    json!({"metadata": {}, "spec": {"taints": [{"key": KEY, "value": "x", "effect": "NoSchedule"}]}}), json!([]))]
#[case::system_pool(json!({"metadata": {"labels": {"kubernetes.azure.com/mode": "system"}}, "spec": {}}), json!([]))]
#[case::user_pool(
    json!({"metadata": {"labels": {"kubernetes.azure.com/mode": "user"}}, "spec": {"taints": [other("a")]}}),
    json!([{"op": "add", "path": "/spec/taints/-", "value": ours()}]))]
fn a_new_node_is_tainted_once(#[case] node: Value, #[case] expected: Value) {
    let patch = answer(&built_in(&common()), &node);
    assert_eq!(serde_json::to_value(&patch).unwrap(), expected);
    apply(&patch, &node).unwrap();
}

#[test]
fn control_plane_nodes_are_tainted_at_birth_too() {
    let node = json!({"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}, "spec": {}});
    assert_eq!(birth(&built_in(&common()), &node), [Birth::Taint]);
}

#[test]
fn two_phases_are_two_taints_in_one_patch() {
    let patch = answer(&two_phases(&common()), &json!({"metadata": {}, "spec": {}}));
    let paths: Vec<String> = patch.0.iter().map(|op| op.path().to_string()).collect();
    assert_eq!(paths, ["/spec/taints", "/spec/taints/-"]);
}

#[test]
fn a_rule_taints_only_the_nodes_it_selects() {
    let selector = serde_json::from_value(json!({"matchLabels": {"pool": "gpu"}})).unwrap();
    let draft = Draft { name: "gpu".to_owned(), node_selector: selector, all_daemon_sets: true, ..Draft::default() };
    let rules = custom(draft.clone());
    let gpu = json!({"metadata": {"labels": {"pool": "gpu"}}, "spec": {}});
    assert_eq!(birth(&rules, &gpu), [Birth::Taint]);
    assert_eq!(birth(&rules, &json!({"metadata": {}, "spec": {}})), [Birth::NotAsked]);
    let dry = custom(Draft { dry_run: true, ..draft.clone() });
    assert_eq!(birth(&dry, &gpu), [Birth::NotAsked]);
    let going = custom(Draft { deleting: true, ..draft });
    assert_eq!(birth(&going, &gpu), [Birth::NotAsked]);
}

#[test]
fn nobody_is_tainted_while_too_many_time_out() {
    let stopped = ["initializing".to_owned()].into();
    let rules = Rules { stopped, ..two_phases(&common()) };
    assert_eq!(birth(&rules, &json!({"metadata": {}, "spec": {}})), [Birth::Taint, Birth::Stopped]);
}

proptest! {
    /// S11: applies, keeps everything else, and a second pass changes nothing.
    #[test]
    fn admission_is_idempotent_and_keeps_what_it_does_not_know(
        keys in proptest::collection::btree_set("[a-c]", 0..4), has_spec in any::<bool>(), ours_too in any::<bool>(),
    ) {
        let mut taints: Vec<Value> = keys.iter().map(|key| other(key)).collect();
        if ours_too {
            taints.insert(0, ours());
        }
        let mut node = json!({"metadata": {"name": "n"}, "future": {"field": 1}});
        if has_spec {
            node["spec"] = json!({"podCIDR": "10.0.0.0/24", "taints": taints, "newer": true});
        }
        let rules = two_phases(&common());
        let once = apply(&answer(&rules, &node), &node).unwrap();
        prop_assert_eq!(answer(&rules, &once).0.len(), 0);
        prop_assert_eq!(&once["future"], &node["future"]);
        let before = node["spec"]["taints"].as_array().cloned().unwrap_or_default();
        let after = once["spec"]["taints"].as_array().cloned().unwrap_or_default();
        prop_assert_eq!(&after[..before.len()], &before[..]);
        prop_assert!(after.iter().filter(|t| **t == ours()).count() == 1);
    }
}
