//! `NodeStartupRule`, as users write it.

#![allow(clippy::duplicated_attributes, reason = "two printed columns may have one type")]

use groundcrew_core::duration;
use groundcrew_core::node_startup::{Draft, Effect, Named, OnTimeout, ReadyBy};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube::{CustomResource, ResourceExt};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Holds new nodes by a taint until the evidence is there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, CustomResource, JsonSchema)]
#[kube(
    group = "groundcrew.io",
    version = "v1alpha1",
    kind = "NodeStartupRule",
    shortname = "nsr",
    status = "NodeStartupRuleStatus",
    printcolumn(name = "Taint", type_ = "string", json_path = ".status.taint"),
    printcolumn(name = "Held", type_ = "integer", json_path = ".status.held"),
    printcolumn(name = "TimedOut", type_ = "integer", json_path = ".status.timedOut"),
    printcolumn(name = "Accepted", type_ = "string", json_path = ".status.conditions[?(@.type=='Accepted')].status"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
// A changed taint would leave the old one behind; absent must stay absent for the same reason.
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "has(self.taint) == has(oldSelf.taint) && (!has(self.taint) || self.taint == oldSelf.taint)",
     "message": "taint cannot be changed; make a new rule"},
]))]
pub struct NodeStartupRuleSpec {
    /// Which nodes are tainted when they are created; absent means every node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_selector: Option<LabelSelector>,
    /// The default key is one that the cluster autoscaler knows as a startup taint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taint: Option<RuleTaint>,
    /// All that is given must hold at once.
    pub evidence: Evidence,
    /// What makes a pod ready: its readiness or its annotation, or the annotation alone.
    #[serde(default)]
    #[schemars(with = "ReadyByName", default)]
    pub ready_by: ReadyBy,
    /// A node is held at least this long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<DurationText>")]
    pub min_hold: Option<String>,
    /// Absent or 0s means none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<DurationText>")]
    pub timeout: Option<String>,
    #[serde(default)]
    #[schemars(with = "OnTimeoutName", default)]
    pub on_timeout: OnTimeout,
    /// Count whom it would hold, taint nobody.
    #[serde(default)]
    pub dry_run: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RuleTaint {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(min = 1, max = 317),
        regex(pattern = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
    )]
    pub key: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63), regex(pattern = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"))]
    pub value: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<EffectName>")]
    pub effect: Option<Effect>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
// Defaults fill the object before it is counted, so a number of properties would say nothing.
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "has(self.initPods) || has(self.expression) || (has(self.daemonSets) && self.daemonSets.size() > 0) || (has(self.conditions) && self.conditions.size() > 0) || (has(self.allDaemonSets) && self.allDaemonSets)",
     "message": "evidence is empty: nothing would ever hold a node"},
]))]
pub struct Evidence {
    /// Every DaemonSet whose pods carry these labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init_pods: Option<LabelSelector>,
    /// Where those DaemonSets are; empty means everywhere.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub init_namespaces: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub daemon_sets: Vec<DaemonSetName>,
    /// Every DaemonSet that can run on a held node.
    #[serde(default)]
    pub all_daemon_sets: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub conditions: Vec<NodeCondition>,
    /// CEL over `node` and `pods`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub expression: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DaemonSetName {
    pub namespace: String,
    pub name: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeCondition {
    #[serde(rename = "type")]
    pub type_: String,
    pub status: String,
}

/// Counts only: a list of nodes would grow with the cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeStartupRuleStatus {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taint: Option<String>,
    #[serde(default)]
    pub held: u32,
    #[serde(default)]
    pub timed_out: u32,
    #[serde(default)]
    pub cannot_run: u32,
    #[serde(default)]
    pub would_hold: u32,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

#[derive(JsonSchema)]
#[allow(dead_code, reason = "describes the texts of core's enums to the API server")]
enum EffectName {
    NoSchedule,
    NoExecute,
}

#[derive(Default, Serialize, JsonSchema)]
#[allow(dead_code, reason = "describes the texts of core's enums to the API server")]
enum ReadyByName {
    #[default]
    Any,
    Annotation,
}

#[derive(Default, Serialize, JsonSchema)]
#[allow(dead_code, reason = "describes the texts of core's enums to the API server")]
enum OnTimeoutName {
    #[default]
    Keep,
    Release,
}

#[derive(JsonSchema)]
#[schemars(transparent)]
#[allow(dead_code, reason = "describes durations to the API server")]
struct DurationText(#[schemars(regex(pattern = r"^([0-9]+(\.[0-9]+)?(ns|us|ms|s|m|h))+$"))] String);

impl NodeStartupRule {
    /// What `core` judges.
    #[must_use]
    pub fn draft(&self) -> Draft {
        let spec = &self.spec;
        let taint = spec.taint.clone().unwrap_or_default();
        let mut problem = None;
        let mut read = |field: &str, text: &Option<String>| match text.as_deref().map(duration::parse) {
            None => Duration::ZERO,
            Some(Ok(duration)) => duration,
            Some(Err(e)) => {
                problem.get_or_insert(format!("spec.{field}: {e}"));
                Duration::ZERO
            }
        };
        let (min_hold, timeout) = (read("minHold", &spec.min_hold), read("timeout", &spec.timeout));
        Draft {
            name: self.name_any(),
            node_selector: spec.node_selector.clone().unwrap_or_default(),
            taint_key: taint.key,
            taint_value: taint.value,
            effect: taint.effect,
            init_pods: spec.evidence.init_pods.clone(),
            init_namespaces: spec.evidence.init_namespaces.clone(),
            daemon_sets: spec.evidence.daemon_sets.iter().map(|d| Named::new(&d.namespace, &d.name)).collect(),
            all_daemon_sets: spec.evidence.all_daemon_sets,
            conditions: spec.evidence.conditions.iter().map(|c| (c.type_.clone(), c.status.clone())).collect(),
            expression: spec.evidence.expression.clone(),
            ready_by: spec.ready_by,
            min_hold,
            timeout: (!timeout.is_zero()).then_some(timeout),
            on_timeout: spec.on_timeout,
            dry_run: spec.dry_run,
            deleting: self.metadata.deletion_timestamp.is_some(),
            problem,
        }
    }
}
