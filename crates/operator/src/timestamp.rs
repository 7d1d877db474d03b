//! `timestamp`: stamps in the admission patch, and on running pods through the API.
//!
//! Exactly once, because the write is bound to the version of the pod it was decided on: whoever decides on an older
//! one conflicts, reads the pod again and finds the stamp.

use std::sync::Arc;
use std::time::Duration;

use groundcrew_core::feature::Feature;
use groundcrew_core::keys;
use groundcrew_core::timestamp::{self, Seen, Verdict, decide};
use kube::api::{Api, ObjectMeta};
use kube::core::DeserializeGuard;
use prometheus_client::registry::Registry;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::timeout;
use tracing::{debug, info};

use crate::admission::registration::{Entry, Namespaces};
use crate::admission::{Contribution, PodFeature, PodReview};
use crate::features::Row;
use crate::manifests::rule;
use crate::run::Context;
use crate::runtime::apply::{self, Outcome, Write, WriteError};
use crate::runtime::cache::{self, Cache, Key};
use crate::runtime::queue::Next;

pub const ROW: Row = Row {
    feature: Feature::Timestamp,
    enabled: |config| config.timestamp.enabled,
    permissions: |_| vec![rule("", &["pods"], &["get", "list", "watch", "patch"], &[])],
    own_permissions: Vec::new,
    entries: |_, namespaces| vec![entry(namespaces.clone())],
    crds: Vec::new,
    admission: |_, _| Some(Box::new(Stamper)),
    objects: |_, _, _| Vec::new(),
    start,
};

fn entry(namespaces: Namespaces) -> Entry {
    Entry::pod_created(
        Feature::Timestamp,
        "has(object.metadata.annotations) && 'addtime' in object.metadata.annotations",
        namespaces,
    )
}

/// Its part in pod admission.
#[derive(Debug)]
pub struct Stamper;

impl PodFeature for Stamper {
    fn feature(&self) -> Feature {
        Feature::Timestamp
    }

    fn review(&self, review: &PodReview<'_>, out: &mut Contribution) {
        let seen = Seen::in_annotations(&review.pod.metadata.annotations);
        decide(seen, review.now).contribute(&mut out.patch);
    }
}

/// What is decoded of a pod.
#[derive(Clone, Debug, Serialize, Deserialize, kube::Resource)]
#[resource(inherit = k8s_openapi::api::core::v1::Pod)]
struct Pod {
    metadata: ObjectMeta,
    #[serde(default)]
    status: Option<PodStatus>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct PodStatus {
    #[serde(default)]
    phase: Option<String>,
}

/// What is kept of it.
#[derive(Clone, Debug)]
struct Facts {
    uid: String,
    version: String,
    seen: Seen,
}

fn facts(pod: Pod) -> Facts {
    let finished = pod.status.and_then(|s| s.phase).is_some_and(|phase| phase == "Succeeded" || phase == "Failed");
    let ending = finished || pod.metadata.deletion_timestamp.is_some();
    let seen = Seen { ending, ..Seen::in_annotations(&pod.metadata.annotations) };
    Facts {
        uid: pod.metadata.uid.unwrap_or_default(),
        version: pod.metadata.resource_version.unwrap_or_default(),
        seen,
    }
}

/// Only pods that wait for a stamp are remembered: on most clusters none.
fn waiting(pod: Pod) -> Option<Facts> {
    let facts = facts(pod);
    (facts.seen.asked && !facts.seen.stamped && !facts.seen.ending).then_some(facts)
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("the stamp could not be written: {0}")]
    Write(#[from] WriteError),
    #[error("the pod could not be read: {0}")]
    Read(#[from] kube::Error),
    #[error("the pod could not be read in time")]
    ReadTimeout,
    #[error("the pod keeps changing")]
    Contended,
}

const READ_TIMEOUT: Duration = Duration::from_secs(5);

fn start(context: &Context, _registry: &mut Registry) {
    let pods: Api<DeserializeGuard<Pod>> = Api::all(context.clients.watch.clone());
    let cache = Cache::new("pods that wait for a timestamp");
    let changes = cache.subscribe();
    context.follow(&cache, cache::fill(Arc::clone(&cache), pods, context.feed(), waiting));

    let context = context.clone();
    let queue = context.queue(Feature::Timestamp);
    context.tasks.clone().spawn(queue.run(changes, move |key| {
        let (cache, context) = (Arc::clone(&cache), context.clone());
        async move { reconcile(&key, &cache, &context).await }
    }));
}

/// Gather, decide, apply.
async fn reconcile(key: &Key, cache: &Cache<Facts>, context: &Context) -> Result<Next, Error> {
    let Some(cached) = cache.get(key) else { return Ok(Next::Change) };
    let outcome = apply::settle((*cached).clone(), |facts| stamp(key, facts, context), || read(key, context));
    match outcome.await? {
        Some(Outcome::Conflict) => Err(Error::Contended),
        // The next leader has the key in its own queue; here it waits for a change or for our own next term.
        Some(Outcome::NotLeader) => Ok(Next::After(Duration::from_secs(1))),
        _ => Ok(Next::Change),
    }
}

/// `None` when there is nothing to write.
async fn stamp(key: &Key, facts: Facts, context: &Context) -> Result<Option<Outcome>, Error> {
    let at = match decide(facts.seen, (context.clock)()) {
        Verdict::Stamp { at } => timestamp::text(at),
        Verdict::Leave(why) => {
            debug!(?why, "left alone");
            return Ok(None);
        }
    };
    let patch = json!({"metadata": {"annotations": {keys::TIMESTAMP: at}}});
    let write = Write::Merge { version: facts.version, patch };
    let target = apply::pod(&key.namespace, &key.name, &facts.uid);
    let outcome = context.writer.write(Feature::Timestamp, &target, &write).await?;
    if let Outcome::Done(_) = outcome {
        info!("Annotating namespace {:?}, pod {:?} with timestamp {at}", key.namespace, key.name);
    }
    Ok(Some(outcome))
}

async fn read(key: &Key, context: &Context) -> Result<Option<Facts>, Error> {
    let pods: Api<Pod> = Api::namespaced(context.clients.read.clone(), &key.namespace);
    let pod = timeout(READ_TIMEOUT, pods.get_opt(&key.name)).await.map_err(|_| Error::ReadTimeout)??;
    Ok(pod.map(facts))
}
