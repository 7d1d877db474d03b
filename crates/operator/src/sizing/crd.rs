//! `FlexDaemonsetTemplate`, with a schema that refuses what could not be used.

use std::collections::BTreeMap;

use groundcrew_core::sizing::{Distribution as Spread, PerResource, Problem, Raw, Template};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// Which share of a node the pod of a DaemonSet gets.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(
    group = "flexdaemonsets.xai",
    version = "v1alpha1",
    kind = "FlexDaemonsetTemplate",
    shortname = "fdt",
    status = "TemplateStatus",
    doc = "Sizes the pods of the DaemonSets that name it as shares of the node they land on.",
    printcolumn = r#"{"name": "CPU%", "type": "integer", "jsonPath": ".spec.cpuPercentage"}"#,
    printcolumn = r#"{"name": "Memory%", "type": "integer", "jsonPath": ".spec.memoryPercentage"}"#,
    printcolumn = r#"{"name": "Storage%", "type": "integer", "jsonPath": ".spec.storagePercentage"}"#,
    printcolumn = r#"{"name": "DaemonSets", "type": "integer", "jsonPath": ".status.daemonSets"}"#,
    printcolumn = r#"{"name": "Pods", "type": "integer", "jsonPath": ".status.pods"}"#,
    printcolumn = r#"{"name": "Resizing", "type": "integer", "jsonPath": ".status.podsResizing"}"#,
    printcolumn = r#"{"name": "Restart", "type": "integer", "jsonPath": ".status.podsNeedingRestart"}"#,
    printcolumn = r#"{"name": "Ready", "type": "string", "jsonPath": ".status.conditions[?(@.type==\"Ready\")].status"}"#,
    printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
#[x_kube(
    validation = Rule::new(ordered("minCPU", "maxCPU")).message("minCPU must not be above maxCPU"),
    validation = Rule::new(ordered("minMemory", "maxMemory")).message("minMemory must not be above maxMemory"),
    validation = Rule::new(ordered("minStorage", "maxStorage")).message("minStorage must not be above maxStorage")
)]
#[serde(rename_all = "camelCase")]
pub struct TemplateSpec {
    /// Percentage of the node's allocatable cpu.
    #[schemars(range(min = 1, max = 100))]
    pub cpu_percentage: i32,
    /// Percentage of the node's allocatable memory.
    #[schemars(range(min = 1, max = 100))]
    pub memory_percentage: i32,
    /// Percentage of the node's allocatable ephemeral storage.
    #[schemars(range(min = 1, max = 100))]
    pub storage_percentage: i32,
    /// The least cpu, like 100m.
    #[serde(rename = "minCPU", default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "minimum")]
    pub min_cpu: Option<String>,
    /// The least memory, like 128Mi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "minimum")]
    pub min_memory: Option<String>,
    /// The least ephemeral storage, like 1Gi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "minimum")]
    pub min_storage: Option<String>,
    /// The most cpu, like 4.
    #[serde(rename = "maxCPU", default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "maximum")]
    pub max_cpu: Option<String>,
    /// The most memory, like 24Gi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "maximum")]
    pub max_memory: Option<String>,
    /// The most ephemeral storage, like 100Gi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "maximum")]
    pub max_storage: Option<String>,
    /// Whether the containers share the pod's size, or each gets the full share.
    #[serde(default)]
    pub distribution: Distribution,
}

/// Whether the containers share the pod's size, or each gets the full share.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum Distribution {
    #[default]
    Pod,
    PerContainer,
}

/// Who uses the template, and whose pods do not have their size yet.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TemplateStatus {
    /// The generation of the template these numbers are about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "count")]
    pub observed_generation: Option<i64>,
    /// DaemonSets that name this template.
    #[serde(default)]
    #[schemars(schema_with = "count")]
    pub daemon_sets: i64,
    /// Their pods.
    #[serde(default)]
    #[schemars(schema_with = "count")]
    pub pods: i64,
    /// Pods on their way to another size.
    #[serde(default)]
    #[schemars(schema_with = "count")]
    pub pods_resizing: i64,
    /// Pods that have their size only after the next restart.
    #[serde(default)]
    #[schemars(schema_with = "count")]
    pub pods_needing_restart: i64,
    /// Why they need it; a pod can have several reasons.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "counts")]
    pub restart_reasons: BTreeMap<String, i64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions")]
    pub conditions: Vec<Condition>,
}

/// An empty text means absent, as it did before there was a schema.
fn minimum(_: &mut SchemaGenerator) -> Schema {
    quantity("self == '' || (isQuantity(self) && quantity(self).compareTo(quantity('0')) >= 0)", "from 0 up")
}

fn maximum(_: &mut SchemaGenerator) -> Schema {
    quantity("self == '' || (isQuantity(self) && quantity(self).isGreaterThan(quantity('0')))", "above 0")
}

fn quantity(rule: &str, note: &str) -> Schema {
    let message = format!("must be a quantity {note}, like 100m or 128Mi");
    json_schema!({
        "type": "string",
        // Bounds the cost of the rules; no size needs more digits.
        "maxLength": 64,
        "x-kubernetes-validations": [{"rule": rule, "message": message}],
    })
}

/// Texts that are no quantities have their own message.
fn ordered(min: &str, max: &str) -> String {
    let is = |field: &str| format!("has(self.{field}) && isQuantity(self.{field})");
    format!("!({} && {}) || quantity(self.{min}).compareTo(quantity(self.{max})) <= 0", is(min), is(max))
}

fn count(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "integer", "format": "int64", "minimum": 0})
}

fn counts(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "object", "additionalProperties": {"type": "integer", "format": "int64"}})
}

fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status", "reason", "message", "lastTransitionTime"],
            "properties": {
                "type": {"type": "string", "maxLength": 316},
                "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                "reason": {"type": "string", "minLength": 1, "maxLength": 1024},
                "message": {"type": "string", "maxLength": 32768},
                "lastTransitionTime": {"type": "string", "format": "date-time"},
                "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
            },
        },
    })
}

impl TemplateSpec {
    /// Objects from before the schema can still be wrong.
    pub fn read(&self) -> Result<Template, Problem> {
        let text = Option::as_deref;
        Template::read(&Raw {
            percent: PerResource {
                cpu: self.cpu_percentage.into(),
                memory: self.memory_percentage.into(),
                storage: self.storage_percentage.into(),
            },
            min: PerResource {
                cpu: text(&self.min_cpu),
                memory: text(&self.min_memory),
                storage: text(&self.min_storage),
            },
            max: PerResource {
                cpu: text(&self.max_cpu),
                memory: text(&self.max_memory),
                storage: text(&self.max_storage),
            },
            distribution: match self.distribution {
                Distribution::Pod => Spread::Pod,
                Distribution::PerContainer => Spread::PerContainer,
            },
        })
    }
}
