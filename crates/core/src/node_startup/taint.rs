//! Taints as nodes carry them, and the patches that add and remove exactly ours.
//!
//! Guarantees: a foreign taint is never lost, re-added or moved. Every write of a living node tests its uid and its
//! whole taint list, so a patch made from an old reading fails instead of undoing what another writer did since.
//! Caveats: `spec.taints` is one atomic list to every merge patch; only JSON Patch can aim at one entry.

use std::fmt;

use jiff::Timestamp;
use json_patch::{Patch, PatchOperation, RemoveOperation, TestOperation};
use jsonptr::PointerBuf;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::keys;
use crate::patch::add;
use crate::selector::Tainted;

use super::NodeFacts;

/// One entry of `spec.taints`, kept to the letter: fields newer than this program go back as they came.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Taint {
    pub key: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    pub effect: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_added: Option<String>,
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Taint {
    /// When it was added, if it says so.
    #[must_use]
    pub fn added(&self) -> Option<Timestamp> {
        self.time_added.as_deref().and_then(|text| text.parse().ok())
    }
}

impl Tainted for Taint {
    fn key(&self) -> &str {
        &self.key
    }
    fn value(&self) -> &str {
        self.value.as_deref().unwrap_or_default()
    }
    fn effect(&self) -> &str {
        &self.effect
    }
}

/// A taint groundcrew sets: `key=value:effect`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TaintSpec {
    pub key: String,
    pub value: String,
    pub effect: Effect,
}

/// What keeps pods away. `PreferNoSchedule` is missing on purpose: it holds nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Effect {
    NoSchedule,
    NoExecute,
}

impl Effect {
    pub const ALL: &'static [Self] = &[Self::NoSchedule, Self::NoExecute];

    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::NoSchedule => "NoSchedule",
            Self::NoExecute => "NoExecute",
        }
    }
}

impl TaintSpec {
    #[must_use]
    pub fn new(key: impl Into<String>) -> Self {
        Self { key: key.into(), value: keys::STARTUP_WAIT.to_owned(), effect: Effect::NoSchedule }
    }

    /// Exactly this taint; the same key with another value or effect is somebody else's.
    #[must_use]
    pub fn is(&self, taint: &impl Tainted) -> bool {
        self.clashes(taint) && taint.value() == self.value
    }

    /// The API server refuses a second taint of one key and effect.
    #[must_use]
    pub fn clashes(&self, taint: &impl Tainted) -> bool {
        taint.key() == self.key && taint.effect() == self.effect.name()
    }

    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({"key": self.key, "value": self.value, "effect": self.effect.name()})
    }
}

impl Tainted for TaintSpec {
    fn key(&self) -> &str {
        &self.key
    }
    fn value(&self) -> &str {
        &self.value
    }
    fn effect(&self) -> &str {
        self.effect.name()
    }
}

impl fmt::Display for TaintSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}:{}", self.key, self.value, self.effect.name())
    }
}

/// An annotation of the node that goes along with a taint's removal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    pub key: &'static str,
    pub at: Timestamp,
}

/// Removes these taints and writes the marks, or fails as a whole; `None` when the node carries none of them.
#[must_use]
pub fn release(node: &NodeFacts, taints: &[&TaintSpec], marks: &[Mark]) -> Option<Patch> {
    let ours = |taint: &Taint| taints.iter().any(|spec| spec.is(taint));
    let found: Vec<usize> = node.taints.iter().enumerate().filter(|(_, t)| ours(t)).map(|(i, _)| i).collect();
    if found.is_empty() {
        return None;
    }
    let mut operations = guards(node);
    // From the end, so that earlier positions stay true.
    let positions = found.iter().rev().map(ToString::to_string);
    operations.extend(positions.map(|at| remove(["spec", "taints", at.as_str()])));
    annotate(&mut operations, node, marks);
    Some(Patch(operations))
}

/// Adds the taints to a living node, saying since when it is held; `None` when there is nothing to add.
#[must_use]
pub fn backfill<'t>(node: &NodeFacts, taints: impl Iterator<Item = &'t TaintSpec>, now: Timestamp) -> Option<Patch> {
    let fits = |spec: &&TaintSpec| !node.taints.iter().any(|t| spec.clashes(t));
    let mut values = taints.filter(fits).map(|spec| {
        let TaintSpec { key, value, effect } = spec;
        // The node's age says nothing about how long it has been held.
        json!({"key": key, "value": value, "effect": effect.name(), "timeAdded": crate::timestamp::text(now)})
    });
    let first = values.next()?;
    let mut operations = guards(node);
    // Another replica may have released the node since: then this must fail.
    operations.push(test_absent(node, keys::STARTUP_COMPLETED_AT));
    operations.push(append(node.taints.is_empty(), first));
    operations.extend(values.map(|value| append(false, value)));
    Some(Patch(operations))
}

/// A new last entry of the taint list, which is created where there is none.
pub(super) fn append(none_yet: bool, taint: Value) -> PatchOperation {
    match none_yet {
        true => add(pointer(["spec", "taints"]), json!([taint])),
        false => add(pointer(["spec", "taints", "-"]), taint),
    }
}

/// This very node object, with this very list. A test against `null` holds where the path is absent.
fn guards(node: &NodeFacts) -> Vec<PatchOperation> {
    let list = if node.taints.is_empty() { Value::Null } else { json!(node.taints) };
    vec![test(pointer(["metadata", "uid"]), Value::String(node.uid.clone())), test(pointer(["spec", "taints"]), list)]
}

fn test_absent(node: &NodeFacts, annotation: &str) -> PatchOperation {
    if node.annotations.is_empty() {
        return test(pointer(["metadata", "annotations"]), Value::Null);
    }
    let value = node.annotations.get(annotation).map_or(Value::Null, |text| Value::String(text.clone()));
    test(pointer(["metadata", "annotations", annotation]), value)
}

fn annotate(operations: &mut Vec<PatchOperation>, node: &NodeFacts, marks: &[Mark]) {
    let text = |mark: &Mark| Value::String(mark.at.as_second().to_string());
    if marks.is_empty() {
        return;
    }
    if node.annotations.is_empty() {
        // Without the test, annotations written since our reading would be replaced by this map.
        let all: Map<String, Value> = marks.iter().map(|m| (m.key.to_owned(), text(m))).collect();
        operations.push(test(pointer(["metadata", "annotations"]), Value::Null));
        operations.push(add(pointer(["metadata", "annotations"]), Value::Object(all)));
        return;
    }
    operations.extend(marks.iter().map(|m| add(pointer(["metadata", "annotations", m.key]), text(m))));
}

fn pointer<const N: usize>(tokens: [&str; N]) -> PointerBuf {
    PointerBuf::from_tokens(tokens)
}

fn remove<const N: usize>(tokens: [&str; N]) -> PatchOperation {
    PatchOperation::Remove(RemoveOperation { path: pointer(tokens) })
}

fn test(path: PointerBuf, value: Value) -> PatchOperation {
    PatchOperation::Test(TestOperation { path, value })
}
