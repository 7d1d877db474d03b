//! The one patch of a pod review: features say what they want, this writes the fewest operations.
//!
//! Guarantees: parents are created at most once and only where absent, keys are escaped as JSON Pointer asks, and
//! [`check`] proves that the patch applies to the exact bytes received. The API server refuses a pod whose patch does
//! not apply, whatever the failure policy says, so an unchecked patch is never sent.

use std::collections::BTreeMap;

use json_patch::{AddOperation, Patch, PatchOperation};
use jsonptr::PointerBuf;
use serde_json::{Value, json};

use crate::pod::{Place, PodView, TextMap};
use crate::quantity;

/// Quantities by resource name.
pub type Sizes = BTreeMap<&'static str, String>;

/// What the features of one review want changed.
#[derive(Debug, Default)]
pub struct PodPatch {
    annotations: BTreeMap<String, String>,
    sizes: BTreeMap<Place, Sizes>,
    gates: Vec<&'static str>,
    node_selector: BTreeMap<String, String>,
    raw: Vec<PatchOperation>,
}

impl PodPatch {
    pub fn annotate(&mut self, key: &str, value: impl Into<String>) {
        self.annotations.insert(key.to_owned(), value.into());
    }

    /// Requests and limits of one container; resources not named keep theirs.
    pub fn size(&mut self, place: Place, sizes: Sizes) {
        self.sizes.insert(place, sizes);
    }

    /// Appends a readiness gate; those of others stay where they are.
    pub fn gate(&mut self, condition: &'static str) {
        self.gates.push(condition);
    }

    /// Where the pod may run; other keys of the selector stay.
    pub fn select_node(&mut self, key: &str, value: impl Into<String>) {
        self.node_selector.insert(key.to_owned(), value.into());
    }

    /// An operation as it stands, for what no other method says.
    pub fn push(&mut self, operation: PatchOperation) {
        self.raw.push(operation);
    }

    /// Takes over what another feature wants; the same annotation asked for twice keeps the later value.
    pub fn absorb(&mut self, other: PodPatch) {
        self.annotations.extend(other.annotations);
        self.sizes.extend(other.sizes);
        self.gates.extend(other.gates);
        self.node_selector.extend(other.node_selector);
        self.raw.extend(other.raw);
    }

    /// The operations against the pod as it was received.
    #[must_use]
    pub fn against(self, pod: &PodView<'_>) -> Patch {
        let mut operations = Vec::with_capacity(self.annotations.len() + self.raw.len());
        merge_map(&mut operations, ["metadata", "annotations"], pod.metadata.annotations.is_some(), self.annotations);
        for (place, sizes) in &self.sizes {
            resize(&mut operations, pod, *place, sizes);
        }
        append_gates(&mut operations, pod.spec.readiness_gates.is_some(), &self.gates);
        merge_map(&mut operations, ["spec", "nodeSelector"], pod.spec.node_selector.is_some(), self.node_selector);
        operations.extend(self.raw);
        Patch(operations)
    }
}

fn merge_map<const N: usize>(
    operations: &mut Vec<PatchOperation>,
    parent: [&str; N],
    exists: bool,
    entries: BTreeMap<String, String>,
) {
    if entries.is_empty() {
        return;
    }
    if !exists {
        operations.push(add(PointerBuf::from_tokens(parent), json!(entries)));
        return;
    }
    for (key, value) in entries {
        let path = PointerBuf::from_tokens(parent.iter().copied().chain([key.as_str()]));
        operations.push(add(path, Value::String(value)));
    }
}

/// Writes what differs in value; the spelling of an equal size is the user's.
fn resize(operations: &mut Vec<PatchOperation>, pod: &PodView<'_>, place: Place, sizes: &Sizes) {
    let (list, index) = place.path();
    let index = index.to_string();
    let path = |rest: &[&str]| {
        PointerBuf::from_tokens(["spec", list, &index, "resources"].into_iter().chain(rest.iter().copied()))
    };
    let existing = pod.container(place).and_then(|container| container.resources.as_ref());
    let Some(existing) = existing else {
        operations.push(add(path(&[]), json!({"requests": sizes, "limits": sizes})));
        return;
    };
    for (field, map) in [("requests", &existing.requests), ("limits", &existing.limits)] {
        let Some(map) = map else {
            operations.push(add(path(&[field]), json!(sizes)));
            continue;
        };
        for (name, size) in sizes.iter().filter(|(name, size)| !has_size(map, name, size)) {
            operations.push(add(path(&[field, name]), json!(size)));
        }
    }
}

fn has_size(map: &TextMap<'_>, name: &str, size: &str) -> bool {
    let existing = map.get(name).and_then(|text| quantity::parse(text.as_str()).ok());
    existing.is_some() && existing == quantity::parse(size).ok()
}

fn append_gates(operations: &mut Vec<PatchOperation>, exists: bool, gates: &[&'static str]) {
    let gates: Vec<Value> = gates.iter().map(|gate| json!({"conditionType": gate})).collect();
    if !exists && !gates.is_empty() {
        operations.push(add(PointerBuf::from_tokens(["spec", "readinessGates"]), Value::Array(gates)));
        return;
    }
    let last = || PointerBuf::from_tokens(["spec", "readinessGates", "-"]);
    operations.extend(gates.into_iter().map(|gate| add(last(), gate)));
}

/// A plain `add`.
#[must_use]
pub fn add(path: PointerBuf, value: Value) -> PatchOperation {
    PatchOperation::Add(AddOperation { path, value })
}

/// Why a patch must not be sent.
#[derive(Debug, thiserror::Error)]
pub enum Unsafe {
    #[error("the object does not parse: {0}")]
    Object(serde_json::Error),
    #[error("the patch does not apply: {0}")]
    Apply(#[from] json_patch::PatchError),
    #[error("the patched object is no pod any more: {0}")]
    Result(serde_json::Error),
}

/// Applies the patch to the received bytes as the API server will.
pub fn check(object: &str, patch: &Patch) -> Result<(), Unsafe> {
    let mut value: Value = serde_json::from_str(object).map_err(Unsafe::Object)?;
    json_patch::patch(&mut value, patch)?;
    let text = value.to_string();
    serde_json::from_str::<PodView<'_>>(&text).map(drop).map_err(Unsafe::Result)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patch_of(object: &str, fill: impl FnOnce(&mut PodPatch)) -> Value {
        let pod: PodView<'_> = serde_json::from_str(object).unwrap();
        let mut patch = PodPatch::default();
        fill(&mut patch);
        let patch = patch.against(&pod);
        check(object, &patch).unwrap();
        serde_json::to_value(patch).unwrap()
    }

    #[test]
    fn two_keys_of_an_absent_map_come_as_one_operation() {
        let patch = patch_of(r#"{"metadata":{}}"#, |p| {
            p.annotate("a", "1");
            p.annotate("b/c", "2");
        });
        assert_eq!(patch, json!([{"op": "add", "path": "/metadata/annotations", "value": {"a": "1", "b/c": "2"}}]));
    }

    #[test]
    fn a_key_with_slash_and_tilde_is_escaped() {
        let patch = patch_of(r#"{"metadata":{"annotations":{"x":"y"}}}"#, |p| p.annotate("a/b~c", "1"));
        assert_eq!(patch, json!([{"op": "add", "path": "/metadata/annotations/a~1b~0c", "value": "1"}]));
    }

    #[test]
    fn a_null_map_is_replaced_not_entered() {
        let patch = patch_of(r#"{"metadata":{"annotations":null}}"#, |p| p.annotate("a", "1"));
        assert_eq!(patch, json!([{"op": "add", "path": "/metadata/annotations", "value": {"a": "1"}}]));
    }

    fn sized(object: &str) -> Value {
        patch_of(object, |p| p.size(Place::Container(0), Sizes::from([("cpu", "400m".to_owned())])))
    }

    #[test]
    fn sizes_go_in_at_the_highest_level_that_is_absent() {
        let whole = json!({"cpu": "400m"});
        for resources in ["", r#","resources":null"#] {
            let object = format!(r#"{{"spec":{{"containers":[{{"name":"a"{resources}}}]}}}}"#);
            let value = json!({"requests": whole, "limits": whole});
            assert_eq!(sized(&object), json!([{"op": "add", "path": "/spec/containers/0/resources", "value": value}]));
        }
        let claims = r#"{"spec":{"containers":[{"resources":{"claims":[{"name":"gpu"}]}}]}}"#;
        assert_eq!(
            sized(claims),
            json!([
                {"op": "add", "path": "/spec/containers/0/resources/requests", "value": whole},
                {"op": "add", "path": "/spec/containers/0/resources/limits", "value": whole},
            ])
        );
    }

    #[test]
    fn only_sizes_that_differ_in_value_are_written() {
        let object = r#"{"spec":{"containers":[{"resources":{
            "requests":{"cpu":"0.4","nvidia.com/gpu":"1"},"limits":{"cpu":"1","nvidia.com/gpu":"1"}}}]}}"#;
        let op = json!({"op": "add", "path": "/spec/containers/0/resources/limits/cpu", "value": "400m"});
        assert_eq!(sized(object), json!([op]));
    }

    #[test]
    fn a_gate_is_appended_behind_those_of_others() {
        let gate = json!({"conditionType": "ours"});
        let patch =
            patch_of(r#"{"metadata":{},"spec":{"readinessGates":[{"conditionType":"theirs"}]}}"#, |p| p.gate("ours"));
        assert_eq!(patch, json!([{"op": "add", "path": "/spec/readinessGates/-", "value": gate}]));
        for bare in [r#"{"metadata":{},"spec":{}}"#, r#"{"metadata":{},"spec":{"readinessGates":null}}"#] {
            let patch = patch_of(bare, |p| p.gate("ours"));
            assert_eq!(patch, json!([{"op": "add", "path": "/spec/readinessGates", "value": [gate]}]));
        }
    }

    #[test]
    fn nothing_wanted_is_no_operation() {
        assert_eq!(patch_of(r#"{"metadata":{}}"#, |_| ()), json!([]));
    }

    #[test]
    fn a_patch_that_does_not_apply_is_unsafe() {
        let patch: Patch = serde_json::from_value(json!([{"op": "remove", "path": "/spec/nothing"}])).unwrap();
        assert!(matches!(check(r#"{"metadata":{}}"#, &patch), Err(Unsafe::Apply(_))));
        let patch: Patch = serde_json::from_value(json!([{"op": "add", "path": "/metadata", "value": 7}])).unwrap();
        assert!(matches!(check(r#"{"metadata":{}}"#, &patch), Err(Unsafe::Result(_))));
    }
}
