//! A pod that names a held node itself goes around the scheduler, and so around the taint: refuse it.

use crate::keys::{self, Lookup};
use crate::pod::TextMap;
use crate::selector::{Toleration, tolerated};

use super::rule::Rules;
use super::taint::Taint;

/// The part of a pod that says where it wants to go.
#[derive(Debug, Default, serde::Deserialize)]
pub struct BoundPod<'a> {
    #[serde(borrow, default)]
    pub metadata: BoundMeta<'a>,
    #[serde(default)]
    pub spec: BoundSpec,
}

#[derive(Debug, Default, serde::Deserialize)]
pub struct BoundMeta<'a> {
    #[serde(borrow, default)]
    pub annotations: Option<TextMap<'a>>,
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BoundSpec {
    pub node_name: Option<String>,
    pub tolerations: Option<Vec<Toleration>>,
}

impl BoundPod<'_> {
    /// The node it names, if it names one by choice. A mirror pod runs already, whatever is said about it.
    #[must_use]
    pub fn target(&self) -> Option<&str> {
        let named = self.spec.node_name.as_deref().filter(|name| !name.is_empty())?;
        (!self.metadata.annotations.has(keys::MIRROR_POD)).then_some(named)
    }
}

/// Why the pod is refused, or `None`. `taints` are those of the node it names.
#[must_use]
pub fn refusal(rules: &Rules, pod: &BoundPod<'_>, taints: &[Taint]) -> Option<String> {
    let node = pod.target()?;
    let tolerations = pod.spec.tolerations.as_deref().unwrap_or_default();
    let ours = |taint: &&Taint| rules.rules.iter().any(|rule| rule.taint.is(*taint));
    let taint = taints.iter().filter(ours).find(|taint| !tolerated(tolerations, *taint))?;
    let (key, effect) = (&taint.key, &taint.effect);
    Some(format!(
        "node {node} is starting up and holds the taint {key}:{effect}, which this pod does not tolerate; \
         leave spec.nodeName to the scheduler, or add the toleration"
    ))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::needless_pass_by_value, reason = "literals read better by value")]

    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::node_startup::{Rule, rule};

    fn rules() -> Rules {
        let rules = Rule::built_in(&[rule::initializing(keys::STARTUP_INITIALIZING)], &rule::Common::default());
        Rules { rules, ..Rules::default() }
    }

    fn refused(spec: Value, taints: Value) -> Option<String> {
        let text = json!({"metadata": {}, "spec": spec}).to_string();
        let taints: Vec<Taint> = serde_json::from_value(taints).unwrap();
        refusal(&rules(), &serde_json::from_str(&text).unwrap(), &taints)
    }

    fn held() -> Value {
        json!([{"key": "startup.k8s.io/initializing", "value": "wait", "effect": "NoSchedule"}])
    }

    #[rstest]
    #[case::no_node_named(json!({}), held())]
    #[case::empty_name(json!({"nodeName": ""}), held())]
    #[case::tolerates_all(json!({"nodeName": "n", "tolerations": [{"operator": "Exists"}]}), held())]
    #[case::tolerates_it(json!({"nodeName": "n", "tolerations": [{"key": "startup.k8s.io/initializing", "value": "wait"}]}), held())]
    #[case::free_node(json!({"nodeName": "n"}), json!([]))]
    #[case::foreign_taint(json!({"nodeName": "n"}), json!([{"key": "dedicated", "effect": "NoSchedule"}]))]
    fn pods_that_break_nothing_pass(#[case] spec: Value, #[case] taints: Value) {
        assert_eq!(refused(spec, taints), None);
    }

    #[test]
    fn a_pod_bound_to_a_held_node_is_refused_with_the_way_out() {
        let message = refused(json!({"nodeName": "n", "tolerations": null}), held()).unwrap();
        assert!(
            message.contains("node n is starting up") && message.contains("startup.k8s.io/initializing:NoSchedule")
        );
        let other = json!({"nodeName": "n", "tolerations": [{"key": "startup.k8s.io/initializing", "value": "other"}]});
        assert!(refused(other, held()).is_some());
    }

    #[test]
    fn a_mirror_pod_passes() {
        let text = r#"{"metadata":{"annotations":{"kubernetes.io/config.mirror":"x"}},"spec":{"nodeName":"n"}}"#;
        let pod: BoundPod<'_> = serde_json::from_str(text).unwrap();
        assert_eq!(refusal(&rules(), &pod, &serde_json::from_value::<Vec<Taint>>(held()).unwrap()), None);
    }
}
