use super::*;
use crate::node_startup::policy::{binding, name, policy};

#[test]
fn the_policy_appends_one_taint_and_touches_no_list() {
    let rules = built_in(&common());
    let policy = policy(&rules, &rules.rules[0], "Fail");
    assert_eq!(policy["metadata"]["name"], "groundcrew-node-startup-phase-initializing");
    assert_eq!(
        policy["spec"]["mutations"][0]["jsonPatch"]["expression"],
        r#"[JSONPatch{op: "add", path: "/spec/taints/-", value: Object.spec.taints{key: "startup.k8s.io/initializing", value: "wait", effect: "NoSchedule"}}]"#
    );
    assert_eq!(policy["spec"]["failurePolicy"], "Fail");
    assert_eq!(
        policy["spec"]["matchConstraints"]["objectSelector"],
        json!({"matchExpressions": [{"key": "kubernetes.azure.com/mode", "operator": "NotIn", "values": ["system"]}]})
    );
}

#[test]
fn the_policy_of_a_rule_selects_what_the_rule_selects() {
    let spec = json!({"matchLabels": {"pool": "gpu"}});
    let rules = custom(Draft {
        name: "gpu".to_owned(),
        node_selector: serde_json::from_value(spec.clone()).unwrap(),
        all_daemon_sets: true,
        ..Draft::default()
    });
    assert_eq!(policy(&rules, &rules.rules[0], "Ignore")["spec"]["matchConstraints"]["objectSelector"], spec);
    assert_eq!(name(&rules.rules[0]), "groundcrew-node-startup-rule-gpu");
}

#[test]
fn the_binding_names_its_policy_and_both_carry_our_labels() {
    let rules = built_in(&common());
    let (policy, binding) = (policy(&rules, &rules.rules[0], "Fail"), binding(&rules.rules[0]));
    assert_eq!(binding["spec"]["policyName"], policy["metadata"]["name"]);
    assert_eq!(binding["metadata"]["labels"], policy["metadata"]["labels"]);
    assert_eq!(policy["metadata"]["labels"]["app.kubernetes.io/managed-by"], "groundcrew");
}
