//! Which nodes have an agent that lives.
//!
//! Judged by Leases that change before our own eyes, on our own clock: an agent is as old as its last renewal that we
//! saw, whatever time is written in it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use groundcrew_core::warmup::backstop::Agent;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::core::DeserializeGuard;
use tokio::time::{Instant, timeout};

use crate::run::Context;
use crate::runtime::cache::{self, Cache, Feed};

/// On every agent's Lease.
pub(super) const LABEL: &str = "groundcrew.io/agent";
pub(super) const LABEL_VALUE: &str = "warmup";
const PREFIX: &str = "groundcrew-agent.";
const CALL: Duration = Duration::from_secs(5);
/// Names of objects end here.
const LONGEST: usize = 253;

/// The Lease of a node's agent. The policy that binds an agent to its node spells it the same way.
#[must_use]
pub(super) fn lease_name(node: &str) -> String {
    format!("{PREFIX}{node}")
}

/// Whether the node's Lease can exist.
pub fn check_node_name(node: &str) -> Result<(), String> {
    let longest = LONGEST - PREFIX.len();
    if node.len() <= longest {
        return Ok(());
    }
    Err(format!("the name of node {node} is longer than {longest} characters, so its agent can have no lease"))
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Beat {
    holder: Option<String>,
    renewed: Option<Timestamp>,
}

/// Of one lease: what it said last, and since when. No beat means that there is no lease, since we first asked for it.
#[derive(Debug)]
struct Heard {
    beat: Option<Beat>,
    at: Instant,
}

impl Heard {
    fn holder(&self) -> Option<&str> {
        self.beat.as_ref()?.holder.as_deref()
    }
}

/// A cheap handle on what is known.
#[derive(Clone, Debug)]
pub(super) struct Agents {
    heard: Arc<Mutex<HashMap<String, Heard>>>,
    gone_after: Duration,
}

impl Agents {
    pub(super) fn new(gone_after: Duration) -> Self {
        Self { heard: Arc::default(), gone_after }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Heard>> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn hear(&self, lease: &str, beat: Option<Beat>) {
        let mut heard = self.lock();
        match beat {
            // One that nobody has seen is missing for as long as before.
            None if heard.get(lease).is_some_and(|known| known.beat.is_none()) => {}
            None => drop(heard.remove(lease)),
            Some(beat) if heard.get(lease).is_some_and(|known| known.beat.as_ref() == Some(&beat)) => {}
            Some(beat) => drop(heard.insert(lease.to_owned(), Heard { beat: Some(beat), at: Instant::now() })),
        }
    }

    /// Whether a gate that is added now has somebody to open it.
    pub(super) fn any_alive(&self) -> bool {
        let alive = |heard: &Heard| heard.holder().is_some() && heard.at.elapsed() < self.gone_after;
        self.lock().values().any(alive)
    }

    /// The agent of a node, with how long it has been silent, as a leader of this age sees it. One whose Lease was given
    /// back is silent since then, and one without a Lease since somebody first asked: on a new node it is about to come.
    pub(super) fn of<T>(&self, node: &str, led_for: Duration, see: impl FnOnce(Agent<'_>) -> T) -> T {
        let mut heard = self.lock();
        let known = heard.entry(lease_name(node)).or_insert_with(|| Heard { beat: None, at: Instant::now() });
        see(Agent {
            node,
            holder: known.holder(),
            silent_for: known.at.elapsed(),
            gone_after: self.gone_after,
            led_for,
        })
    }

    /// The leases that have not changed for so long.
    pub(super) fn silent(&self, since: Duration) -> Vec<String> {
        let heard = self.lock();
        let silent = heard.iter().filter(|(_, known)| known.beat.is_some() && known.at.elapsed() >= since);
        silent.map(|(lease, _)| lease.clone()).collect()
    }

    /// Forgets nodes that were asked about so long ago and never had a Lease.
    pub(super) fn forget_absent(&self, since: Duration) {
        self.lock().retain(|_, known| known.beat.is_some() || known.at.elapsed() < since);
    }

    /// Reads a node's Lease itself, past a watch that may hang. False when nobody answered.
    pub(super) async fn ask(&self, leases: &Api<Lease>, node: &str) -> bool {
        let name = lease_name(node);
        match timeout(CALL, leases.get_opt(&name)).await {
            Ok(Ok(found)) => self.hear(&name, found.map(beat)),
            // An answer, if not one that tells about the agent; a server that is busy has given none.
            Ok(Err(kube::Error::Api(status))) if status.code < 500 && status.code != 429 => {}
            Ok(Err(_)) | Err(_) => return false,
        }
        true
    }
}

pub(super) fn beat(lease: Lease) -> Beat {
    let spec = lease.spec.unwrap_or_default();
    let holder = spec.holder_identity.filter(|holder| !holder.is_empty());
    Beat { holder, renewed: spec.renew_time.map(|time| time.0) }
}

/// One watch for admission and the leader's backstop.
pub(super) fn follow(context: &Context) -> Agents {
    Agents::clone(&context.shared(|| start(context)))
}

fn start(context: &Context) -> Agents {
    let leases: Api<DeserializeGuard<Lease>> = Api::namespaced(context.clients.watch.clone(), &context.namespace);
    let cache: Arc<Cache<Beat>> = Cache::new("leases of warm-up agents");
    let changes = cache.subscribe();
    let feed = Feed { labels: Some(super::agent_leases()), ..context.feed() };
    context.follow(&cache, cache::fill(Arc::clone(&cache), leases, feed, |lease| Some(beat(lease))));
    let agents = Agents::new(context.config.warmup.agent_timeout);
    let listening = agents.clone();
    context.tasks.spawn(context.stopping.clone().run_until_cancelled_owned(async move {
        loop {
            let key = changes.next().await;
            listening.hear(&key.name, cache.get(&key).map(|beat| (*beat).clone()));
        }
    }));
    agents
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agents() -> Agents {
        Agents::new(Duration::from_secs(30))
    }

    fn silence(agents: &Agents, node: &str) -> Duration {
        agents.of(node, Duration::ZERO, |agent| agent.silent_for)
    }

    fn beat_at(seconds: i64) -> Beat {
        let renewed = Timestamp::from_second(seconds).ok();
        Beat { holder: Some("agent-x".to_owned()), renewed }
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_lives_while_its_lease_changes_before_our_eyes() {
        let agents = agents();
        assert!(!agents.any_alive());
        agents.hear(&lease_name("a"), Some(beat_at(1)));
        assert!(agents.any_alive());
        tokio::time::advance(Duration::from_secs(20)).await;
        // Seen again, but not renewed: a relist is no heart-beat.
        agents.hear(&lease_name("a"), Some(beat_at(1)));
        tokio::time::advance(Duration::from_secs(10)).await;
        assert!(!agents.any_alive());
        assert_eq!(silence(&agents, "a"), Duration::from_secs(30));
        assert_eq!(agents.silent(Duration::from_secs(30)), [lease_name("a")]);
        agents.hear(&lease_name("a"), Some(beat_at(2)));
        assert!(agents.any_alive());
        agents.hear(&lease_name("a"), Some(Beat { holder: None, ..beat_at(3) }));
        assert!(!agents.any_alive(), "given back");
        assert!(agents.silent(Duration::from_secs(1)).is_empty());
        assert_eq!(silence(&agents, "a"), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_without_a_lease_is_silent_since_somebody_first_asked() {
        let agents = agents();
        tokio::time::advance(Duration::from_secs(3_600)).await;
        assert_eq!(silence(&agents, "b"), Duration::ZERO, "its agent is about to come");
        tokio::time::advance(Duration::from_secs(12)).await;
        agents.hear(&lease_name("b"), None);
        assert_eq!(silence(&agents, "b"), Duration::from_secs(12), "still none");
        agents.hear(&lease_name("a"), Some(beat_at(1)));
        agents.hear(&lease_name("a"), None);
        assert!(!agents.any_alive());
        assert_eq!(silence(&agents, "a"), Duration::ZERO);
    }

    #[test]
    fn a_node_whose_name_leaves_no_room_for_a_lease_is_refused() {
        assert_eq!(check_node_name(&"n".repeat(236)), Ok(()));
        assert_eq!(lease_name(&"n".repeat(236)).len(), 253);
        assert!(check_node_name(&"n".repeat(237)).is_err_and(|e| e.contains("longer than 236")));
    }
}
