//! Waiting for the cluster, by watching it.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::pin::pin;
use std::time::Duration;

use futures::TryStreamExt;
use kube::runtime::watcher::{self, Event, watch_object, watcher};
use kube::{Api, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::cluster::Cluster;

/// More objects than this in an error message help nobody.
const SHOWN_OBJECTS: usize = 10;

/// What the waits need of a kind; every type of k8s-openapi and every derived resource has it.
pub trait Watched:
    Resource<DynamicType: Default> + Clone + Debug + Serialize + DeserializeOwned + Send + 'static
{
}

impl<K> Watched for K where
    K: Resource<DynamicType: Default> + Clone + Debug + Serialize + DeserializeOwned + Send + 'static
{
}

impl Cluster {
    /// Waits until the object exists and `holds`; `what` says in words what is awaited.
    ///
    /// # Errors
    /// After `deadline`, with the object as last seen.
    pub async fn wait_for<K: Watched>(
        &self,
        api: &Api<K>,
        name: &str,
        what: &str,
        deadline: Duration,
        holds: impl Fn(&K) -> bool,
    ) -> anyhow::Result<K> {
        let found = wait_object(api, name, what, deadline, |object| object.is_some_and(&holds)).await;
        let found = self.explain(found)?;
        found.ok_or_else(|| anyhow::anyhow!("{name} vanished while {what} was awaited"))
    }

    /// Waits until there is no such object.
    ///
    /// # Errors
    /// After `deadline`, with the object as last seen.
    pub async fn wait_gone<K: Watched>(&self, api: &Api<K>, name: &str, deadline: Duration) -> anyhow::Result<()> {
        let gone = wait_object(api, name, "it is gone", deadline, |object| object.is_none()).await;
        self.explain(gone).map(drop)
    }

    /// Waits until the objects that match the watcher's selectors, taken together, fulfil `hold`.
    ///
    /// # Errors
    /// After `deadline`, with some of the objects as last seen.
    pub async fn wait_for_list<K: Watched>(
        &self,
        api: &Api<K>,
        config: watcher::Config,
        what: &str,
        deadline: Duration,
        hold: impl Fn(&[&K]) -> bool,
    ) -> anyhow::Result<Vec<K>> {
        let mut seen = List::default();
        let found = match tokio::time::timeout(deadline, watch_list(api, config, &mut seen, hold)).await {
            Ok(done) => done.map(|()| seen.objects.into_values().collect()),
            Err(_) => Err(overdue(what, deadline, seen.objects.values(), seen.objects.len(), seen.error.as_ref())),
        };
        self.explain(found)
    }
}

async fn wait_object<K: Watched>(
    api: &Api<K>,
    name: &str,
    what: &str,
    deadline: Duration,
    holds: impl Fn(Option<&K>) -> bool,
) -> anyhow::Result<Option<K>> {
    let mut last = None;
    let mut trouble = None;
    let watch = async {
        let mut states = pin!(watch_object(api.clone(), name));
        loop {
            match states.try_next().await {
                Ok(Some(state)) => {
                    let done = holds(state.as_ref());
                    last = state;
                    if done {
                        return;
                    }
                }
                // The watcher goes on after an error, for instance while the API server restarts.
                Err(error) => pause_after(error, &mut trouble).await,
                Ok(None) => std::future::pending().await,
            }
        }
    };
    match tokio::time::timeout(deadline, watch).await {
        Ok(()) => Ok(last),
        Err(_) => {
            let count = last.iter().count();
            Err(overdue(&format!("{name}: {what}"), deadline, last.iter(), count, trouble.as_ref()))
        }
    }
}

struct List<K> {
    objects: BTreeMap<String, K>,
    error: Option<watcher::Error>,
}

impl<K> Default for List<K> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), error: None }
    }
}

async fn watch_list<K: Watched>(
    api: &Api<K>,
    config: watcher::Config,
    list: &mut List<K>,
    hold: impl Fn(&[&K]) -> bool,
) -> anyhow::Result<()> {
    let mut events = pin!(watcher(api.clone(), config));
    let mut complete = false;
    loop {
        match events.try_next().await {
            Ok(Some(Event::Init)) => {
                list.objects.clear();
                complete = false;
            }
            Ok(Some(Event::InitApply(object) | Event::Apply(object))) => {
                list.objects.insert(key(&object), object);
            }
            Ok(Some(Event::Delete(object))) => {
                list.objects.remove(&key(&object));
            }
            Ok(Some(Event::InitDone)) => complete = true,
            Ok(None) => anyhow::bail!("the watch ended"),
            Err(error) => pause_after(error, &mut list.error).await,
        }
        // Half a list is no state of the cluster.
        if complete && hold(&list.objects.values().collect::<Vec<_>>()) {
            return Ok(());
        }
    }
}

/// Keeps a refusing server from being asked in a tight loop.
async fn pause_after(error: watcher::Error, last: &mut Option<watcher::Error>) {
    *last = Some(error);
    tokio::time::sleep(Duration::from_millis(100)).await;
}

fn key<K: Resource>(object: &K) -> String {
    format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any())
}

fn overdue<'a, K: Watched>(
    what: &str,
    deadline: Duration,
    objects: impl Iterator<Item = &'a K>,
    count: usize,
    trouble: Option<&watcher::Error>,
) -> anyhow::Error {
    let shown: Vec<_> = objects.take(SHOWN_OBJECTS).map(describe).collect();
    let trouble = trouble.map(|error| format!("\nlast error of the watch: {error}")).unwrap_or_default();
    anyhow::anyhow!(
        "not within {deadline:?}: {what}{trouble}\nlast seen, {} of {count} objects:\n{}",
        shown.len(),
        shown.join("\n")
    )
}

fn describe<K: Watched>(object: &K) -> String {
    let mut object = object.clone();
    // Long, and never the reason.
    object.managed_fields_mut().clear();
    serde_json::to_string_pretty(&object).unwrap_or_else(|error| format!("{object:?} ({error})"))
}
