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
/// Names may be cut short, so the node is written out.
pub(super) const NODE: &str = "groundcrew.io/node";
const PREFIX: &str = "groundcrew-agent.";
const CALL: Duration = Duration::from_secs(5);
/// Names of objects end here.
const LONGEST: usize = 253;

/// The Lease of a node's agent.
#[must_use]
pub(super) fn lease_name(node: &str) -> String {
    let name = format!("{PREFIX}{node}");
    if name.len() <= LONGEST {
        return name;
    }
    let hash = node.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    let kept: String = name.chars().take(LONGEST - 17).collect();
    format!("{}.{hash:016x}", kept.trim_end_matches(['.', '-']))
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Beat {
    node: String,
    holder: Option<String>,
    renewed: Option<Timestamp>,
}

#[derive(Debug)]
struct Heard {
    beat: Beat,
    at: Instant,
}

/// A cheap handle on what is known.
#[derive(Clone, Debug)]
pub(super) struct Agents {
    heard: Arc<Mutex<HashMap<String, Heard>>>,
    watching_since: Instant,
    gone_after: Duration,
}

impl Agents {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Heard>> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hear(&self, lease: &str, beat: Option<Beat>) {
        let mut heard = self.lock();
        match beat {
            None => drop(heard.remove(lease)),
            Some(beat) if heard.get(lease).is_some_and(|known| known.beat == beat) => {}
            Some(beat) => drop(heard.insert(lease.to_owned(), Heard { beat, at: Instant::now() })),
        }
    }

    /// Whether a gate that is added now has somebody to open it.
    pub(super) fn any_alive(&self) -> bool {
        let alive = |heard: &Heard| heard.beat.holder.is_some() && heard.at.elapsed() < self.gone_after;
        self.lock().values().any(alive)
    }

    /// The agent of a node, with how long it has been silent, as a leader of this age sees it.
    pub(super) fn of<T>(&self, node: &str, led_for: Duration, see: impl FnOnce(Agent<'_>) -> T) -> T {
        let heard = self.lock();
        let known = heard.get(&lease_name(node)).filter(|known| known.beat.node == node);
        // A lease that was given back is as silent as none.
        let since = known.filter(|known| known.beat.holder.is_some()).map_or(self.watching_since, |known| known.at);
        let given_back = known.filter(|known| known.beat.holder.is_none()).map(|known| known.at);
        see(Agent {
            node,
            holder: known.and_then(|known| known.beat.holder.as_deref()),
            silent_for: given_back.unwrap_or(since).elapsed(),
            gone_after: self.gone_after,
            led_for,
        })
    }

    /// Reads a node's Lease itself, past a watch that may hang. False when nobody answered.
    pub(super) async fn ask(&self, leases: &Api<Lease>, node: &str) -> bool {
        let name = lease_name(node);
        match timeout(CALL, leases.get_opt(&name)).await {
            Ok(Ok(found)) => self.hear(&name, found.and_then(beat)),
            // An answer, if not one that tells about the agent.
            Ok(Err(kube::Error::Api(_))) => {}
            Ok(Err(_)) | Err(_) => return false,
        }
        true
    }
}

fn beat(lease: Lease) -> Option<Beat> {
    let node = lease.metadata.annotations?.remove(NODE)?;
    let spec = lease.spec.unwrap_or_default();
    let holder = spec.holder_identity.filter(|holder| !holder.is_empty());
    Some(Beat { node, holder, renewed: spec.renew_time.map(|time| time.0) })
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
    context.follow(&cache, cache::fill(Arc::clone(&cache), leases, feed, beat));
    let agents = Agents {
        heard: Arc::default(),
        watching_since: Instant::now(),
        gone_after: context.config.warmup.agent_timeout,
    };
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
        Agents { heard: Arc::default(), watching_since: Instant::now(), gone_after: Duration::from_secs(30) }
    }

    fn silence(agents: &Agents, node: &str) -> Duration {
        agents.of(node, Duration::ZERO, |agent| agent.silent_for)
    }

    fn beat_at(seconds: i64) -> Beat {
        let renewed = Timestamp::from_second(seconds).ok();
        Beat { node: "a".to_owned(), holder: Some("agent-x".to_owned()), renewed }
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
        agents.hear(&lease_name("a"), Some(beat_at(2)));
        assert!(agents.any_alive());
        agents.hear(&lease_name("a"), Some(Beat { holder: None, ..beat_at(3) }));
        assert!(!agents.any_alive(), "given back");
        assert_eq!(silence(&agents, "a"), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_without_a_lease_is_silent_since_we_began_to_look() {
        let agents = agents();
        tokio::time::advance(Duration::from_secs(12)).await;
        assert_eq!(silence(&agents, "b"), Duration::from_secs(12));
        agents.hear(&lease_name("a"), Some(beat_at(1)));
        agents.hear(&lease_name("a"), None);
        assert!(!agents.any_alive());
    }

    #[test]
    fn long_node_names_get_leases_of_legal_length_that_differ() {
        let (a, b) = ("n".repeat(252) + "a", "n".repeat(252) + "b");
        assert_eq!(lease_name("node-a"), "groundcrew-agent.node-a");
        assert!(lease_name(&a).len() <= LONGEST && lease_name(&a) != lease_name(&b));
    }
}
