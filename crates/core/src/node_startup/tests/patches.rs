use proptest::prelude::*;

use super::*;

fn decided(rules: &Rules, node: &NodeFacts, pods: &[DaemonPod]) -> Option<json_patch::Patch> {
    let seen = Seen { node, daemon_sets: &[daemon_set("agent")], pods, user_pods: false };
    decide(rules, &seen, at(60)).patch(node, at(60))
}

fn ready() -> Vec<DaemonPod> {
    vec![pod("agent").ready()]
}

#[test]
fn the_release_tests_uid_and_list_removes_one_entry_and_writes_the_time() {
    let held = node("n").taint("dedicated", "db", "NoExecute");
    let patch = decided(&built_in(&common()), &held, &ready()).unwrap();
    assert_eq!(
        serde_json::to_value(&patch).unwrap(),
        json!([
            {"op": "test", "path": "/metadata/uid", "value": "uid-of-n"},
            {"op": "test", "path": "/spec/taints", "value": [
                {"key": "node.kubernetes.io/not-ready", "value": "", "effect": "NoSchedule"},
                {"key": "startup.k8s.io/initializing", "value": "wait", "effect": "NoSchedule"},
                {"key": "dedicated", "value": "db", "effect": "NoExecute"},
            ]},
            {"op": "remove", "path": "/spec/taints/1"},
            {"op": "add", "path": "/metadata/annotations/startup.k8s.io~1completedAt", "value": "1763000060"},
        ])
    );
}

#[test]
fn a_node_that_stays_held_or_is_free_is_not_written() {
    assert_eq!(decided(&built_in(&common()), &node("n"), &[]), None);
    assert_eq!(decided(&built_in(&common()), &node("n").without(KEY), &ready()), None);
}

#[test]
fn annotations_that_came_since_our_reading_make_the_patch_fail_instead_of_vanishing() {
    let bare = NodeFacts { annotations: Labels::new(), ..node("n") };
    let patch = decided(&built_in(&common()), &bare, &ready()).unwrap();
    let written = apply(&patch, &as_json(&bare)).unwrap();
    assert_eq!(written["metadata"]["annotations"], json!({"startup.k8s.io/completedAt": "1763000060"}));
    assert!(apply(&patch, &as_json(&bare.clone().annotate("new", "1"))).is_err());
}

#[test]
fn a_node_created_again_under_the_name_is_not_touched() {
    let patch = decided(&built_in(&common()), &node("n"), &ready()).unwrap();
    let again = NodeFacts { uid: "another".to_owned(), ..node("n") };
    assert!(apply(&patch, &as_json(&again)).is_err());
}

#[test]
fn fields_of_a_taint_we_do_not_know_go_back_as_they_came() {
    let mut held = node("n");
    let text = r#"{"key":"later","effect":"NoSchedule","timeAdded":"2026-01-01T00:00:00Z","since":"1.40"}"#;
    held.taints.insert(0, serde_json::from_str(text).unwrap());
    let patch = decided(&built_in(&common()), &held, &ready()).unwrap();
    let written = apply(&patch, &as_json(&held)).unwrap();
    assert_eq!(written["spec"]["taints"][0], serde_json::from_str::<Value>(text).unwrap());
}

#[test]
fn the_first_phase_ends_without_the_completion_annotation() {
    let rules = two_phases(&common());
    let held = node("n").taint(keys::STARTUP_PREINIT, "wait", "NoSchedule");
    let sets = [daemon_set("early").component("preinit"), daemon_set("agent")];
    let early = pod("early").component("preinit").ready();
    let patch = |pods: &[DaemonPod]| {
        let seen = Seen { node: &held, daemon_sets: &sets, pods, user_pods: false };
        apply(&decide(&rules, &seen, at(60)).patch(&held, at(60)).unwrap(), &as_json(&held)).unwrap()
    };
    let first = patch(&[early.clone(), pod("agent")]);
    assert_eq!(first["spec"]["taints"].as_array().unwrap().len(), 2);
    assert_eq!(first["metadata"]["annotations"].get("startup.k8s.io/completedAt"), None);
    let both = patch(&[early, pod("agent").ready()]);
    assert_eq!(both["spec"]["taints"].as_array().unwrap().len(), 1);
    assert_eq!(both["metadata"]["annotations"]["startup.k8s.io/completedAt"], "1763000060");
}

#[test]
fn a_release_by_timeout_is_marked_as_one() {
    let after = std::time::Duration::from_secs(10);
    let rules = built_in(&Common { timeout: Some(Timeout { after, then: OnTimeout::Release }), ..common() });
    let held = node("n");
    let written = apply(&decided(&rules, &held, &[]).unwrap(), &as_json(&held)).unwrap();
    let annotations: Labels = serde_json::from_value(written["metadata"]["annotations"].clone()).unwrap();
    assert_eq!(annotations[keys::STARTUP_COMPLETED_AT], "1763000060");
    assert_eq!(annotations[keys::STARTUP_TIMED_OUT_AT], "1763000060");
}

#[test]
fn a_rule_of_the_clusters_own_writes_no_completion() {
    let rules = custom(Draft {
        name: "gpu".to_owned(),
        taint_key: Some("example.com/gpu".to_owned()),
        daemon_sets: vec![agent()],
        ..Draft::default()
    });
    let held = node("n").taint("example.com/gpu", "wait", "NoSchedule");
    let patch = decided(&rules, &held, &ready()).unwrap();
    assert_eq!(patch.0.len(), 3, "two tests and one removal");
}

fn any_taint() -> impl Strategy<Value = Taint> {
    let keys = prop::sample::select(vec![KEY, "a", "b/c", "node.kubernetes.io/not-ready"]);
    let values = prop::sample::select(vec!["wait", "", "other"]);
    (keys, values, prop::sample::select(vec!["NoSchedule", "NoExecute"])).prop_map(|(k, v, e)| taint(k, v, e))
}

/// Unique by key and effect, as the API server insists.
fn any_taints() -> impl Strategy<Value = Vec<Taint>> {
    proptest::collection::vec(any_taint(), 0..6).prop_map(|taints| {
        let mut unique: Vec<Taint> = Vec::new();
        for taint in taints {
            if !unique.iter().any(|u| u.key == taint.key && u.effect == taint.effect) {
                unique.push(taint);
            }
        }
        unique
    })
}

proptest! {
    /// S7: exactly our taint differs, whatever else the list holds.
    #[test]
    fn exactly_our_taint_goes(taints in any_taints()) {
        let held = NodeFacts { taints, ..node("n") };
        let ours = |t: &Taint| t.key == KEY && t.value.as_deref() == Some("wait") && t.effect == "NoSchedule";
        // Whether the DaemonSet must run there is not the point here.
        let mut rules = built_in(&common());
        rules.rules[0].retired = true;
        match decided(&rules, &held, &[]) {
            None => prop_assert!(!held.taints.iter().any(ours)),
            Some(patch) => {
                let written = apply(&patch, &as_json(&held)).unwrap();
                let left: Vec<Taint> = serde_json::from_value(written["spec"]["taints"].clone()).unwrap();
                let expected: Vec<Taint> = held.taints.iter().filter(|t| !ours(t)).cloned().collect();
                prop_assert_eq!(left, expected);
            }
        }
    }

    /// A patch made from an old reading never lands on another list.
    #[test]
    fn a_patch_fits_only_the_list_it_was_made_from(seen in any_taints(), real in any_taints()) {
        let held = NodeFacts { taints: seen, ..node("n") };
        let mut rules = built_in(&common());
        rules.rules[0].retired = true;
        if let Some(patch) = decided(&rules, &held, &[]) {
            let other = NodeFacts { taints: real, ..node("n") };
            prop_assert_eq!(apply(&patch, &as_json(&other)).is_ok(), held.taints == other.taints);
        }
    }
}
