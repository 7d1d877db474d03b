//! `WarmupConfig`, with a schema that refuses what could never be sent.
//!
//! What a schema cannot say (percent escapes, header names, which variables are known where) is said by
//! `Scenario::read` when a pod asks for the config, and then on the pod.

#![allow(clippy::duplicated_attributes, reason = "printed columns may be alike")]

use std::borrow::Cow;

use groundcrew_core::warmup::scenario::Spec;
use kube::CustomResource;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Written by users, read by the agent; what it means is in core.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(
    group = "kube-booster.io",
    version = "v1alpha1",
    kind = "WarmupConfig",
    namespaced,
    shortname = "wuc",
    doc = "Steps that warm a pod before it is Ready.",
    printcolumn(name = "Timeout", type_ = "string", json_path = ".spec.timeout"),
    printcolumn(name = "Steps", type_ = "string", json_path = ".spec.steps[*].name"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(transparent)]
pub struct WarmupConfigSpec(pub Spec);

impl JsonSchema for WarmupConfigSpec {
    fn schema_name() -> Cow<'static, str> {
        "WarmupConfigSpec".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "object",
            "required": ["steps"],
            "properties": {
                "timeout": duration("120s", "Of everything."),
                "steps": {"type": "array", "minItems": 1, "items": step(), "description": "Run in order."},
            },
        })
    }
}

fn step() -> Value {
    json!({
        "type": "object",
        "required": ["name", "requests"],
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "timeout": duration("30s", "Of this step."),
            "requests": {"type": "array", "minItems": 1, "items": request(), "description": "Sent in order."},
        },
    })
}

fn request() -> Value {
    json!({
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "protocol": {
                "type": "string", "enum": ["http", "https", "h2c", "grpc"],
                "description": "Default: the pod's.",
            },
            "endpoint": {
                "type": "string", "maxLength": 8192, "pattern": PATH,
                "description": "Path and query on the pod; {{variables}} are replaced.",
            },
            "method": {"type": "string", "default": "GET", "pattern": "^[A-Za-z]+$"},
            "headers": {
                "type": "object", "maxProperties": 50,
                "additionalProperties": {"type": "string", "pattern": r"^[^\x00-\x08\x0a-\x1f\x7f]*$"},
                "description": "{{variables}} are replaced in values.",
            },
            "body": {"type": "string", "maxLength": 65536, "description": "{{variables}} are replaced."},
            "grpcMethod": {
                "type": "string", "pattern": "^[A-Za-z0-9_.]+/[A-Za-z0-9_]+$",
                "description": "package.Service/Method; default: the health service.",
            },
            "grpcPayload": {"type": "string", "description": "JSON, encoded by server reflection."},
            "count": {"type": "integer", "minimum": 1, "maximum": 12000, "default": 1},
            "extract": {
                "type": "object", "description": "Variable to $.a.b in the last response body.",
                "additionalProperties": {"type": "string", "pattern": r"^\$(\.[^.\[]+|\[[0-9]+\])*$"},
            },
            "expectedStatus": {
                "type": "integer", "minimum": 0, "maximum": 599, "not": {"minimum": 1, "maximum": 99}, "default": 0,
                "description": "0 means 200 to 399.",
            },
        },
    })
}

/// A path with or without its slash, or a query alone; no host, no user, no control character.
const PATH: &str = concat!(
    r"^(/([^/@\\\x00-\x1f\x7f][^@\\\x00-\x1f\x7f]*)?",
    r"|[^/?:@\\\x00-\x1f\x7f]+([/?][^@\\\x00-\x1f\x7f]*)?",
    r"|\?[^@\\\x00-\x1f\x7f]*)?$"
);

fn duration(default: &str, about: &str) -> Value {
    json!({
        "type": "string",
        "default": default,
        "description": about,
        // Bounds the cost of the rule.
        "maxLength": 32,
        "pattern": r"^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$",
        "x-kubernetes-validations": [{
            "rule": "duration(self) > duration('0s') && duration(self) <= duration('5m')",
            "message": "must be more than 0s and at most 5m",
        }],
    })
}
