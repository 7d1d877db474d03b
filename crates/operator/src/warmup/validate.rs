//! Annotations of a pod template are read where a person writes them: what is said about a pod, its controller hears.

use groundcrew_core::feature::Feature;
use groundcrew_core::keys;
use groundcrew_core::pod::PodView;
use groundcrew_core::warmup::admission;
use serde::Deserialize;

use crate::admission::registration::{Entry, Namespaces};
use crate::admission::validate::{Judged, Refusal, Validator};

/// Workloads whose pods name the opt-in key, whatever its value.
pub(super) fn entry(namespaces: Namespaces) -> Entry {
    let annotations = "object.spec.template.metadata.annotations";
    let named =
        format!("has(object.spec.template.metadata) && has({annotations}) && '{}' in {annotations}", keys::WARMUP);
    Entry::workload_written(Feature::Warmup, named, namespaces)
}

/// Reads the annotations as admission of the pods and the agent will.
#[derive(Debug)]
pub struct TemplateReader;

#[derive(Deserialize)]
struct Workload<'a> {
    #[serde(borrow)]
    spec: Spec<'a>,
}

#[derive(Deserialize)]
struct Spec<'a> {
    #[serde(borrow)]
    template: PodView<'a>,
}

impl Validator for TemplateReader {
    fn feature(&self) -> Feature {
        Feature::Warmup
    }

    fn judges(&self) -> Judged<'static> {
        Judged::WORKLOADS
    }

    fn validate(&self, object: &str) -> Result<(), Refusal> {
        let workload: Workload<'_> = serde_json::from_str(object).map_err(|e| Refusal::Unreadable(e.to_string()))?;
        let template = &workload.spec.template;
        // Whether an agent lives is a question of the moment in which pods are made.
        let said = admission::warnings(template, admission::decide(template, true));
        if said.is_empty() { Ok(()) } else { Err(Refusal::Doubtful(said.join("; "))) }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    #[rstest]
    #[case::right(json!({"kube-booster.io/warmup": "enabled", "kube-booster.io/warmup-requests": "5"}), None)]
    #[case::not_asked(json!({"kube-booster.io/warmup": "no", "kube-booster.io/warmup-requests": "0"}), None)]
    #[case::nearly_asked(json!({"kube-booster.io/warmup": "Enabled"}), Some("only \"enabled\" does"))]
    #[case::wrong(json!({"kube-booster.io/warmup": "enabled", "kube-booster.io/warmup-requests": "0"}),
        Some("kube-booster.io/warmup-requests: warmup-requests must be at least 1, got 0"))]
    #[case::two(json!({"kube-booster.io/warmup": "enabled", "kube-booster.io/warmup-mode": "x",
        "kube-booster.io/warmup-prot": "http"}), Some("; kube-booster.io/warmup-prot: unknown annotation"))]
    fn what_a_template_gets_wrong_is_named(#[case] annotations: Value, #[case] why: Option<&str>) {
        let containers = json!([{"name": "app", "ports": [{"containerPort": 80}]}]);
        let template = json!({"metadata": {"annotations": annotations}, "spec": {"containers": containers}});
        let object = json!({"metadata": {"name": "web"}, "spec": {"template": template}}).to_string();
        match (TemplateReader.validate(&object), why) {
            (Ok(()), None) => {}
            (Err(Refusal::Doubtful(text)), Some(why)) => assert!(text.contains(why), "{text}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_workload_without_a_template_is_not_judged() {
        assert!(matches!(TemplateReader.validate("{}"), Err(Refusal::Unreadable(_))));
    }
}
