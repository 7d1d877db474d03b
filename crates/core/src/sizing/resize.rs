//! Sizes follow their template and their node while the pod runs, as far as that needs no restart.
//!
//! The kubelet changes cpu and memory of running containers in place. Everything else — another QoS class, ephemeral
//! storage, init containers, containers that ask to be restarted — waits for the pod's next start and is only counted.

use std::time::Duration;

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::shape::{Container, Qos, Role, Shape};
use super::template::{Amounts, Resource};
use super::{Asked, Problem, Template, Why, sizing};
use crate::pod::Place;

/// What the decision may look at.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    pub shape: &'a Shape,
    /// The shape of the DaemonSet's pod template, in whose proportions the containers share.
    pub declared: Option<&'a Shape>,
    pub asked: Asked<'a>,
    pub template: Option<&'a Result<Template, Problem>>,
    pub node: Option<&'a str>,
    pub allocatable: Option<&'a Result<Amounts, Problem>>,
    /// The class the pod was born with.
    pub qos: Option<Qos>,
    pub kubelet: Kubelet,
    /// What the kubelet has set aside for each container, in the shape's order.
    pub allocated: &'a [Amounts],
    /// Being deleted, or Succeeded/Failed.
    pub ending: bool,
}

/// What the kubelet makes of the last resize.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum Kubelet {
    #[default]
    Idle,
    InProgress,
    /// Set aside, but the kubelet fails to carry it out; it goes on trying, and there is no telling for how long.
    Failing,
    /// Does not fit now; the kubelet tries again by itself.
    Deferred,
    /// Cannot fit; the kubelet does not look at it again.
    Infeasible,
}

/// What should happen to the pod, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Verdict {
    Leave(Leave),
    /// Asked for already; the kubelet is at it.
    Wait(Kubelet, Later),
    Resize(Vec<Change>, Later),
    /// The kubelet cannot do it: back to what runs, so that a later try is a new one.
    TakeBack(Vec<Change>, Later),
    /// Nothing can be done before the pod's next start.
    Restart(Later),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Leave {
    Right,
    Ending,
    Unsized(Why),
}

/// Cpu and memory of one running container, requests and limits alike.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    pub container: Box<str>,
    pub place: Place,
    pub to: Amounts,
}

/// Why a part of the size has to wait for the next start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Reason {
    /// The new size would change the pod's QoS class.
    Qos,
    Storage,
    InitContainer,
    /// The container's resize policy asks for a restart.
    ResizePolicy,
    Infeasible,
    /// The kubelet has agreed and cannot do it, for example to go below the memory in use.
    Failing,
    /// The API server says no, for reasons only it knows.
    Refused,
    /// Resizing is turned off.
    Disabled,
}

pub type Later = Vec<Reason>;

impl Reason {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Reason::Qos => "QoSClass",
            Reason::Storage => "EphemeralStorage",
            Reason::InitContainer => "InitContainer",
            Reason::ResizePolicy => "ResizePolicy",
            Reason::Infeasible => "Infeasible",
            Reason::Failing => "Failing",
            Reason::Refused => "Refused",
            Reason::Disabled => "ResizeDisabled",
        }
    }
}

#[must_use]
pub fn decide(seen: Seen<'_>) -> Verdict {
    if seen.ending {
        return Verdict::Leave(Leave::Ending);
    }
    let Seen { shape, declared, asked, template, node, allocatable, .. } = seen;
    let wanted = match sizing(super::Seen { shape, declared, asked, template, node, allocatable }) {
        Ok(sizing) => sizing,
        Err(why) => return Verdict::Leave(Leave::Unsized(why)),
    };
    let reported = |resource| matches!(allocatable, Some(Ok(all)) if all.of(resource).is_some());
    let sizes: Vec<Amounts> = wanted.containers.iter().map(|(_, amounts)| amounts.only(reported)).collect();
    let (changes, mut later) = differences(shape, &sizes);
    if !changes.is_empty() {
        return if seen.qos.unwrap_or_else(|| shape.qos()) == resized(shape, &changes).qos() {
            Verdict::Resize(changes, later)
        } else {
            later.insert(0, Reason::Qos);
            Verdict::Restart(later)
        };
    }
    match seen.kubelet {
        Kubelet::Infeasible => {
            let back = back_to(shape, seen.allocated);
            later.push(Reason::Infeasible);
            if back.is_empty() { Verdict::Restart(later) } else { Verdict::TakeBack(back, later) }
        }
        Kubelet::Failing => {
            later.push(Reason::Failing);
            Verdict::Restart(later)
        }
        state @ (Kubelet::InProgress | Kubelet::Deferred) => Verdict::Wait(state, later),
        Kubelet::Idle if later.is_empty() => Verdict::Leave(Leave::Right),
        Kubelet::Idle => Verdict::Restart(later),
    }
}

impl Verdict {
    /// The verdict where a resize must not or cannot be made.
    #[must_use]
    pub fn without_resize(self, reason: Reason) -> Self {
        match self {
            Verdict::Resize(_, mut later) | Verdict::TakeBack(_, mut later) => {
                later.push(reason);
                Verdict::Restart(later)
            }
            other => other,
        }
    }
}

/// What can change now, and why the rest cannot.
fn differences(shape: &Shape, sizes: &[Amounts]) -> (Vec<Change>, Later) {
    let mut changes = Vec::new();
    let mut later = Later::new();
    for (container, size) in shape.containers.iter().zip(sizes) {
        let mut to = Amounts::default();
        for resource in Resource::ALL {
            let Some(amount) = size.of(resource).filter(|amount| !container.has(resource, *amount)) else { continue };
            match obstacle(container, resource) {
                Some(reason) => later.push(reason),
                None => to.set(resource, Some(amount)),
            }
        }
        push(&mut changes, container, to);
    }
    later.sort_unstable();
    later.dedup();
    (changes, later)
}

fn obstacle(container: &Container, resource: Resource) -> Option<Reason> {
    match (container.role, resource) {
        (Role::Init, _) => Some(Reason::InitContainer),
        (_, Resource::Storage) => Some(Reason::Storage),
        _ => container.restarts.get(resource).then_some(Reason::ResizePolicy),
    }
}

/// Where the wish and what the kubelet has set aside differ, the latter.
fn back_to(shape: &Shape, allocated: &[Amounts]) -> Vec<Change> {
    let mut changes = Vec::new();
    for (container, allocated) in shape.containers.iter().zip(allocated).filter(|(container, _)| container.runs()) {
        let mut to = Amounts::default();
        for resource in [Resource::Cpu, Resource::Memory] {
            to.set(resource, allocated.of(resource).filter(|amount| !container.has(resource, *amount)));
        }
        push(&mut changes, container, to);
    }
    changes
}

fn push(changes: &mut Vec<Change>, container: &Container, to: Amounts) {
    if !to.is_empty() {
        changes.push(Change { container: container.name.clone(), place: container.place, to });
    }
}

fn resized(shape: &Shape, changes: &[Change]) -> Shape {
    let mut shape = shape.clone();
    for container in &mut shape.containers {
        for change in changes.iter().filter(|change| change.place == container.place) {
            for resource in Resource::ALL {
                if let Some(amount) = change.to.of(resource) {
                    container.requests.set(resource, Some(amount));
                    container.limits.set(resource, Some(amount));
                }
            }
        }
    }
    shape
}

/// Whether the change takes nothing from the node.
#[must_use]
pub fn shrinks(shape: &Shape, changes: &[Change]) -> bool {
    let after = resized(shape, changes);
    Resource::ALL.into_iter().all(|resource| after.reserves(resource) <= shape.reserves(resource))
}

/// What the pod now has where the changes would change it.
#[must_use]
pub fn now(shape: &Shape, changes: &[Change]) -> Vec<Change> {
    let mut before = changes.to_vec();
    for change in &mut before {
        let container = shape.containers.iter().find(|container| container.place == change.place);
        for resource in Resource::ALL {
            if change.to.of(resource).is_some() {
                change.to.set(resource, container.and_then(|container| container.declared(resource)));
            }
        }
    }
    before
}

/// The `spec` of a strategic merge patch of the `resize` subresource.
#[must_use]
pub fn spec(changes: &[Change]) -> Value {
    let mut spec = Map::new();
    for change in changes {
        let named =
            |resource: Resource| change.to.of(resource).map(|a| (resource.name().to_owned(), json!(resource.text(a))));
        let sizes: Map<String, Value> = Resource::ALL.into_iter().filter_map(named).collect();
        let container = json!({"name": change.container, "resources": {"requests": sizes, "limits": sizes}});
        let (list, _) = change.place.path();
        if let Value::Array(list) = spec.entry(list).or_insert_with(|| json!([])) {
            list.push(container);
        }
    }
    Value::Object(spec)
}

const FIRST_RETRY: Duration = Duration::from_secs(60);
const LAST_RETRY: Duration = Duration::from_secs(3600);

/// How long to wait after the n-th write of which nobody knows why it failed.
#[must_use]
pub fn retry_soon(tries: u32) -> Duration {
    Duration::from_secs(1).saturating_mul(1 << tries.min(10)).min(FIRST_RETRY)
}

/// How long to wait after the kubelet has called the n-th try infeasible.
#[must_use]
pub fn retry_after(tries: u32) -> Duration {
    FIRST_RETRY.saturating_mul(1 << tries.saturating_sub(1).min(10)).min(LAST_RETRY)
}
