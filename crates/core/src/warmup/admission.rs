//! Whether a new pod gets the readiness gate, and what its author should hear.

use serde::Serialize;

use super::rules::{Mode, Protocol, Rules};
use crate::keys::{self, Lookup};
use crate::patch::PodPatch;
use crate::pod::{ContainerView, PodView, Text};

/// What a pod CREATE comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Verdict {
    Leave(Why),
    Gate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Why {
    NotAsked,
    GatedAlready,
    /// A gate must come from someone alive to open it.
    NoAgent,
}

#[must_use]
pub fn decide(pod: &PodView<'_>, agent_alive: bool) -> Verdict {
    let asked = pod.metadata.annotations.value(keys::WARMUP) == Some(keys::WARMUP_ENABLED);
    let gated =
        pod.spec.readiness_gates.iter().flatten().any(|gate| gate.condition_type.as_str() == keys::WARMUP_READY);
    match (asked, gated, agent_alive) {
        (false, ..) => Verdict::Leave(Why::NotAsked),
        (_, true, _) => Verdict::Leave(Why::GatedAlready),
        (.., false) => Verdict::Leave(Why::NoAgent),
        _ => Verdict::Gate,
    }
}

impl Verdict {
    /// The verdict as admission carries it out.
    pub fn contribute(self, patch: &mut PodPatch) {
        if self == Verdict::Gate {
            patch.gate(keys::WARMUP_READY);
        }
    }
}

/// Sentences for whoever created the pod; it is allowed whatever they say.
#[must_use]
pub fn warnings(pod: &PodView<'_>, verdict: Verdict) -> Vec<String> {
    let annotations = &pod.metadata.annotations;
    if verdict == Verdict::Leave(Why::NotAsked) {
        return almost_asked(annotations).into_iter().collect();
    }
    let containers: Vec<_> = pod.spec.containers.iter().flatten().map(ContainerView::entrance).collect();
    let mut warnings: Vec<String> = match Rules::read(annotations, &containers) {
        Ok(rules) => ignored(annotations, &rules),
        Err(problems) => problems.0.iter().map(|p| format!("{}: {}", p.key, p.text)).collect(),
    };
    warnings.extend(unknown_keys(pod));
    if verdict == Verdict::Leave(Why::NoAgent) {
        warnings.push(format!("{}: no warm-up agent is alive, so the pod will be ready without warm-up", keys::WARMUP));
    }
    warnings
}

fn almost_asked(annotations: &impl Lookup) -> Option<String> {
    let value = annotations.setting(keys::WARMUP)?;
    let close = value.trim().eq_ignore_ascii_case(keys::WARMUP_ENABLED) || value == "true";
    close.then(|| format!("{}: value {value:?} does not ask for a warm-up, only \"enabled\" does", keys::WARMUP))
}

/// Settings that are right in themselves but change nothing.
fn ignored(annotations: &impl Lookup, rules: &Rules) -> Vec<String> {
    let not_grpc = rules.protocol != Protocol::Grpc && rules.config.is_none();
    let grpc_only = [keys::WARMUP_GRPC_METHOD, keys::WARMUP_GRPC_PAYLOAD];
    let mut said: Vec<String> = grpc_only
        .iter()
        .filter(|key| not_grpc && annotations.setting(key).is_some())
        .map(|key| format!("{key}: has no effect unless warmup-protocol is grpc"))
        .collect();
    if rules.mode != Mode::Paced && rules.config.is_some() {
        said.push(format!("{}: has no effect with warmup-config, whose steps run in order", keys::WARMUP_MODE));
    }
    said
}

const KNOWN: &[&str] = &[
    keys::WARMUP,
    keys::WARMUP_STATE,
    keys::WARMUP_ENDPOINT,
    keys::WARMUP_REQUESTS,
    keys::WARMUP_DURATION,
    keys::WARMUP_PORT,
    keys::WARMUP_TIMEOUT,
    keys::WARMUP_PROTOCOL,
    keys::WARMUP_GRPC_METHOD,
    keys::WARMUP_GRPC_PAYLOAD,
    keys::WARMUP_CONFIG,
    keys::WARMUP_MODE,
    keys::WARMUP_ENDPOINT_FROM,
    keys::WARMUP_FAILURE_POLICY,
    keys::WARMUP_RETRIES,
];

fn unknown_keys<'a>(pod: &'a PodView<'_>) -> impl Iterator<Item = String> + 'a {
    let given = pod.metadata.annotations.iter().flat_map(|map| map.keys()).map(Text::as_str);
    let ours = given.filter(|key| key.starts_with(keys::WARMUP) && !KNOWN.contains(key));
    ours.map(|key| {
        let closeness = |known: &&&str| (strsim::jaro_winkler(key, known) * 1e6) as u64;
        let nearest = KNOWN.iter().max_by_key(closeness).copied().unwrap_or_default();
        format!("{key}: unknown annotation, did you mean {nearest}?")
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::patch::check;

    #[expect(clippy::needless_pass_by_value, reason = "json! makes values")]
    fn review(annotations: Value, gates: Value, agent: bool) -> (Verdict, Vec<String>, Value) {
        let object = json!({
            "metadata": {"annotations": annotations},
            "spec": {"readinessGates": gates, "containers": [{"name": "app", "ports": [{"containerPort": 80}]}]},
        })
        .to_string();
        let pod: PodView<'_> = serde_json::from_str(&object).unwrap();
        let verdict = decide(&pod, agent);
        let mut patch = PodPatch::default();
        verdict.contribute(&mut patch);
        let patch = patch.against(&pod);
        check(&object, &patch).unwrap();
        (verdict, warnings(&pod, verdict), serde_json::to_value(patch).unwrap())
    }

    #[rstest]
    #[case(json!({"kube-booster.io/warmup": "enabled"}), Verdict::Gate)]
    #[case(json!({"kube-booster.io/warmup": "Enabled"}), Verdict::Leave(Why::NotAsked))]
    #[case(json!({"kube-booster.io/warmup": "enabled "}), Verdict::Leave(Why::NotAsked))]
    #[case(json!({"kube-booster.io/warmup": "true"}), Verdict::Leave(Why::NotAsked))]
    #[case(json!({"kube-booster.io/warmup": ""}), Verdict::Leave(Why::NotAsked))]
    #[case(json!({"Kube-booster.io/warmup": "enabled"}), Verdict::Leave(Why::NotAsked))]
    #[case(json!({}), Verdict::Leave(Why::NotAsked))]
    #[case(Value::Null, Verdict::Leave(Why::NotAsked))]
    fn only_the_exact_value_asks(#[case] annotations: Value, #[case] verdict: Verdict) {
        assert_eq!(review(annotations, Value::Null, true).0, verdict);
    }

    #[test]
    fn the_gate_is_added_once_behind_those_of_others() {
        let asked = json!({"kube-booster.io/warmup": "enabled"});
        let theirs = json!({"conditionType": "example.com/lb"});
        let ours = json!({"conditionType": "kube-booster.io/warmup-ready"});
        let (_, warnings, patch) = review(asked.clone(), json!([theirs]), true);
        assert_eq!(patch, json!([{"op": "add", "path": "/spec/readinessGates/-", "value": ours}]));
        assert!(warnings.is_empty(), "{warnings:?}");
        let (verdict, _, patch) = review(asked, json!([theirs, ours]), true);
        assert_eq!((verdict, patch), (Verdict::Leave(Why::GatedAlready), json!([])));
    }

    #[test]
    fn without_a_live_agent_nobody_could_open_the_gate() {
        let (verdict, warnings, patch) = review(json!({"kube-booster.io/warmup": "enabled"}), Value::Null, false);
        assert_eq!((verdict, patch), (Verdict::Leave(Why::NoAgent), json!([])));
        assert_eq!(
            warnings,
            ["kube-booster.io/warmup: no warm-up agent is alive, so the pod will be ready without warm-up"]
        );
    }

    #[test]
    fn bad_values_are_named_and_the_pod_is_gated_all_the_same() {
        let bad = json!({
            "kube-booster.io/warmup": "enabled",
            "kube-booster.io/warmup-requests": "0",
            "kube-booster.io/warmup-duration": "soon",
            "kube-booster.io/warmup-request": "5",
        });
        let (verdict, warnings, _) = review(bad, Value::Null, true);
        assert_eq!(verdict, Verdict::Gate);
        assert_eq!(
            warnings,
            [
                "kube-booster.io/warmup-requests: warmup-requests must be at least 1, got 0",
                "kube-booster.io/warmup-duration: invalid warmup-duration value \"soon\": not a duration; write it like 300ms, 30s or 1m30s",
                "kube-booster.io/warmup-request: unknown annotation, did you mean kube-booster.io/warmup-requests?",
            ]
        );
    }

    #[test]
    fn near_misses_and_settings_without_effect_are_mentioned() {
        let (_, warnings, _) = review(json!({"kube-booster.io/warmup": "Enabled"}), Value::Null, true);
        assert_eq!(
            warnings,
            ["kube-booster.io/warmup: value \"Enabled\" does not ask for a warm-up, only \"enabled\" does"]
        );
        let grpc = json!({"kube-booster.io/warmup": "enabled", "kube-booster.io/warmup-grpc-method": "a.B/C"});
        let (_, warnings, _) = review(grpc, Value::Null, true);
        assert_eq!(warnings, ["kube-booster.io/warmup-grpc-method: has no effect unless warmup-protocol is grpc"]);
    }
}
