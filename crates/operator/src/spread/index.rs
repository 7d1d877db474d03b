//! Pods by their owner, and the places given to pods that are not seen yet.
//!
//! # Guarantees
//! - Between two reviews of one revision nothing is lost: the place given to the first counts for the second.
//! - A reservation ends when its pod appears, when it is older than [`EXPIRES`], or when there are more of them than the
//!   ReplicaSet wants pods, which means that some creation failed.
//!
//! # Caveats
//! Replicas of the webhook do not share reservations: each misses what the others admitted until the pods appear, and
//! places by the share that is left (see `place::next`). What slips through is re-ranked or moved by the leader.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use groundcrew_core::spread::Class;
use groundcrew_core::spread::place::{Credit, Peer, Placed};
use tokio::time::Instant;

use super::objects::{Owner, PodFacts};
use crate::runtime::cache::Key;

/// A pod that was not seen for so long was not created.
const EXPIRES: Duration = Duration::from_secs(30);
/// Younger reservations may still be on their way, whatever the ReplicaSet says.
const ON_ITS_WAY: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct Group {
    pods: HashMap<Key, Arc<PodFacts>>,
    reserved: Vec<(Placed, Instant)>,
    credit: Credit,
}

#[derive(Debug, Default)]
struct State {
    groups: HashMap<String, Group>,
    owners: HashMap<Key, Owner>,
    swept: Option<Instant>,
}

impl State {
    /// Owners whose pods never came leave nothing behind.
    fn sweep(&mut self, now: Instant) {
        if self.swept.is_some_and(|at| now.saturating_duration_since(at) < EXPIRES) {
            return;
        }
        self.swept = Some(now);
        self.groups.retain(|_, group| {
            group.drop_expired(now);
            !group.pods.is_empty() || !group.reserved.is_empty()
        });
    }
}

#[derive(Debug, Default)]
pub struct Index(Mutex<State>);

impl Index {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over what the cache holds of one pod; returns the owners concerned.
    pub fn update(&self, key: &Key, pod: Option<Arc<PodFacts>>) -> Vec<Owner> {
        let mut state = self.lock();
        let mut concerned = Vec::new();
        let owner = pod.as_ref().and_then(|p| p.owner.clone());
        let mut known = None;
        if let Some(before) = state.owners.remove(key) {
            if let Some(group) = state.groups.get_mut(&before.uid) {
                known = group.pods.remove(key).map(|pod| pod.uid.clone());
                if group.pods.is_empty() && group.reserved.is_empty() {
                    state.groups.remove(&before.uid);
                }
            }
            concerned.push(before);
        }
        if let (Some(owner), Some(pod)) = (owner, pod) {
            let group = state.groups.entry(owner.uid.clone()).or_default();
            // Only a pod that is new keeps what was reserved: its predecessor in that place may still change.
            let appears = known.as_deref() != Some(pod.uid.as_str());
            let kept = |(placed, _): &(Placed, Instant)| appears && Some(placed.rank) == pod.rank;
            if let Some(at) = group.reserved.iter().position(kept) {
                group.reserved.swap_remove(at);
            }
            group.pods.insert(key.clone(), pod);
            state.owners.insert(key.clone(), owner.clone());
            if !concerned.contains(&owner) {
                concerned.push(owner);
            }
        }
        concerned
    }

    /// The pods of one owner.
    #[must_use]
    pub fn pods(&self, owner_uid: &str) -> Vec<(Key, Arc<PodFacts>)> {
        let state = self.lock();
        let pods = state.groups.get(owner_uid).map(|g| &g.pods);
        pods.into_iter().flatten().map(|(key, pod)| (key.clone(), Arc::clone(pod))).collect()
    }

    /// Gives one more pod of this owner its place, and remembers it if it is `kept`.
    ///
    /// `class` tells where a pod counts, `None` for one that does not.
    pub fn place(
        &self,
        owner_uid: &str,
        wanted: Option<u32>,
        now: Instant,
        kept: bool,
        class: impl Fn(&PodFacts) -> Option<Class>,
        place: impl FnOnce(&[Peer], &mut Credit) -> Placed,
    ) -> Placed {
        let mut state = self.lock();
        state.sweep(now);
        let group = state.groups.entry(owner_uid.to_owned()).or_default();
        group.drop_failed(wanted, now);
        let pods = group.pods.values().filter_map(|p| Some(Peer { class: class(p)?, rank: p.rank }));
        let reserved = group.reserved.iter().map(|(placed, _)| Peer { class: placed.class, rank: Some(placed.rank) });
        let peers: Vec<Peer> = pods.chain(reserved).collect();
        let mut credit = group.credit;
        let placed = place(&peers, &mut credit);
        if kept {
            group.credit = credit;
            group.reserved.retain(|(other, _)| other.rank != placed.rank);
            group.reserved.push((placed, now));
        } else if group.pods.is_empty() && group.reserved.is_empty() {
            state.groups.remove(owner_uid);
        }
        placed
    }
}

impl Group {
    fn drop_expired(&mut self, now: Instant) {
        self.reserved.retain(|(_, at)| now.saturating_duration_since(*at) < EXPIRES);
    }

    fn drop_failed(&mut self, wanted: Option<u32>, now: Instant) {
        self.drop_expired(now);
        let Some(wanted) = wanted.and_then(|w| usize::try_from(w).ok()) else { return };
        let alive = self.pods.values().filter(|p| !p.terminating).count();
        self.reserved.sort_by_key(|(_, at)| *at);
        // One more is about to be added: with it there must not be more than wanted.
        let excess = (alive + self.reserved.len() + 1).saturating_sub(wanted);
        let old = self.reserved.iter().take_while(|(_, at)| now.saturating_duration_since(*at) >= ON_ITS_WAY).count();
        self.reserved.drain(..excess.min(old));
    }
}

#[cfg(test)]
mod tests;
