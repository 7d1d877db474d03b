//! The one patch of a pod review: features say what they want, this writes the fewest operations.
//!
//! Guarantees: parents are created at most once and only where absent, keys are escaped as JSON Pointer asks, and
//! [`check`] proves that the patch applies to the exact bytes received. The API server refuses a pod whose patch does
//! not apply, whatever the failure policy says, so an unchecked patch is never sent.

use std::collections::BTreeMap;

use json_patch::{AddOperation, Patch, PatchOperation};
use jsonptr::PointerBuf;
use serde_json::{Value, json};

use crate::pod::PodView;

/// What the features of one review want changed.
#[derive(Debug, Default)]
pub struct PodPatch {
    annotations: BTreeMap<String, String>,
    node_selector: BTreeMap<String, String>,
    raw: Vec<PatchOperation>,
}

impl PodPatch {
    pub fn annotate(&mut self, key: &str, value: impl Into<String>) {
        self.annotations.insert(key.to_owned(), value.into());
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
        self.node_selector.extend(other.node_selector);
        self.raw.extend(other.raw);
    }

    /// The operations against the pod as it was received.
    #[must_use]
    pub fn against(self, pod: &PodView<'_>) -> Patch {
        let mut operations = Vec::with_capacity(self.annotations.len() + self.raw.len());
        merge_map(&mut operations, ["metadata", "annotations"], pod.metadata.annotations.is_some(), self.annotations);
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
