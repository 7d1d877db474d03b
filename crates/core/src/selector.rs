//! Selectors, node affinity and tolerations, judged as Kubernetes judges them.
//!
//! Parsed once; matching cannot fail. A requirement that makes no sense matches nothing, as in the scheduler.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{self as api, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use crate::keys::Lookup;

/// A label selector, ready to match. The default matches everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    requirements: Vec<Requirement>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    test: Test,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    In(Vec<String>),
    NotIn(Vec<String>),
    Exists,
    DoesNotExist,
    GreaterThan(i64),
    LessThan(i64),
}

/// Why a selector cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("operator {operator:?} of key {key:?} does not fit its {values} values")]
pub struct Misfit {
    pub key: String,
    pub operator: String,
    pub values: usize,
}

impl Selector {
    /// Matches every object.
    #[must_use]
    pub fn everything() -> Self {
        Self::default()
    }

    /// One label with one value.
    #[must_use]
    pub fn label(key: &str, value: &str) -> Self {
        let test = Test::In(vec![value.to_owned()]);
        Self { requirements: vec![Requirement { key: key.to_owned(), test }] }
    }

    pub fn parse(selector: &LabelSelector) -> Result<Self, Misfit> {
        let equal = selector.match_labels.iter().flatten().map(|(key, value)| Ok(equality(key, value)));
        let expressions = selector.match_expressions.iter().flatten().map(|r| {
            let values = r.values.as_deref().unwrap_or_default();
            let known = matches!(r.operator.as_str(), "In" | "NotIn" | "Exists" | "DoesNotExist");
            if known { requirement(&r.key, &r.operator, values) } else { misfit(&r.key, &r.operator, values) }
        });
        let requirements = equal.chain(expressions).collect::<Result<_, _>>()?;
        Ok(Self { requirements })
    }

    #[must_use]
    pub fn is_everything(&self) -> bool {
        self.requirements.is_empty()
    }

    #[must_use]
    pub fn matches(&self, labels: &impl Lookup) -> bool {
        self.requirements.iter().all(|r| r.holds(labels.value(&r.key)))
    }
}

impl Requirement {
    fn holds(&self, value: Option<&str>) -> bool {
        match (&self.test, value) {
            (Test::Exists, value) => value.is_some(),
            (Test::DoesNotExist, value) => value.is_none(),
            (Test::In(values), Some(value)) => values.iter().any(|v| v == value),
            (Test::NotIn(values), Some(value)) => values.iter().all(|v| v != value),
            (Test::NotIn(_), None) => true,
            (Test::GreaterThan(bound), Some(value)) => value.parse::<i64>().is_ok_and(|v| v > *bound),
            (Test::LessThan(bound), Some(value)) => value.parse::<i64>().is_ok_and(|v| v < *bound),
            (Test::In(_) | Test::GreaterThan(_) | Test::LessThan(_), None) => false,
        }
    }
}

fn equality(key: &str, value: &str) -> Requirement {
    Requirement { key: key.to_owned(), test: Test::In(vec![value.to_owned()]) }
}

fn misfit<T>(key: &str, operator: &str, values: &[String]) -> Result<T, Misfit> {
    Err(Misfit { key: key.to_owned(), operator: operator.to_owned(), values: values.len() })
}

fn requirement(key: &str, operator: &str, values: &[String]) -> Result<Requirement, Misfit> {
    let number = || match values {
        [one] => one.parse::<i64>().ok(),
        _ => None,
    };
    let test = match operator {
        "In" if !values.is_empty() => Some(Test::In(values.to_vec())),
        "NotIn" if !values.is_empty() => Some(Test::NotIn(values.to_vec())),
        "Exists" if values.is_empty() => Some(Test::Exists),
        "DoesNotExist" if values.is_empty() => Some(Test::DoesNotExist),
        "Gt" => number().map(Test::GreaterThan),
        "Lt" => number().map(Test::LessThan),
        _ => None,
    };
    test.map_or_else(|| misfit(key, operator, values), |test| Ok(Requirement { key: key.to_owned(), test }))
}

/// Where a pod may run at all: its node selector and its required node affinity. The default allows every node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    node_selector: Vec<Requirement>,
    /// One of these must match; `None` means no affinity, an empty list matches no node.
    terms: Option<Vec<Term>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Term {
    labels: Vec<Requirement>,
    /// On `metadata.name`, the only field Kubernetes knows here.
    names: Vec<Requirement>,
}

impl Placement {
    #[must_use]
    pub fn of(pod: &PodSpec) -> Self {
        let node_selector = pod.node_selector.iter().flatten().map(|(key, value)| equality(key, value)).collect();
        let affinity = pod.affinity.as_ref().and_then(|a| a.node_affinity.as_ref());
        let required = affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
        Self { node_selector, terms: required.map(|r| r.node_selector_terms.iter().filter_map(Term::parse).collect()) }
    }

    #[must_use]
    pub fn allows(&self, node: &str, labels: &impl Lookup) -> bool {
        self.node_selector.iter().all(|r| r.holds(labels.value(&r.key)))
            && self.terms.as_ref().is_none_or(|terms| terms.iter().any(|t| t.matches(node, labels)))
    }
}

impl Term {
    /// `None` for what matches no node: an empty term, or one the scheduler cannot read.
    fn parse(term: &api::NodeSelectorTerm) -> Option<Self> {
        let read = |r: &api::NodeSelectorRequirement| {
            requirement(&r.key, &r.operator, r.values.as_deref().unwrap_or_default()).ok()
        };
        let labels: Vec<_> = term.match_expressions.iter().flatten().map(read).collect::<Option<_>>()?;
        let names: Vec<_> = term.match_fields.iter().flatten().map(read).collect::<Option<_>>()?;
        let one_name = |r: &Requirement| {
            r.key == "metadata.name" && matches!(&r.test, Test::In(names) | Test::NotIn(names) if names.len() == 1)
        };
        let usable = !(labels.is_empty() && names.is_empty()) && names.iter().all(one_name);
        usable.then_some(Self { labels, names })
    }

    fn matches(&self, node: &str, labels: &impl Lookup) -> bool {
        self.labels.iter().all(|r| r.holds(labels.value(&r.key))) && self.names.iter().all(|r| r.holds(Some(node)))
    }
}

/// What identifies a taint to a toleration.
pub trait Tainted {
    fn key(&self) -> &str;
    fn value(&self) -> &str;
    fn effect(&self) -> &str;
}

/// A toleration as a pod states it.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(default)]
pub struct Toleration {
    pub key: String,
    pub operator: String,
    pub value: String,
    pub effect: String,
}

impl Toleration {
    #[must_use]
    pub fn exists(key: &str, effect: &str) -> Self {
        let operator = "Exists".to_owned();
        Self { key: key.to_owned(), operator, value: String::new(), effect: effect.to_owned() }
    }

    #[must_use]
    pub fn tolerates(&self, taint: &impl Tainted) -> bool {
        let open_or = |wanted: &str, got: &str| wanted.is_empty() || wanted == got;
        if !open_or(&self.effect, taint.effect()) || !open_or(&self.key, taint.key()) {
            return false;
        }
        match self.operator.as_str() {
            "" | "Equal" => self.value == taint.value(),
            "Exists" => true,
            // `Lt` and `Gt` sit behind a feature gate that is off by default: what the scheduler ignores we ignore too.
            _ => false,
        }
    }
}

impl From<&api::Toleration> for Toleration {
    fn from(from: &api::Toleration) -> Self {
        let text = |part: &Option<String>| part.clone().unwrap_or_default();
        Self {
            key: text(&from.key),
            operator: text(&from.operator),
            value: text(&from.value),
            effect: text(&from.effect),
        }
    }
}

/// Whether some toleration of the list covers the taint.
#[must_use]
pub fn tolerated(tolerations: &[Toleration], taint: &impl Tainted) -> bool {
    tolerations.iter().any(|t| t.tolerates(taint))
}

/// Labels or annotations as facts keep them.
pub type Labels = BTreeMap<String, String>;

#[cfg(test)]
mod tests;
