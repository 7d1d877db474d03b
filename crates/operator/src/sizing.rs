//! `sizing`: DaemonSet pods get their share of the node in the admission patch, and follow it in place later on.
//!
//! ```text
//! templates, DaemonSets, nodes ─► Facts ─► Sizer    every replica, in the creation of a pod
//!                        pods ──────┴────► sweep    the leader, one look at everything after a change
//! ```

use std::sync::Arc;

use groundcrew_core::feature::Feature;
use groundcrew_core::sizing::{Owner, Seen, Shape, decide, own_template};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use prometheus_client::registry::Registry;

use crate::admission::registration::{Entry, Namespaces};
use crate::admission::{Contribution, PodFeature, PodReview};
use crate::features::Row;
use crate::manifests::rule;
use crate::run::Context;

mod carry;
pub mod crd;
mod facts;
mod sweep;

use facts::{Facts, key};

pub const ROW: Row = Row {
    feature: Feature::Sizing,
    enabled: |config| config.sizing.enabled,
    permissions: |config| {
        let group = "flexdaemonsets.xai";
        let mut rules = vec![
            rule(group, &["flexdaemonsettemplates"], &["list", "watch"], &[]),
            rule(group, &["flexdaemonsettemplates/status"], &["patch"], &[]),
            rule("apps", &["daemonsets"], &["list", "watch"], &[]),
            rule("", &["nodes", "pods"], &["list", "watch"], &[]),
        ];
        if config.sizing.resize {
            rules.push(rule("", &["pods/resize"], &["patch"], &[]));
        }
        rules
    },
    own_permissions: Vec::new,
    entries: |_, _| vec![entry()],
    crds,
    objects: |_, _, _| Vec::new(),
    admission: |context, _| Some(Box::new(Sizer { facts: shared(context) })),
    start,
};

fn crds() -> Vec<CustomResourceDefinition> {
    vec![crd::FlexDaemonsetTemplate::crd()]
}

/// System agents are the main users, so exempt namespaces are not exempt here; pods of other owners are.
fn entry() -> Entry {
    let owned = "has(object.metadata.ownerReferences) && object.metadata.ownerReferences.exists(o, \
                 o.kind == 'DaemonSet' && o.apiVersion == 'apps/v1' && has(o.controller) && o.controller)";
    Entry::pod_created(Feature::Sizing, owned, Namespaces::All)
}

/// One set of watches for admission and for what comes later.
fn shared(context: &Context) -> Arc<Facts> {
    context.shared(|| Facts::follow(context))
}

fn start(context: &Context, registry: &mut Registry) {
    let metrics = carry::Metrics::register(registry);
    let (facts, pods) = (shared(context), facts::follow_pods(context));
    carry::run(context, facts, pods, metrics);
}

/// Its part in pod admission.
#[derive(Debug)]
pub struct Sizer {
    facts: Arc<Facts>,
}

impl PodFeature for Sizer {
    fn feature(&self) -> Feature {
        Feature::Sizing
    }

    fn covers_exempt_namespaces(&self) -> bool {
        true
    }

    fn review(&self, review: &PodReview<'_>, out: &mut Contribution) {
        let pod = &review.pod;
        let Some(owner) = Owner::of(pod) else { return };
        let set = self.facts.daemon_sets.get(&key(review.namespace, owner.name));
        let asked = self.facts.asked(set.as_deref(), Some(owner), own_template(pod));
        let template = self.facts.template(asked);
        let node = pod.node();
        let allocatable = self.facts.node(node);
        let verdict = decide(Seen {
            shape: &Shape::of_view(pod),
            asked,
            template: template.as_ref().map(|facts| &facts.template),
            node,
            allocatable: allocatable.as_deref(),
        });
        verdict.contribute(&mut out.patch);
        out.warnings.extend(verdict.warning());
    }
}
