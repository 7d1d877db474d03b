//! The room on nodes: what bound pods take, and what is held for replacements that are still to come.
//!
//! # Guarantees
//! - Room that one move counts on is not promised to another until the first is over.
//!
//! # Caveats
//! The scheduler may choose another node, and a new leader starts without what the last one held. Both cost at the most
//! a pod that has to wait.

use std::collections::HashMap;
use std::time::Duration;

use groundcrew_core::spread::Class;
use groundcrew_core::spread::node::Amount;
use jiff::Timestamp;
use tokio::time::Instant;

use super::gather::Snapshot;
use super::objects::WorkloadFacts;
use super::{Shared, locked};

/// Sums older than this are made anew.
const KEPT: Duration = Duration::from_secs(1);
/// After this a move is written down, or was not made.
const UNWRITTEN: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub struct Room {
    summed: Option<Instant>,
    used: HashMap<String, Amount>,
    /// By the uid of the workload that moves.
    held: HashMap<String, Promise>,
}

#[derive(Debug)]
struct Promise {
    node: String,
    amount: Amount,
    since: Instant,
}

/// Room on one node, given back when this is dropped unless the move was made.
#[derive(Debug)]
pub struct Held<'a> {
    shared: &'a Shared,
    uid: String,
    pub node: String,
    made: bool,
}

impl Held<'_> {
    /// From here on it is held for as long as the move is under way.
    pub fn keep(mut self) {
        self.made = true;
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if !self.made {
            locked(&self.shared.room).held.remove(&self.uid);
        }
    }
}

impl Shared {
    /// A node of the class that would take one more of the workload's pods.
    pub(super) fn target(
        &self,
        facts: &WorkloadFacts,
        snapshot: &Snapshot,
        class: Class,
        now: Timestamp,
    ) -> Option<String> {
        self.find(&mut locked(&self.room), facts, snapshot, class, now)
    }

    /// The same, and nobody else may count on that room.
    pub(super) fn hold_room(
        &self,
        facts: &WorkloadFacts,
        snapshot: &Snapshot,
        class: Class,
        now: Timestamp,
    ) -> Option<Held<'_>> {
        let mut room = locked(&self.room);
        let node = self.find(&mut room, facts, snapshot, class, now)?;
        let promise = Promise { node: node.clone(), amount: facts.needs.amount().clone(), since: Instant::now() };
        room.held.insert(facts.uid.clone(), promise);
        Some(Held { shared: self, uid: facts.uid.clone(), node, made: false })
    }

    fn find(
        &self,
        room: &mut Room,
        facts: &WorkloadFacts,
        snapshot: &Snapshot,
        class: Class,
        now: Timestamp,
    ) -> Option<String> {
        self.sum_up(room);
        if !room.held.is_empty() {
            let under_way = self.memories.in_flight(now);
            room.held.retain(|uid, promise| promise.since.elapsed() < UNWRITTEN || under_way.contains(uid));
        }
        let others = room.held.iter().filter(|(uid, _)| **uid != facts.uid).map(|(_, promise)| promise);
        let mut held: HashMap<&str, Amount> = HashMap::new();
        others.for_each(|promise| held.entry(&promise.node).or_default().add(&promise.amount));
        let shared = |node: &str| facts.needs.apart() && snapshot.nodes.values().any(|taken| taken == node);
        let mut found = None;
        self.nodes.for_each(|key, node| {
            if found.is_none() {
                let mut used = room.used.get(&key.name).cloned().unwrap_or_default();
                held.get(key.name.as_str()).into_iter().for_each(|amount| used.add(amount));
                found = (node.takes(&facts.needs, class, &used) && !shared(&key.name)).then(|| key.name.clone());
            }
        });
        found
    }

    fn sum_up(&self, room: &mut Room) {
        if room.summed.is_some_and(|at| at.elapsed() < KEPT) {
            return;
        }
        (room.summed, room.used) = (Some(Instant::now()), HashMap::new());
        self.pods.for_each(|_, pod| {
            if let Some(node) = &pod.node {
                room.used.entry(node.clone()).or_default().add(&pod.amount);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use groundcrew_core::spread::Kind;
    use serde_json::json;

    use super::super::objects;
    use super::*;
    use crate::runtime::cache::{Cache, Key};

    const NOW: Timestamp = Timestamp::constant(1_800_000_000, 0);

    /// One node of spot, with room for one pod.
    fn shared() -> Shared {
        let config = groundcrew_core::config::load(json!({}), vec![]).unwrap();
        let mut shared = Arc::into_inner(Shared::new(&config)).unwrap();
        let node = json!({
            "metadata": {"name": "spot", "labels": {"karpenter.sh/capacity-type": "spot"}},
            "status": {"allocatable": {"pods": "1"}, "conditions": [{"type": "Ready", "status": "True"}]},
        });
        let key = Key { namespace: String::new(), name: "spot".into() };
        shared.nodes = Cache::of("nodes", [(key, objects::node(serde_json::from_value(node).unwrap()))]);
        shared
    }

    fn workload(uid: &str) -> WorkloadFacts {
        let object = json!({
            "metadata": {"name": uid, "uid": uid, "annotations": {"spotalis.io/enabled": "true"}},
            "spec": {"selector": {}, "template": {"spec": {"containers": []}}},
        });
        let object: objects::Deployment = serde_json::from_value(object).unwrap();
        let names = groundcrew_core::config::load(json!({}), vec![]).unwrap().node_labels;
        objects::workload(Kind::Deployment, object.metadata, object.spec, object.status, &names).unwrap()
    }

    fn hold<'a>(shared: &'a Shared, facts: &WorkloadFacts) -> Option<Held<'a>> {
        let snapshot = Snapshot { workload: facts.standing.clone(), pods: Vec::new(), nodes: HashMap::new() };
        let target = shared.target(facts, &snapshot, Class::Spot, NOW);
        let held = shared.hold_room(facts, &snapshot, Class::Spot, NOW);
        assert_eq!(target.is_some(), held.is_some());
        held
    }

    #[tokio::test(start_paused = true)]
    async fn one_place_is_promised_to_one_of_five() {
        let (shared, all) = (shared(), ["a", "b", "c", "d", "e"].map(workload));
        let held: Vec<_> = all.iter().filter_map(|facts| hold(&shared, facts)).collect();
        assert_eq!(held.len(), 1);
        assert!(hold(&shared, &all[1]).is_none());
        drop(held);
        hold(&shared, &all[1]).expect("room that was given back").keep();
        assert!(hold(&shared, &all[2]).is_none(), "the move was made");
        tokio::time::advance(UNWRITTEN).await;
        assert!(hold(&shared, &all[2]).is_some(), "it is written nowhere");
    }

    #[tokio::test(start_paused = true)]
    async fn who_holds_a_place_may_ask_for_it_again() {
        let (shared, facts) = (shared(), workload("a"));
        hold(&shared, &facts).expect("room").keep();
        assert!(hold(&shared, &facts).is_some());
    }
}
