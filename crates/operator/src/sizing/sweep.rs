//! One look at every sized pod: what should be resized now, and what the templates' statuses should say.
//!
//! A change of one template or node concerns many pods, and how many may change at once depends on all of them. So
//! instead of a queue of keys there is one pass over everything, a few milliseconds for ten thousand pods, whenever
//! something has changed. It is pure but for the caches it reads; [`super::carry`] does what it says.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use groundcrew_core::sizing::resize::{self, Change, Kubelet, Leave, Reason, Verdict};
use groundcrew_core::sizing::status::{Summary, Tally, crowded, load};
use groundcrew_core::sizing::{Asked, Owner, Qos, Shape, Why};
use tokio::time::Instant;

use super::facts::{Facts, PodFacts, key};
use crate::runtime::cache::{Cache, Key};

/// A kubelet that has not said anything about a resize by then is not waited for.
const SILENCE: Duration = Duration::from_secs(10);

/// Our own write, until the cache shows it.
#[derive(Debug)]
pub struct Sent {
    pub at: Instant,
    /// The version it was decided on.
    pub version: String,
}

/// A write that failed, for no fault of its own as far as is known.
#[derive(Debug)]
pub struct Failed {
    pub tries: u32,
    pub not_before: Instant,
}

/// A size that was refused.
#[derive(Debug)]
pub struct Refusal {
    pub changes: Vec<Change>,
    pub reason: Reason,
    pub tries: u32,
    pub not_before: Instant,
}

/// What the leader remembers from pass to pass, by pod uid; a new leader starts with nothing and finds out again.
#[derive(Debug, Default)]
pub struct Memory {
    pub sent: HashMap<String, Sent>,
    pub failed: HashMap<String, Failed>,
    pub refused: HashMap<String, Refusal>,
}

/// A pod to write to.
#[derive(Clone, Debug)]
pub struct Job {
    pub key: Key,
    pub pod: Arc<PodFacts>,
    pub changes: Vec<Change>,
    pub take_back: bool,
    shrinks: bool,
}

/// What one pass found.
#[derive(Debug, Default)]
pub struct Plan {
    pub jobs: Vec<Job>,
    /// Pods that have to wait for another pod of their node, or for the pace.
    pub held: usize,
    pub templates: BTreeMap<String, Summary>,
    /// DaemonSets that ask for sizes and do not get them.
    pub failures: BTreeMap<Key, Why>,
    /// Nodes that give too much away: by template, how many and the worst.
    pub crowded: BTreeMap<String, Crowd>,
    pub states: BTreeMap<&'static str, usize>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crowd {
    pub nodes: usize,
    pub worst: (u64, String, &'static str),
}

#[derive(Debug)]
pub struct Settings {
    pub resize: bool,
    pub warn_share: u64,
}

#[derive(Default)]
struct OnNode {
    /// Pods, by uid, that the kubelet is at work on.
    at_work: HashSet<String>,
    /// A write of ours whose effect is not seen yet.
    unanswered: bool,
    jobs: Vec<Job>,
    shapes: Vec<Arc<PodFacts>>,
    templates: HashSet<String>,
}

/// Gathers and decides; `budget` is how many writes may be made now.
pub fn sweep(
    facts: &Facts,
    pods: &Cache<PodFacts>,
    memory: &mut Memory,
    settings: &Settings,
    budget: usize,
    now: Instant,
) -> Plan {
    let mut plan = Plan::default();
    let mut tallies: BTreeMap<String, Tally> = BTreeMap::new();
    facts.templates.for_each(|key, _| drop(tallies.insert(key.name.clone(), Tally::default())));
    facts.daemon_sets.for_each(|key, set| {
        let Some(name) = &set.template else { return };
        match tallies.get_mut(name) {
            Some(tally) => tally.daemon_set(&key.namespace, &key.name),
            None => drop(plan.failures.insert(key.clone(), Why::TemplateMissing(name.clone()))),
        }
    });
    let mut nodes: HashMap<String, OnNode> = HashMap::new();
    let mut alive: HashSet<String> = HashSet::new();
    pods.for_each(|key, pod| {
        alive.insert(pod.uid.clone());
        look(facts, memory, settings, now, key, pod, &mut plan, &mut tallies, &mut nodes);
    });
    memory.sent.retain(|uid, _| alive.contains(uid));
    memory.failed.retain(|uid, _| alive.contains(uid));
    memory.refused.retain(|uid, _| alive.contains(uid));
    choose(&mut plan, &mut nodes, budget);
    plan.crowded = crowds(facts, settings, &nodes);
    for (name, tally) in tallies {
        if let Some(template) = facts.templates.get(&key("", &name)) {
            plan.templates.insert(name, tally.summary(&template.template));
        }
    }
    plan
}

#[expect(clippy::too_many_arguments, reason = "the body of a loop over a cache that is locked meanwhile")]
fn look(
    facts: &Facts,
    memory: &mut Memory,
    settings: &Settings,
    now: Instant,
    pod_key: &Key,
    pod: &Arc<PodFacts>,
    plan: &mut Plan,
    tallies: &mut BTreeMap<String, Tally>,
    nodes: &mut HashMap<String, OnNode>,
) {
    let owner = Owner { name: &pod.owner, uid: &pod.owner_uid };
    let set = facts.daemon_sets.get(&key(&pod_key.namespace, &pod.owner));
    let asked = facts.asked(set.as_deref(), Some(owner), pod.template.as_deref());
    let Asked::Template(name) = asked else { return };
    let template = facts.template(asked);
    let allocatable = facts.node(pod.node.as_deref());
    let verdict = resize::decide(resize::Seen {
        shape: &pod.shape,
        declared: set.as_deref().map(|set| &set.shape),
        asked,
        template: template.as_ref().map(|facts| &facts.template),
        node: pod.node.as_deref(),
        allocatable: allocatable.as_deref(),
        qos: pod.qos,
        kubelet: pod.kubelet,
        allocated: &pod.allocated,
        ending: pod.ending,
    });
    let verdict = tempered(verdict, memory, settings, pod, now);
    if let Verdict::Leave(Leave::Unsized(why)) = &verdict
        && why.is_failure()
    {
        let daemon_set = key(&pod_key.namespace, &pod.owner);
        plan.failures.entry(daemon_set).or_insert_with(|| why.clone());
    }
    *plan.states.entry(state(&verdict)).or_default() += 1;
    if let Some(tally) = tallies.get_mut(name) {
        tally.daemon_set(&pod_key.namespace, &pod.owner);
        tally.pod(&verdict);
    }
    let Some(node) = &pod.node else { return };
    if pod.ending {
        return;
    }
    let on_node = nodes.entry(node.clone()).or_default();
    on_node.shapes.push(Arc::clone(pod));
    on_node.templates.insert(name.to_owned());
    on_node.unanswered |= unanswered(memory, pod, now);
    if pod.kubelet == Kubelet::InProgress {
        on_node.at_work.insert(pod.uid.clone());
    }
    let (changes, take_back) = match verdict {
        Verdict::Resize(changes, _) => (changes, false),
        Verdict::TakeBack(changes, _) => (changes, true),
        _ => return,
    };
    if memory.failed.get(&pod.uid).is_some_and(|failed| failed.not_before > now) {
        plan.held += 1;
        return;
    }
    let shrinks = take_back || resize::shrinks(&pod.shape, &changes);
    on_node.jobs.push(Job { key: pod_key.clone(), pod: Arc::clone(pod), changes, take_back, shrinks });
}

/// What settings and earlier refusals leave of a verdict.
fn tempered(verdict: Verdict, memory: &Memory, settings: &Settings, pod: &PodFacts, now: Instant) -> Verdict {
    // A sized pod whose node is gone goes soon, too; nobody has to hear of that.
    if matches!(verdict, Verdict::Leave(Leave::Unsized(Why::NodeMissing(_)))) && pod.qos == Some(Qos::Guaranteed) {
        return Verdict::Leave(Leave::Ending);
    }
    if !settings.resize {
        return verdict.without_resize(Reason::Disabled);
    }
    match (&verdict, memory.refused.get(&pod.uid)) {
        (Verdict::Resize(changes, _), Some(refusal)) if refusal.not_before > now && refusal.changes == *changes => {
            verdict.without_resize(refusal.reason)
        }
        _ => verdict,
    }
}

/// Whether a write of ours is not yet seen, by the cache or by the kubelet.
fn unanswered(memory: &mut Memory, pod: &PodFacts, now: Instant) -> bool {
    let Some(sent) = memory.sent.get(&pod.uid) else { return false };
    if now.duration_since(sent.at) < SILENCE && (sent.version == pod.version || pod.unobserved) {
        return true;
    }
    memory.sent.remove(&pod.uid);
    false
}

/// One pod of a node at a time, and those first that make room.
fn choose(plan: &mut Plan, nodes: &mut HashMap<String, OnNode>, budget: usize) {
    let mut jobs = Vec::new();
    for node in nodes.values_mut() {
        node.jobs.sort_by(|a, b| b.shrinks.cmp(&a.shrinks).then_with(|| a.key.cmp(&b.key)));
        // A pod's own resize that goes on is no reason not to ask for another size, perhaps the one it came from.
        let free = |job: &Job| !node.unanswered && node.at_work.iter().all(|uid| *uid == job.pod.uid);
        let next = node.jobs.iter().position(free).map(|at| node.jobs.swap_remove(at));
        plan.held += node.jobs.len();
        jobs.extend(next);
    }
    jobs.sort_by(|a, b| a.key.cmp(&b.key));
    plan.held += jobs.len().saturating_sub(budget);
    jobs.truncate(budget);
    plan.jobs = jobs;
}

fn crowds(facts: &Facts, settings: &Settings, nodes: &HashMap<String, OnNode>) -> BTreeMap<String, Crowd> {
    let mut crowds: BTreeMap<String, Crowd> = BTreeMap::new();
    for (name, node) in nodes {
        let Some(allocatable) = facts.node(Some(name)) else { continue };
        let Ok(allocatable) = allocatable.as_ref() else { continue };
        let shapes: Vec<&Shape> = node.shapes.iter().map(|pod| &pod.shape).collect();
        let Some((resource, percent)) = crowded(&load(allocatable, &shapes), settings.warn_share) else { continue };
        let worst = (percent, name.clone(), resource.name());
        for template in &node.templates {
            let crowd = crowds.entry(template.clone()).or_insert_with(|| Crowd { nodes: 0, worst: worst.clone() });
            crowd.nodes += 1;
            if worst > crowd.worst {
                crowd.worst.clone_from(&worst);
            }
        }
    }
    crowds
}

const fn state(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Leave(Leave::Right) => "right",
        Verdict::Leave(Leave::Ending) => "ending",
        Verdict::Leave(Leave::Unsized(_)) => "unsized",
        Verdict::Wait(..) | Verdict::Resize(..) | Verdict::TakeBack(..) => "resizing",
        Verdict::Restart(_) => "needs_restart",
    }
}

#[cfg(test)]
mod tests;
