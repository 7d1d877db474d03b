//! `warmup`: the gate in the admission patch, the agent that opens it, the leader that opens it if the agent does not.
//!
//! ```text
//! every replica   leases of agents ─► is one alive? ─► admission adds the gate, or leaves it out
//! the leader      shut gates + leases ─► backstop ─► opens what an agent leaves shut
//! each node       own pods ─► decide ─► places, rate ─► load ─► one condition, one annotation
//! ```

use std::collections::BTreeMap;

use groundcrew_core::config::Config;
use groundcrew_core::feature::Feature;
use groundcrew_core::keys;
use groundcrew_core::warmup::admission;
use groundcrew_core::warmup::facts::{Seen, Spec, Status};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::rbac::v1::PolicyRule;
use kube::CustomResourceExt;
use kube::api::ObjectMeta;
use serde::Deserialize;

use crate::admission::registration::{Entry, Namespaces};
use crate::admission::{Contribution, PodFeature, PodReview};
use crate::features::Row;
use crate::manifests::rule;
use crate::runtime::cache::Key;

pub mod agent;
mod agents;
mod backstop;
pub mod crd;
pub mod farewell;
mod job;
pub mod manifests;
mod metrics;
mod share;
mod validate;

use agents::Agents;
pub use validate::TemplateReader;

pub const ROW: Row = Row {
    feature: Feature::Warmup,
    enabled: |config| config.warmup.enabled,
    permissions,
    own_permissions: Vec::new,
    entries: |_, namespaces| vec![entry(namespaces.clone()), validate::entry(namespaces.clone())],
    admission: |context, _| Some(Box::new(Gatekeeper { agents: agents::follow(context) })),
    crds: || vec![crd::WarmupConfig::crd()],
    objects: manifests::objects,
    start: backstop::start,
};

/// Selects the leases of all agents.
#[must_use]
pub fn agent_leases() -> String {
    format!("{}={}", agents::LABEL, agents::LABEL_VALUE)
}

fn permissions(_: &Config) -> Vec<PolicyRule> {
    vec![rule("", &["pods"], &["list", "watch"], &[]), rule("", &["pods/status"], &["patch"], &[])]
}

fn entry(namespaces: Namespaces) -> Entry {
    let annotated = format!("has(object.metadata.annotations) && '{}' in object.metadata.annotations", keys::WARMUP);
    Entry::pod_created(Feature::Warmup, annotated, namespaces)
}

/// Its part in pod admission.
#[derive(Debug)]
struct Gatekeeper {
    agents: Agents,
}

impl PodFeature for Gatekeeper {
    fn feature(&self) -> Feature {
        Feature::Warmup
    }

    fn review(&self, review: &PodReview<'_>, out: &mut Contribution) {
        let verdict = admission::decide(&review.pod, self.agents.any_alive());
        verdict.contribute(&mut out.patch);
        out.warnings.extend(admission::warnings(&review.pod, verdict));
    }
}

/// What is decoded of a pod.
#[derive(Clone, Debug, Deserialize, kube::Resource)]
#[resource(inherit = k8s_openapi::api::core::v1::Pod)]
struct Pod {
    metadata: ObjectMeta,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

/// What is kept of it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Facts {
    uid: String,
    version: String,
    annotations: BTreeMap<String, String>,
    deleting: bool,
    spec: Spec,
    status: Status,
}

impl Facts {
    fn of(pod: Pod) -> Self {
        let mut annotations = pod.metadata.annotations.unwrap_or_default();
        annotations.retain(|key, _| key.starts_with(keys::WARMUP));
        Self {
            uid: pod.metadata.uid.unwrap_or_default(),
            version: pod.metadata.resource_version.unwrap_or_default(),
            annotations,
            deleting: pod.metadata.deletion_timestamp.is_some(),
            spec: pod.spec,
            status: pod.status,
        }
    }

    fn seen(&self) -> Seen<'_> {
        Seen { annotations: &self.annotations, deleting: self.deleting, spec: &self.spec, status: &self.status }
    }
}

/// The pod as events name it.
fn reference(key: &Key, uid: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(key.namespace.clone()),
        name: Some(key.name.clone()),
        uid: Some(uid.to_owned()),
        ..ObjectReference::default()
    }
}
