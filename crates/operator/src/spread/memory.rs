//! What is remembered of workloads, in one ConfigMap of our own that every replica watches.
//!
//! # Guarantees
//! - Only the leader writes it, one key per workload, before it acts.
//! - What this process wrote is what it reads next: a watch event older than the last write is ignored.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use groundcrew_core::feature::Feature;
use groundcrew_core::spread::Memory;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::Api;
use kube::core::DeserializeGuard;
use serde_json::{Value, json};
use tokio::sync::Mutex as AsyncMutex;

use super::locked;
use crate::manifests::SPREAD_MEMORY;
use crate::run::Context;
use crate::runtime::apply::{Outcome, Target, Write, WriteError};
use crate::runtime::cache::{self, Cache, Feed, Key};

/// A move that is not judged after so long holds nobody else up.
const LOST: SignedDuration = SignedDuration::from_mins(5);

#[derive(Debug, Default)]
struct State {
    version: u64,
    by_uid: HashMap<String, Memory>,
}

#[derive(Debug)]
pub struct Memories {
    cache: Arc<Cache<Seen>>,
    state: Mutex<State>,
    /// One write at a time, so that versions grow with what is known.
    writing: AsyncMutex<()>,
}

/// The ConfigMap as it was last seen.
#[derive(Debug)]
pub struct Seen {
    version: u64,
    by_uid: HashMap<String, Memory>,
}

fn seen(object: ConfigMap) -> Option<Seen> {
    let version = object.metadata.resource_version?.parse().ok()?;
    let read = |(uid, text): (String, String)| Some((uid, serde_json::from_str(&text).ok()?));
    Some(Seen { version, by_uid: object.data.unwrap_or_default().into_iter().filter_map(read).collect() })
}

impl Memories {
    #[must_use]
    pub fn new(cache: Arc<Cache<Seen>>) -> Self {
        Self { cache, state: Mutex::default(), writing: AsyncMutex::default() }
    }

    /// Whether what was remembered before this process is taken over.
    #[must_use]
    pub fn are_known(&self) -> bool {
        *self.cache.synced().borrow() && (self.cache.is_empty() || locked(&self.state).version > 0)
    }

    /// What is remembered of a workload; nothing is a memory, too.
    #[must_use]
    pub fn get(&self, uid: &str) -> Memory {
        locked(&self.state).by_uid.get(uid).cloned().unwrap_or_default()
    }

    /// The workloads with a move under way.
    #[must_use]
    pub fn in_flight(&self, now: Timestamp) -> HashSet<String> {
        let recent = |m: &Memory| m.moving.is_some() && m.moved.is_some_and(|at| now.duration_since(at) < LOST);
        locked(&self.state).by_uid.iter().filter(|(_, m)| recent(m)).map(|(uid, _)| uid.clone()).collect()
    }

    /// Workloads of which something is remembered.
    #[must_use]
    pub fn known(&self) -> Vec<String> {
        locked(&self.state).by_uid.keys().cloned().collect()
    }

    pub fn follow(&self, context: &Context, feed: Feed) {
        let api: Api<DeserializeGuard<ConfigMap>> = Api::namespaced(context.clients.watch.clone(), &context.namespace);
        let changes = self.cache.subscribe();
        context.follow(&self.cache, cache::fill(Arc::clone(&self.cache), api, feed, seen));
        let shared = Arc::clone(&context.spread);
        context.tasks.spawn(context.stopping.clone().run_until_cancelled_owned(async move {
            loop {
                let key = changes.next().await;
                shared.memories.take_over(&key);
            }
        }));
    }

    fn take_over(&self, key: &Key) {
        // Deleted by hand: what this process knows stays until it writes again.
        let Some(seen) = self.cache.get(key) else { return };
        let mut state = locked(&self.state);
        if seen.version >= state.version {
            *state = State { version: seen.version, by_uid: seen.by_uid.clone() };
        }
    }

    /// Writes what is to be remembered of one workload; an empty memory is removed.
    pub async fn write(&self, context: &Context, uid: &str, memory: &Memory) -> Result<Outcome, WriteError> {
        let _turn = self.writing.lock().await;
        let value =
            if memory.is_empty() { Value::Null } else { json!(serde_json::to_string(memory).unwrap_or_default()) };
        let target = Target::of::<ConfigMap>(Some(&context.namespace), SPREAD_MEMORY, "");
        let record = Write::Record(json!({"data": {uid: value}}));
        let mut outcome = context.writer.write(Feature::Spread, &target, &record).await?;
        if outcome == Outcome::Gone {
            let object = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": SPREAD_MEMORY}});
            context.writer.write(Feature::Spread, &target, &Write::Apply(object)).await?;
            outcome = context.writer.write(Feature::Spread, &target, &record).await?;
        }
        if let Outcome::Done(version) = &outcome {
            let mut state = locked(&self.state);
            state.version = version.as_deref().and_then(|v| v.parse().ok()).unwrap_or(state.version);
            if memory.is_empty() {
                state.by_uid.remove(uid);
            } else {
                state.by_uid.insert(uid.to_owned(), memory.clone());
            }
        }
        Ok(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_known_before_the_record_was_read_and_taken_over() {
        let unread = Memories::new(Cache::new("unread"));
        assert!(!unread.are_known());
        let none = Memories::new(Cache::of("none there", []));
        assert!(none.are_known());
        let key = Key { namespace: "groundcrew-system".into(), name: SPREAD_MEMORY.into() };
        let futile = Memory { futile: 1, ..Memory::default() };
        let record = Seen { version: 7, by_uid: HashMap::from([("u".to_owned(), futile.clone())]) };
        let read = Memories::new(Cache::of("one", [(key.clone(), record)]));
        assert!(!read.are_known());
        read.take_over(&key);
        assert!(read.are_known());
        assert_eq!(read.get("u"), futile);
    }
}
