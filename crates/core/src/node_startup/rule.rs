//! Rules: which nodes are held, by which taint, until what.
//!
//! The built-in rule keeps the taint, label and annotations of the seed; a `NodeStartupRule` compiles into the same
//! type, so there is one decision for both.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde::{Deserialize, Serialize};

use crate::keys::{self, Lookup};
use crate::names;
use crate::selector::{Misfit, Selector};

use super::expression::{self, Expression};
use super::facts::Named;
use super::guard;
use super::taint::{Effect, Taint, TaintSpec};

/// Everything that `decide` follows.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// The built-in phases in their order, then the cluster's own rules by name.
    pub rules: Vec<Rule>,
    /// Nodes with such a label are neither tainted at birth nor later.
    pub skip: Vec<(String, String)>,
    pub backfill: bool,
    pub guard: guard::Limits,
    /// Names of those that taint nobody for now: too many of their recent nodes never became ready.
    pub stopped: BTreeSet<String>,
    /// Rules of the cluster's own that cannot be followed, by name.
    pub refused: BTreeMap<String, Invalid>,
}

/// One taint and what lifts it.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    pub name: String,
    pub origin: Origin,
    pub nodes: Selector,
    /// As written, for the policy engine, where the API server does the matching.
    pub nodes_spec: LabelSelector,
    pub taint: TaintSpec,
    pub needs: Vec<Need>,
    pub ready_by: ReadyBy,
    pub min_hold: Duration,
    pub timeout: Option<Timeout>,
    /// Taints nobody new; those already held are let go as ever.
    pub dry_run: bool,
    /// On its way out: whatever it holds is let go now.
    pub retired: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Phases end in this order.
    BuiltIn {
        phase: usize,
    },
    Custom,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeout {
    pub after: Duration,
    pub then: OnTimeout,
}

/// What must be true before the taint goes. All of a rule's needs must be met at once.
#[derive(Clone, Debug, PartialEq)]
pub enum Need {
    /// Every DaemonSet whose pods carry these labels, in these namespaces (none means all).
    InitPods {
        labels: Selector,
        namespaces: Vec<String>,
    },
    DaemonSet(Named),
    /// Every DaemonSet that can run on a held node.
    AllDaemonSets,
    Condition {
        kind: String,
        status: String,
    },
    Expression(Expression),
    /// The rule cannot be read; what it holds stays held until it can.
    Broken(String),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReadyBy {
    #[default]
    Any,
    Annotation,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnTimeout {
    #[default]
    Keep,
    Release,
}

impl ReadyBy {
    pub const ALL: &'static [Self] = &[Self::Any, Self::Annotation];

    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Any => "any",
            Self::Annotation => "annotation",
        }
    }
}

impl OnTimeout {
    pub const ALL: &'static [Self] = &[Self::Keep, Self::Release];

    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Keep => "keep",
            Self::Release => "release",
        }
    }
}

/// One built-in taint and the label of the pods that lift it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Phase {
    pub name: String,
    pub taint_key: String,
    pub init_label: (String, String),
}

/// What the built-in phases share.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Common {
    pub ready_by: ReadyBy,
    pub min_hold: Duration,
    pub timeout: Option<Timeout>,
    pub init_namespaces: Vec<String>,
}

impl Rule {
    #[must_use]
    pub fn built_in(phases: &[Phase], common: &Common) -> Vec<Self> {
        let rule = |(index, phase): (usize, &Phase)| Self {
            name: phase.name.clone(),
            origin: Origin::BuiltIn { phase: index },
            nodes: Selector::everything(),
            nodes_spec: LabelSelector::default(),
            taint: TaintSpec::new(&phase.taint_key),
            needs: vec![Need::InitPods {
                labels: Selector::label(&phase.init_label.0, &phase.init_label.1),
                namespaces: common.init_namespaces.clone(),
            }],
            ready_by: common.ready_by,
            min_hold: common.min_hold,
            timeout: common.timeout,
            dry_run: false,
            retired: false,
        };
        phases.iter().enumerate().map(rule).collect()
    }

    /// Lets go of a taint that an earlier configuration set and this one does not name.
    #[must_use]
    pub fn of_the_past(taint: TaintSpec) -> Self {
        Self {
            name: format!("retired-{}", taint.key),
            origin: Origin::Custom,
            nodes: Selector::everything(),
            nodes_spec: LabelSelector::default(),
            taint,
            needs: Vec::new(),
            ready_by: ReadyBy::default(),
            min_hold: Duration::ZERO,
            timeout: None,
            dry_run: false,
            retired: true,
        }
    }

    #[must_use]
    pub fn is_built_in(&self) -> bool {
        matches!(self.origin, Origin::BuiltIn { .. })
    }

    /// Whether it may put its taint on anyone at all.
    #[must_use]
    pub fn taints(&self) -> bool {
        !self.dry_run && !self.retired && !self.needs.iter().any(|need| matches!(need, Need::Broken(_)))
    }
}

impl Rules {
    /// Whether a label keeps the built-in taint off the node. A rule of the cluster's own says itself whom it means.
    #[must_use]
    pub fn skips(&self, rule: &Rule, labels: &impl Lookup) -> bool {
        rule.is_built_in() && self.skip.iter().any(|(key, value)| labels.value(key) == Some(value))
    }

    #[must_use]
    pub fn is_stopped(&self, rule: &Rule) -> bool {
        self.stopped.contains(&rule.name)
    }

    /// Names of the cluster's own rules that are deleted, or refused for the very taint of another: they set no taint,
    /// and never will.
    pub fn over(&self) -> impl Iterator<Item = &String> {
        let own = |name: &String| self.rules.iter().find(|rule| !rule.is_built_in() && rule.name == *name);
        let retired = self.rules.iter().filter(|rule| !rule.is_built_in() && rule.retired).map(|rule| &rule.name);
        retired.chain(self.refused.keys().filter(move |name| own(name).is_none()))
    }

    /// Whether there is anything to decide about a node with these taints; most nodes were released long ago.
    #[must_use]
    pub fn concern(&self, taints: &[Taint]) -> bool {
        self.backfill || taints.iter().any(|taint| self.rules.iter().any(|rule| rule.taint.is(taint)))
    }

    /// Whether the rule wants a node with these labels held from its birth.
    #[must_use]
    pub fn holds_new(&self, rule: &Rule, labels: &impl Lookup) -> bool {
        rule.taints() && rule.nodes.matches(labels) && !self.skips(rule, labels)
    }
}

/// The phases of the contract: one, or two where asked for.
#[must_use]
pub fn initializing(taint_key: &str) -> Phase {
    Phase {
        name: "initializing".to_owned(),
        taint_key: taint_key.to_owned(),
        init_label: (keys::STARTUP_COMPONENT.to_owned(), keys::STARTUP_COMPONENT_INIT.to_owned()),
    }
}

#[must_use]
pub fn preinit() -> Phase {
    Phase {
        name: "preinit".to_owned(),
        taint_key: keys::STARTUP_PREINIT.to_owned(),
        init_label: (keys::STARTUP_COMPONENT.to_owned(), keys::STARTUP_COMPONENT_PREINIT.to_owned()),
    }
}

/// The spec of a `NodeStartupRule`, parsed but not yet judged.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    pub name: String,
    pub node_selector: LabelSelector,
    /// Absent parts take the defaults of [`Draft::taint`].
    pub taint_key: Option<String>,
    pub taint_value: Option<String>,
    pub effect: Option<Effect>,
    pub init_pods: Option<LabelSelector>,
    pub init_namespaces: Vec<String>,
    pub daemon_sets: Vec<Named>,
    pub all_daemon_sets: bool,
    pub conditions: Vec<(String, String)>,
    pub expression: Option<String>,
    pub ready_by: ReadyBy,
    pub min_hold: Duration,
    pub timeout: Option<Duration>,
    pub on_timeout: OnTimeout,
    pub dry_run: bool,
    pub deleting: bool,
    /// What the reader of the spec could not make sense of.
    pub problem: Option<String>,
}

/// Why a rule cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("spec.nodeSelector: {0}")]
    NodeSelector(Misfit),
    #[error("spec.evidence.initPods: {0}")]
    InitPods(Misfit),
    #[error("spec.evidence.initPods selects every DaemonSet; say allDaemonSets if that is meant")]
    SelectsAll,
    #[error("spec.evidence.expression: {0}")]
    Expression(#[from] expression::Invalid),
    #[error("spec.evidence is empty: nothing would ever hold a node")]
    NoEvidence,
    #[error("spec.minHold is longer than spec.timeout")]
    HoldBeyondTimeout,
    #[error("the name {0} belongs to a built-in phase")]
    NameTaken(String),
    /// The API server would refuse every new node that carries it.
    #[error(
        "spec.taint: {0} is no taint: a key is like example.com/name, the name and the value of at most 63 letters, digits, -, _ and ."
    )]
    Taint(String),
    #[error("spec.taint.key {0} belongs to another rule")]
    TaintTaken(String),
    #[error("{0}")]
    Unreadable(String),
}

impl Draft {
    /// The key is one that the cluster autoscaler knows as a startup taint without being told.
    #[must_use]
    pub fn taint(&self) -> TaintSpec {
        let key = self.taint_key.clone().unwrap_or_else(|| format!("{}{}", keys::AUTOSCALER_STARTUP_TAINT, self.name));
        TaintSpec {
            key,
            value: self.taint_value.clone().unwrap_or_else(|| keys::STARTUP_WAIT.to_owned()),
            effect: self.effect.unwrap_or(Effect::NoSchedule),
        }
    }

    /// The rule, and what is wrong with it. A broken rule still knows its taint, so what it holds is not forgotten.
    #[must_use]
    pub fn compile(self) -> (Rule, Option<Invalid>) {
        let (nodes, needs, invalid) = match self.judge() {
            Ok((nodes, needs)) => (nodes, needs, None),
            Err(invalid) => (Selector::everything(), vec![Need::Broken(invalid.to_string())], Some(invalid)),
        };
        let rule = Rule {
            taint: self.taint(),
            name: self.name,
            origin: Origin::Custom,
            nodes,
            nodes_spec: self.node_selector,
            needs,
            ready_by: self.ready_by,
            min_hold: self.min_hold,
            timeout: self.timeout.map(|after| Timeout { after, then: self.on_timeout }),
            dry_run: self.dry_run,
            retired: self.deleting,
        };
        (rule, invalid)
    }

    fn judge(&self) -> Result<(Selector, Vec<Need>), Invalid> {
        if let Some(problem) = &self.problem {
            return Err(Invalid::Unreadable(problem.clone()));
        }
        let taint = self.taint();
        if !names::is_qualified(&taint.key) || !names::is_value(&taint.value) {
            return Err(Invalid::Taint(taint.to_string()));
        }
        let nodes = Selector::parse(&self.node_selector).map_err(Invalid::NodeSelector)?;
        if self.timeout.is_some_and(|timeout| self.min_hold > timeout) {
            return Err(Invalid::HoldBeyondTimeout);
        }
        let mut needs = Vec::new();
        if let Some(init_pods) = &self.init_pods {
            let labels = Selector::parse(init_pods).map_err(Invalid::InitPods)?;
            if labels.is_everything() {
                return Err(Invalid::SelectsAll);
            }
            needs.push(Need::InitPods { labels, namespaces: self.init_namespaces.clone() });
        }
        needs.extend(self.daemon_sets.iter().cloned().map(Need::DaemonSet));
        needs.extend(self.all_daemon_sets.then_some(Need::AllDaemonSets));
        let condition =
            |(kind, status): &(String, String)| Need::Condition { kind: kind.clone(), status: status.clone() };
        needs.extend(self.conditions.iter().map(condition));
        if let Some(text) = &self.expression {
            needs.push(Need::Expression(Expression::compile(text)?));
        }
        if needs.is_empty() { Err(Invalid::NoEvidence) } else { Ok((nodes, needs)) }
    }
}

/// What an earlier configuration set and none of the rules knows.
#[must_use]
pub fn orphaned(rules: &[Rule], recorded: &[TaintSpec]) -> Vec<TaintSpec> {
    let known = |taint: &&TaintSpec| rules.iter().any(|rule| rule.taint.clashes(*taint));
    recorded.iter().filter(|taint| !known(taint)).cloned().collect()
}

/// Two rules must not share a taint: each would undo the other. Nor a name: counts and events would mix. The first by
/// order keeps it.
///
/// A refused rule with the very taint of another is no rule at all: its selector, its timeout or its end would release
/// nodes that the other holds. One with another value or key may hold nodes of its own, and stays for their sake.
pub fn refuse_doubles(rules: &mut Vec<Rule>) -> BTreeMap<String, Invalid> {
    let mut refused = BTreeMap::new();
    let mut taken: Vec<(String, TaintSpec)> = Vec::new();
    rules.retain_mut(|rule| {
        let invalid = match taken.iter().find(|(name, taint)| *name == rule.name || taint.clashes(&rule.taint)) {
            None => {
                taken.push((rule.name.clone(), rule.taint.clone()));
                return true;
            }
            Some((name, _)) if *name == rule.name => Invalid::NameTaken(name.clone()),
            Some(_) => Invalid::TaintTaken(rule.taint.key.clone()),
        };
        rule.needs = vec![Need::Broken(invalid.to_string())];
        refused.insert(rule.name.clone(), invalid);
        !taken.iter().any(|(_, taint)| *taint == rule.taint)
    });
    refused
}
