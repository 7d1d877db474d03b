//! Builders, one per kind; the tests sit in the files below by what they are about.

#![allow(clippy::needless_pass_by_value, reason = "literals read better by value")]

use jiff::{Timestamp, ToSpan};
use serde_json::{Value, json};

use super::facts::{annotated_ready, reports_ready};
use super::rule::{Common, initializing, preinit};
use super::*;
use crate::selector::Labels;

mod admission;
mod backfill;
mod evidence;
mod expression;
mod patches;
mod policy;
mod release;
mod reports;
mod rules;

pub(super) const KEY: &str = keys::STARTUP_INITIALIZING;
const BORN: Timestamp = Timestamp::constant(1_763_000_000, 0);

/// Seconds after the node's birth.
fn at(seconds: i64) -> Timestamp {
    BORN + seconds.seconds()
}

fn map(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

fn taint(key: &str, value: &str, effect: &str) -> Taint {
    serde_json::from_value(json!({"key": key, "value": value, "effect": effect})).unwrap()
}

/// A node as it is right after its birth: not ready, and held.
fn node(name: &str) -> NodeFacts {
    NodeFacts {
        name: name.to_owned(),
        uid: format!("uid-of-{name}"),
        created: BORN,
        deleting: false,
        labels: map(&[("kubernetes.io/hostname", name)]),
        annotations: map(&[("node.alpha.kubernetes.io/ttl", "0")]),
        taints: vec![taint("node.kubernetes.io/not-ready", "", "NoSchedule"), taint(KEY, "wait", "NoSchedule")],
        conditions: map(&[("Ready", "False")]),
    }
}

impl NodeFacts {
    fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.to_owned(), value.to_owned());
        self
    }
    fn annotate(mut self, key: &str, value: &str) -> Self {
        self.annotations.insert(key.to_owned(), value.to_owned());
        self
    }
    fn condition(mut self, kind: &str, status: &str) -> Self {
        self.conditions.insert(kind.to_owned(), status.to_owned());
        self
    }
    fn taint(mut self, key: &str, value: &str, effect: &str) -> Self {
        self.taints.push(taint(key, value, effect));
        self
    }
    fn without(mut self, key: &str) -> Self {
        self.taints.retain(|t| t.key != key);
        self
    }
}

/// An init DaemonSet that tolerates everything.
fn daemon_set(name: &str) -> DaemonSetFacts {
    daemon_set_from(name, json!({"containers": [], "tolerations": [{"operator": "Exists"}]}))
}

fn daemon_set_from(name: &str, spec: Value) -> DaemonSetFacts {
    let template = json!({"metadata": {"labels": {"startup.k8s.io/component": "init"}}, "spec": spec});
    DaemonSetFacts::of(
        Named::new("kube-system", name),
        format!("uid-of-{name}"),
        false,
        &serde_json::from_value(template).unwrap(),
    )
}

impl DaemonSetFacts {
    fn component(mut self, value: &str) -> Self {
        self.labels.insert(keys::STARTUP_COMPONENT.to_owned(), value.to_owned());
        self
    }
}

/// An init pod of that DaemonSet on the node under test, not ready.
fn pod(daemon_set: &str) -> DaemonPod {
    DaemonPod {
        named: Named::new("kube-system", format!("{daemon_set}-x7k2p")),
        owner: daemon_set.to_owned(),
        owner_uid: format!("uid-of-{daemon_set}"),
        labels: map(&[("startup.k8s.io/component", "init")]).into(),
        created: at(1),
        ending: false,
        annotated: false,
        ready: false,
    }
}

impl DaemonPod {
    fn ready(self) -> Self {
        Self { ready: true, ..self }
    }
    fn annotated(self) -> Self {
        Self { annotated: true, ..self }
    }
    fn component(self, value: &str) -> Self {
        Self { labels: map(&[("startup.k8s.io/component", value)]).into(), ..self }
    }
}

fn common() -> Common {
    Common::default()
}

/// The built-in rule, one phase.
fn built_in(common: &Common) -> Rules {
    let skip = vec![(keys::AKS_MODE.to_owned(), keys::AKS_MODE_SYSTEM.to_owned())];
    Rules { rules: Rule::built_in(&[initializing(KEY)], common), skip, ..Rules::default() }
}

fn two_phases(common: &Common) -> Rules {
    Rules { rules: Rule::built_in(&[preinit(), initializing(KEY)], common), ..built_in(common) }
}

/// Only this rule of the cluster's own.
fn custom(draft: Draft) -> Rules {
    let (rule, invalid) = draft.compile();
    assert_eq!(invalid, None);
    Rules { rules: vec![rule], ..Rules::default() }
}

/// What one look at the cluster says; with one rule, its verdict.
fn verdicts(
    rules: &Rules,
    node: &NodeFacts,
    daemon_sets: &[DaemonSetFacts],
    pods: &[DaemonPod],
    now: Timestamp,
) -> Vec<Verdict> {
    let seen = Seen { node, daemon_sets, pods, user_pods: false };
    decide(rules, &seen, now).verdicts.into_iter().map(|(_, verdict)| verdict).collect()
}

fn verdict(rules: &Rules, node: &NodeFacts, daemon_sets: &[DaemonSetFacts], pods: &[DaemonPod]) -> Verdict {
    let [verdict] = verdicts(rules, node, daemon_sets, pods, at(60)).try_into().unwrap();
    verdict
}

fn waits_for(unmet: Vec<Unmet>) -> Verdict {
    Verdict::Wait { until: None, why: Waiting::For(unmet) }
}

fn released() -> Verdict {
    Verdict::Release(Released::Ready)
}

fn agent() -> Named {
    Named::new("kube-system", "agent")
}

fn not_ready(name: &str) -> Unmet {
    Unmet::NotReady { daemon_set: Named::new("kube-system", name), pod: format!("{name}-x7k2p") }
}

fn no_pod(name: &str) -> Unmet {
    Unmet::NoPod { daemon_set: Named::new("kube-system", name) }
}

/// A node's JSON as the API server holds it.
fn as_json(node: &NodeFacts) -> Value {
    let mut json = json!({
        "metadata": {"name": node.name, "uid": node.uid, "labels": node.labels},
        "spec": {"podCIDR": "10.0.0.0/24"},
    });
    if !node.taints.is_empty() {
        json["spec"]["taints"] = json!(node.taints);
    }
    if !node.annotations.is_empty() {
        json["metadata"]["annotations"] = json!(node.annotations);
    }
    json
}

/// Applies a patch as the API server does: a test against null holds where the path is absent.
fn apply(patch: &json_patch::Patch, to: &Value) -> Result<Value, json_patch::PatchError> {
    let mut value = to.clone();
    for operation in &patch.0 {
        if let json_patch::PatchOperation::Test(test) = operation
            && test.value.is_null()
            && value.pointer(test.path.as_str()).is_none()
        {
            continue;
        }
        json_patch::patch(&mut value, std::slice::from_ref(operation))?;
    }
    Ok(value)
}
