//! The workload read anew: a cache may be older than it looks, and an eviction cannot be taken back.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use groundcrew_core::spread::rebalance::PodRef;
use groundcrew_core::spread::{Kind, node};
use kube::api::{Api, ListParams};
use kube::core::Selector;
use tokio::time::{Instant, timeout};

use super::gather::{Snapshot, judge};
use super::objects::{self, WorkloadFacts};
use super::{READ_TIMEOUT, Shared};
use crate::run::Context;
use crate::runtime::cache::Key;

/// From the first read to the end of the eviction, at the most.
const FRESH: Duration = Duration::from_secs(5);
/// An eviction that has less time left is not begun.
const LEAST: Duration = Duration::from_millis(500);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the workload could not be read anew: {0}")]
    Read(#[from] kube::Error),
    #[error("the workload could not be read anew in time")]
    Timeout,
    #[error("the workload's selector cannot be used: {0}")]
    Selector(#[from] kube::core::ParseExpressionError),
}

/// A snapshot, and when it was begun.
#[derive(Debug)]
pub struct Fresh {
    pub facts: WorkloadFacts,
    pub snapshot: Snapshot,
    begun: Instant,
}

impl Fresh {
    /// The time in which a decision on it may still be carried out.
    #[must_use]
    pub fn left(&self) -> Option<Duration> {
        FRESH.checked_sub(self.begun.elapsed()).filter(|left| *left >= LEAST)
    }
}

impl Shared {
    /// `None` when the workload is gone, or another one under its name.
    pub(super) async fn read(
        &self,
        context: &Context,
        kind: Kind,
        key: &Key,
        uid: &str,
    ) -> Result<Option<Fresh>, Error> {
        let begun = Instant::now();
        let client = || context.clients.read.clone();
        let facts = match kind {
            Kind::Deployment => {
                let api: Api<objects::Deployment> = Api::namespaced(client(), &key.namespace);
                let object = soon(api.get_opt(&key.name)).await?;
                object.and_then(|o| objects::workload(kind, o.metadata, o.spec, o.status, &self.names))
            }
            Kind::StatefulSet => {
                let api: Api<objects::StatefulSet> = Api::namespaced(client(), &key.namespace);
                let object = soon(api.get_opt(&key.name)).await?;
                object.and_then(|o| objects::workload(kind, o.metadata, o.spec, o.status, &self.names))
            }
        };
        let Some(facts) = facts.filter(|f| f.uid == uid) else { return Ok(None) };
        let budgets: Api<objects::Budget> = Api::namespaced(client(), &key.namespace);
        let budgets = soon(budgets.list(&ListParams::default())).await?;
        let budgets: Vec<_> = budgets.items.into_iter().filter_map(objects::budget).collect();
        let selector = Selector::try_from(facts.selector.clone())?;
        let pods: Api<objects::Pod> = Api::namespaced(client(), &key.namespace);
        let listed = soon(pods.list(&ListParams::default().labels_from(&selector))).await?;
        let owners: HashSet<String> = self.revisions(kind, key, &facts).into_iter().collect();
        let (mut pods, mut nodes) = (Vec::new(), HashMap::new());
        for object in listed.items {
            let labels = object.metadata.labels.clone();
            let name = object.metadata.name.clone().unwrap_or_default();
            let Some(pod) = objects::pod(object, &self.names) else { continue };
            // Labels overlap; owners do not.
            if pod.owner.as_ref().is_some_and(|owner| owners.contains(&owner.uid)) {
                pods.push(self.pod(&name, &pod, judge(budgets.iter(), &labels)));
                nodes.extend(pod.node.map(|node| (name, node)));
            }
        }
        let snapshot = Snapshot { workload: facts.standing.clone(), pods, nodes };
        Ok(Some(Fresh { facts, snapshot, begun }))
    }

    /// Nodes are too many to read them all: those that the move is about must be what the cache says they are.
    pub(super) async fn nodes_agree(
        &self,
        context: &Context,
        fresh: &Fresh,
        pod: &PodRef,
        target: &str,
    ) -> Result<bool, Error> {
        let Some(from) = fresh.snapshot.nodes.get(&pod.name) else { return Ok(false) };
        let nodes: Api<objects::Node> = Api::all(context.clients.read.clone());
        for name in [from.as_str(), target] {
            let known = self.nodes.get(&Key { namespace: String::new(), name: name.to_owned() });
            let read = soon(nodes.get_opt(name)).await?.map(objects::node);
            let standing =
                |node: &node::Node| (node::class_of(&node.labels, &self.names), node.is_leaving(), node.ready);
            if read.as_ref().map(standing) != known.as_deref().map(standing) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

async fn soon<T>(call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, Error> {
    timeout(READ_TIMEOUT, call).await.map_err(|_| Error::Timeout)?.map_err(Error::from)
}
