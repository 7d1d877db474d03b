//! The policy engine: the same births as [`super::admission`], done by the API server with no process of ours alive.
//!
//! Caveats, seen on real API servers: the built-in plugin has put the not-ready taint there before us, and a policy
//! that also knows how to create the list can lose it; a JSON Patch value that is a list of typed objects brought
//! 1.35.4 down. So there is one operation, which appends, and a node without a list is left alone.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use serde_json::{Value, json};

use super::rule::{Rule, Rules};

/// Marks the policies that the operator owns, so that it finds them again to switch or to remove.
pub const OWNED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "groundcrew");
pub const FEATURE: (&str, &str) = ("groundcrew.io/feature", "node_startup");

/// The name of a rule's policy, and of its binding.
#[must_use]
pub fn name(rule: &Rule) -> String {
    let kind = if rule.is_built_in() { "phase" } else { "rule" };
    format!("groundcrew-node-startup-{kind}-{}", rule.name)
}

/// A MutatingAdmissionPolicy that taints the rule's nodes at birth.
#[must_use]
pub fn policy(rules: &Rules, rule: &Rule, failure_policy: &str) -> Value {
    let taint = &rule.taint;
    let same = format!("t.key == {} && t.effect == {}", text(&taint.key), text(taint.effect.name()));
    let value = format!(
        "Object.spec.taints{{key: {}, value: {}, effect: {}}}",
        text(&taint.key),
        text(&taint.value),
        text(taint.effect.name())
    );
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicy",
        "metadata": metadata(rule),
        "spec": {
            "failurePolicy": failure_policy,
            "reinvocationPolicy": "IfNeeded",
            "matchConstraints": {
                "matchPolicy": "Equivalent",
                "namespaceSelector": {},
                "objectSelector": selector(rules, rule),
                "resourceRules": [{
                    "apiGroups": [""],
                    "apiVersions": ["v1"],
                    "operations": ["CREATE"],
                    "resources": ["nodes"],
                    "scope": "*",
                }],
            },
            "matchConditions": [
                {"name": "has-taints", "expression": "has(object.spec.taints) && object.spec.taints.size() > 0"},
                {"name": "not-there-yet", "expression": format!("!object.spec.taints.exists(t, {same})")},
            ],
            "mutations": [{
                "patchType": "JSONPatch",
                "jsonPatch": {"expression": format!(r#"[JSONPatch{{op: "add", path: "/spec/taints/-", value: {value}}}]"#)},
            }],
        },
    })
}

#[must_use]
pub fn binding(rule: &Rule) -> Value {
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicyBinding",
        "metadata": metadata(rule),
        "spec": {"policyName": name(rule)},
    })
}

fn metadata(rule: &Rule) -> Value {
    let labels: serde_json::Map<String, Value> =
        [OWNED_BY, FEATURE].into_iter().map(|(key, value)| (key.to_owned(), json!(value))).collect();
    json!({"name": name(rule), "labels": labels})
}

/// The rule's own selector, without the nodes that are skipped.
fn selector(rules: &Rules, rule: &Rule) -> LabelSelector {
    let mut selector = rule.nodes_spec.clone();
    if rule.is_built_in() {
        let skip = rules.skip.iter().map(|(key, value)| LabelSelectorRequirement {
            key: key.clone(),
            operator: "NotIn".to_owned(),
            values: Some(vec![value.clone()]),
        });
        selector.match_expressions.get_or_insert_default().extend(skip);
    }
    selector
}

/// A CEL text. Keys and values are labels to the API server, so there is little to escape; what there is, JSON does.
fn text(value: &str) -> String {
    Value::String(value.to_owned()).to_string()
}
