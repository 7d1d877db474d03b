//! The class of a new pod, from memory alone.

use std::sync::Arc;
use std::time::Instant;

use groundcrew_core::feature::Feature;
use groundcrew_core::keys::{self, Lookup};
use groundcrew_core::pod::OwnerView;
use groundcrew_core::selector::Selector;
use groundcrew_core::spread::place::{self, Placed};
use groundcrew_core::spread::{Kind, node};

use super::Shared;
use super::metrics::Reviewed;
use super::objects::{WorkloadFacts, ordinal};
use crate::admission::{Contribution, PodFeature, PodReview};
use crate::runtime::cache::Key;

/// Its part in pod admission.
#[derive(Debug)]
pub struct Placer(pub Arc<Shared>);

impl PodFeature for Placer {
    fn feature(&self) -> Feature {
        Feature::Spread
    }

    fn review(&self, review: &PodReview<'_>, out: &mut Contribution) {
        let started = Instant::now();
        let outcome = self.place(review, out);
        self.0.metrics.reviewed(outcome, started.elapsed());
    }
}

/// The workload a pod is created for, and the revision it belongs to.
struct Origin {
    kind: Kind,
    facts: Arc<WorkloadFacts>,
    /// How many pods the revision wants; a StatefulSet's order needs no size.
    wanted: Option<u32>,
}

impl Placer {
    fn place(&self, review: &PodReview<'_>, out: &mut Contribution) -> Reviewed {
        let shared = &self.0;
        let Some(owner) = review.pod.controller() else { return Reviewed::Unchanged };
        let Some(origin) = self.origin(review, owner) else { return Reviewed::Unchanged };
        let rule = match shared.rule(review.namespace, &origin.facts) {
            Ok(Some(rule)) => rule,
            Ok(None) => return Reviewed::Unchanged,
            Err(invalid) => {
                out.warnings.push(format!("groundcrew: the pod is not placed by class: {invalid}"));
                return Reviewed::Invalid;
            }
        };
        let names = &shared.names;
        let annotations = &review.pod.metadata.annotations;
        let marked = annotations.value(keys::SPREAD_RANK).is_some();
        if marked && node::assigned(&review.pod.spec.node_selector, names).is_some() {
            // Asked again about our own patch.
            return Reviewed::Unchanged;
        }
        let cap = shared.memories.get(&origin.facts.uid).spot_cap();
        let index = match origin.kind {
            Kind::Deployment => None,
            Kind::StatefulSet => {
                let number = ordinal(owner.name.as_str(), review.pod.display_name());
                match number.and_then(|n| n.checked_sub(origin.facts.standing.first_ordinal)) {
                    Some(index) => Some(index),
                    None => return Reviewed::Unchanged,
                }
            }
        };
        let observed = !shared.enforces;
        let kept = !review.dry_run && !observed;
        let counts = |pod: &super::PodFacts| {
            let (class, leaving) = shared.standing(pod);
            (!pod.terminating && !leaving).then_some(class)
        };
        let place = |peers: &[place::Peer], credit: &mut place::Credit| match index {
            None => place::next(rule.share, origin.wanted, peers, cap, credit),
            Some(index) => place::ordinal(rule.share, index, peers, cap),
        };
        let placed =
            shared.index.place(owner.uid.as_str(), origin.wanted, tokio::time::Instant::now(), kept, counts, place);
        if observed {
            tracing::info!(class = %placed.class, rank = placed.rank, "would place the pod");
            return Reviewed::Observed;
        }
        self.contribute(review, placed, out);
        Reviewed::Patched
    }

    fn contribute(&self, review: &PodReview<'_>, placed: Placed, out: &mut Contribution) {
        let (key, value) = node::label_of(placed.class, &self.0.names);
        if review.pod.spec.node_selector.value(key) != Some(value) {
            out.patch.select_node(key, value);
        }
        out.patch.annotate(keys::SPREAD_RANK, placed.rank.to_string());
        if !review.pod.metadata.annotations.has(keys::DELETION_COST) {
            out.patch.annotate(keys::DELETION_COST, place::deletion_cost(placed.rank).to_string());
        }
    }

    fn origin(&self, review: &PodReview<'_>, owner: &OwnerView<'_>) -> Option<Origin> {
        if !owner.api_version.as_str().starts_with("apps/") {
            return None;
        }
        let shared = &self.0;
        let key = |name: &str| Key { namespace: review.namespace.to_owned(), name: name.to_owned() };
        match owner.kind.as_str() {
            "StatefulSet" => {
                let facts = shared.stateful_sets.get(&key(owner.name.as_str()))?;
                (facts.uid == owner.uid.as_str()).then_some(Origin { kind: Kind::StatefulSet, facts, wanted: None })
            }
            "ReplicaSet" => {
                let set = shared.replica_sets.get(&key(owner.name.as_str()));
                let set = set.filter(|set| set.uid == owner.uid.as_str());
                let Some(set) = set else {
                    // Too new to be known: the Deployment's name is the ReplicaSet's without the hash.
                    let labels = &review.pod.metadata.labels;
                    let hash = labels.value("pod-template-hash")?;
                    let name = owner.name.as_str().strip_suffix(hash)?.strip_suffix('-')?;
                    let facts = shared.deployments.get(&key(name))?;
                    if !Selector::parse(&facts.selector).is_ok_and(|selector| selector.matches(labels)) {
                        return None;
                    }
                    // However it begins, that is the size it grows to.
                    let wanted = Some(facts.standing.replicas);
                    return Some(Origin { kind: Kind::Deployment, facts, wanted });
                };
                let deployment = set.deployment.as_ref()?;
                let facts = shared.deployments.get(&key(&deployment.name))?;
                let wanted = Some(set.replicas);
                (facts.uid == deployment.uid).then_some(Origin { kind: Kind::Deployment, facts, wanted })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
