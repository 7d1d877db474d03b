//! Node CREATE: which taints a node is born with.
//!
//! ```text
//! no taints        add /spec/taints    [taint]
//! some             add /spec/taints/-  taint
//! already there    nothing
//! ```

use json_patch::Patch;
use jsonptr::PointerBuf;
use serde_json::json;

use crate::patch::add;
use crate::pod::{Text, TextMap};
use crate::selector::Tainted;

use super::rule::{Rule, Rules};
use super::taint::append;

/// A node as admission sees it, borrowed from the review.
#[derive(Debug, Default, serde::Deserialize)]
pub struct NodeView<'a> {
    #[serde(borrow, default)]
    pub metadata: NodeMeta<'a>,
    #[serde(borrow, default)]
    pub spec: Option<NodeSpec<'a>>,
}

#[derive(Debug, Default, serde::Deserialize)]
pub struct NodeMeta<'a> {
    #[serde(borrow, default)]
    pub name: Option<Text<'a>>,
    #[serde(borrow, default)]
    pub labels: Option<TextMap<'a>>,
}

#[derive(Debug, Default, serde::Deserialize)]
pub struct NodeSpec<'a> {
    #[serde(borrow, default)]
    pub taints: Option<Vec<TaintView<'a>>>,
}

#[derive(Debug, serde::Deserialize)]
pub struct TaintView<'a> {
    #[serde(borrow)]
    pub key: Text<'a>,
    #[serde(borrow, default)]
    pub value: Option<Text<'a>>,
    #[serde(borrow)]
    pub effect: Text<'a>,
}

impl Tainted for TaintView<'_> {
    fn key(&self) -> &str {
        self.key.as_str()
    }
    fn value(&self) -> &str {
        self.value.as_ref().map_or("", Text::as_str)
    }
    fn effect(&self) -> &str {
        self.effect.as_str()
    }
}

/// What admission does about one rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Birth {
    Taint,
    /// The rule does not mean this node, or means nobody now.
    NotAsked,
    AlreadyThere,
    /// A foreign taint has our key and effect; a second one would make the API server refuse the node.
    Clash,
    /// Too many recent nodes never became ready.
    Stopped,
}

#[must_use]
pub fn decide(rules: &Rules, rule: &Rule, node: &NodeView<'_>) -> Birth {
    let taints = || node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    if !rules.holds_new(rule, &node.metadata.labels) {
        Birth::NotAsked
    } else if taints().any(|t| rule.taint.is(t)) {
        Birth::AlreadyThere
    } else if taints().any(|t| rule.taint.clashes(t)) {
        Birth::Clash
    } else if rules.is_stopped(rule) {
        Birth::Stopped
    } else {
        Birth::Taint
    }
}

/// The patch that gives the node the taints of these rules; empty when there are none.
#[must_use]
pub fn patch<'r>(node: &NodeView<'_>, rules: impl Iterator<Item = &'r Rule>) -> Patch {
    let mut values = rules.map(|rule| rule.taint.to_json());
    let Some(first) = values.next() else { return Patch(Vec::new()) };
    let taints = node.spec.as_ref().map(|spec| spec.taints.as_ref().map_or(0, Vec::len));
    let opening = match taints {
        None => add(PointerBuf::from_tokens(["spec"]), json!({"taints": [first]})),
        Some(count) => append(count == 0, first),
    };
    Patch(std::iter::once(opening).chain(values.map(|value| append(false, value))).collect())
}
