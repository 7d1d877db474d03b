//! A pod as sizing sees it: its containers, their roles and what they declare.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1 as api;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::Serialize;

use super::template::{Amounts, PerResource, Resource};
use crate::keys::Lookup;
use crate::pod::{ContainerView, Place, PodView, ResourcesView, Text};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Role {
    Main,
    /// An init container that keeps running.
    Sidecar,
    Init,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    pub name: Box<str>,
    pub place: Place,
    pub role: Role,
    pub requests: Amounts,
    pub limits: Amounts,
    /// Changing this resource would restart the container.
    pub restarts: PerResource<bool>,
}

/// Containers first, then init containers, each in their own order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    pub containers: Vec<Container>,
    /// The user sizes the pod as a whole.
    pub pod_level: bool,
}

/// How safe a pod is from being killed first; fixed for its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Qos {
    Guaranteed,
    Burstable,
    BestEffort,
}

impl Qos {
    #[must_use]
    pub fn read(text: &str) -> Option<Self> {
        match text {
            "Guaranteed" => Some(Qos::Guaranteed),
            "Burstable" => Some(Qos::Burstable),
            "BestEffort" => Some(Qos::BestEffort),
            _ => None,
        }
    }
}

impl Container {
    /// What the container asks for; the API server makes requests of limits.
    #[must_use]
    pub fn declared(&self, resource: Resource) -> Option<u64> {
        self.requests.of(resource).or(self.limits.of(resource))
    }

    /// Whether both its request and its limit are this much.
    #[must_use]
    pub fn has(&self, resource: Resource, amount: u64) -> bool {
        self.requests.of(resource) == Some(amount) && self.limits.of(resource) == Some(amount)
    }

    #[must_use]
    pub fn runs(&self) -> bool {
        self.role != Role::Init
    }
}

impl Shape {
    #[must_use]
    pub fn of_view(pod: &PodView<'_>) -> Self {
        let mains = pod.spec.containers.iter().flatten().enumerate();
        let mains = mains.map(|(index, view)| of_container_view(Place::Container(index), view));
        let inits = pod.spec.init_containers.iter().flatten().enumerate();
        let inits = inits.map(|(index, view)| of_container_view(Place::Init(index), view));
        let says = |map: &Option<BTreeMap<_, _>>| map.as_ref().is_some_and(|map| !map.is_empty());
        let pod_level = pod.spec.resources.as_ref();
        Self {
            containers: mains.chain(inits).collect(),
            pod_level: pod_level.is_some_and(|r| says(&r.requests) || says(&r.limits)),
        }
    }

    #[must_use]
    pub fn of_spec(spec: &api::PodSpec) -> Self {
        let mains = spec.containers.iter().enumerate();
        let mains = mains.map(|(index, container)| of_container(Place::Container(index), container));
        let inits = spec.init_containers.iter().flatten().enumerate();
        let inits = inits.map(|(index, container)| of_container(Place::Init(index), container));
        let says = |map: &Option<BTreeMap<_, _>>| map.as_ref().is_some_and(|map| !map.is_empty());
        let pod_level = spec.resources.as_ref();
        Self {
            containers: mains.chain(inits).collect(),
            pod_level: pod_level.is_some_and(|r| says(&r.requests) || says(&r.limits)),
        }
    }

    /// What the scheduler reserves: the running containers, or the hungriest moment of the start.
    #[must_use]
    pub fn reserves(&self, resource: Resource) -> u64 {
        let (mut running, mut sidecars, mut peak) = (0u64, 0u64, 0u64);
        for container in &self.containers {
            let request = container.declared(resource).unwrap_or(0);
            match container.role {
                Role::Main => running = running.saturating_add(request),
                Role::Sidecar => sidecars = sidecars.saturating_add(request),
                Role::Init => peak = peak.max(sidecars.saturating_add(request)),
            }
        }
        running.saturating_add(sidecars).max(peak)
    }

    /// The class as the API server computes it.
    #[must_use]
    pub fn qos(&self) -> Qos {
        let sum = |amounts: fn(&Container) -> &Amounts, resource| {
            self.containers.iter().filter_map(|c| amounts(c).of(resource)).map(u128::from).sum::<u128>()
        };
        let classes = [Resource::Cpu, Resource::Memory];
        let requests = classes.map(|resource| sum(|c| &c.requests, resource));
        let limits = classes.map(|resource| sum(|c| &c.limits, resource));
        let limited = |c: &Container| classes.iter().all(|resource| c.limits.of(*resource).is_some_and(|l| l > 0));
        if requests == [0, 0] && limits == [0, 0] {
            Qos::BestEffort
        } else if requests == limits && self.containers.iter().all(limited) {
            Qos::Guaranteed
        } else {
            Qos::Burstable
        }
    }
}

fn role(place: Place, restart_policy: Option<&str>) -> Role {
    match (place, restart_policy) {
        (Place::Container(_), _) => Role::Main,
        (Place::Init(_), Some("Always")) => Role::Sidecar,
        (Place::Init(_), _) => Role::Init,
    }
}

fn of_container_view(place: Place, view: &ContainerView<'_>) -> Container {
    let part = |pick: fn(&ResourcesView<'_>) -> Amounts| view.resources.as_ref().map(pick).unwrap_or_default();
    Container {
        name: view.name.as_ref().map_or("", Text::as_str).into(),
        place,
        role: role(place, view.restart_policy.as_ref().map(Text::as_str)),
        requests: part(|r| Amounts::declared(&r.requests.as_ref())),
        limits: part(|r| Amounts::declared(&r.limits.as_ref())),
        restarts: PerResource::default(),
    }
}

fn of_container(place: Place, container: &api::Container) -> Container {
    let part =
        |pick: fn(&api::ResourceRequirements) -> Amounts| container.resources.as_ref().map(pick).unwrap_or_default();
    let restarts = |resource: Resource| {
        let policies = container.resize_policy.iter().flatten();
        policies.into_iter().any(|p| p.resource_name == resource.name() && p.restart_policy == "RestartContainer")
    };
    Container {
        name: container.name.as_str().into(),
        place,
        role: role(place, container.restart_policy.as_deref()),
        requests: part(|r| Amounts::declared(&r.requests.as_ref())),
        limits: part(|r| Amounts::declared(&r.limits.as_ref())),
        restarts: PerResource { cpu: restarts(Resource::Cpu), memory: restarts(Resource::Memory), storage: true },
    }
}

impl Lookup for BTreeMap<String, Quantity> {
    fn value(&self, key: &str) -> Option<&str> {
        self.get(key).map(|quantity| quantity.0.as_str())
    }
}
