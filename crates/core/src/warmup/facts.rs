//! The part of a pod that warm-up looks at, as the API spells it.

use std::collections::BTreeMap;
use std::net::IpAddr;

use jiff::Timestamp;
use serde::{Deserialize, Deserializer};

use super::state::State;
use crate::keys;
use crate::pod::{Container, Gate};

/// Everything one decision may look at.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    pub annotations: &'a BTreeMap<String, String>,
    pub deleting: bool,
    pub spec: &'a Spec,
    pub status: &'a Status,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Spec {
    pub node_name: Option<String>,
    #[serde(deserialize_with = "or_default")]
    pub readiness_gates: Vec<Gate<String>>,
    #[serde(deserialize_with = "or_default")]
    pub containers: Vec<Container<String>>,
    #[serde(deserialize_with = "or_default")]
    pub init_containers: Vec<Container<String>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Status {
    pub phase: Option<String>,
    #[serde(rename = "podIP")]
    pub pod_ip: Option<String>,
    #[serde(deserialize_with = "or_default")]
    pub conditions: Vec<PodCondition>,
    #[serde(deserialize_with = "or_default")]
    pub container_statuses: Vec<ContainerStatus>,
    #[serde(deserialize_with = "or_default")]
    pub init_container_statuses: Vec<ContainerStatus>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodCondition {
    #[serde(rename = "type")]
    pub kind: String,
    pub status: String,
    pub reason: Option<String>,
    pub message: Option<String>,
    pub last_transition_time: Option<Timestamp>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerStatus {
    pub name: String,
    pub ready: bool,
    #[serde(rename = "containerID")]
    pub container_id: Option<String>,
    pub state: Option<ContainerState>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct ContainerState {
    pub running: Option<Running>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Running {
    pub started_at: Option<Timestamp>,
}

/// The API writes `null` where Go has a nil slice.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(d: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(d)?.unwrap_or_default())
}

/// What a pod still lacks before it can be warmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub enum Missing {
    Node,
    Running,
    ReadyContainer,
    ContainersReady,
}

impl Seen<'_> {
    #[must_use]
    pub fn is_gated(&self) -> bool {
        self.spec.readiness_gates.iter().any(|gate| gate.condition_type == keys::WARMUP_READY)
    }

    /// Being deleted, or finished: nobody waits for it to become Ready.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        self.deleting || matches!(self.status.phase.as_deref(), Some("Succeeded" | "Failed"))
    }

    #[must_use]
    pub fn condition(&self) -> Option<&PodCondition> {
        self.status.conditions.iter().find(|condition| condition.kind == keys::WARMUP_READY)
    }

    #[must_use]
    pub fn is_open(&self) -> bool {
        self.condition().is_some_and(|condition| condition.status == "True")
    }

    /// What was remembered on the pod; unreadable means nothing was.
    #[must_use]
    pub fn state(&self) -> Option<State> {
        serde_json::from_str(self.annotations.get(keys::WARMUP_STATE)?).ok()
    }

    /// The containers that have to be ready: the plain ones and the native sidecars.
    fn lasting(&self) -> impl Iterator<Item = (&str, Option<&ContainerStatus>)> {
        let sidecar = |c: &&Container<String>| c.restart_policy.as_deref() == Some("Always");
        let by_name = |statuses: &'_ [ContainerStatus], name: &str| statuses.iter().position(|s| s.name == name);
        let plain = self.spec.containers.iter().map(move |c| {
            let statuses = &self.status.container_statuses;
            (c.name.as_str(), by_name(statuses, &c.name).and_then(|i| statuses.get(i)))
        });
        let sidecars = self.spec.init_containers.iter().filter(sidecar).map(move |c| {
            let statuses = &self.status.init_container_statuses;
            (c.name.as_str(), by_name(statuses, &c.name).and_then(|i| statuses.get(i)))
        });
        plain.chain(sidecars)
    }

    /// The IDs of the containers to warm, sorted, once all of them are ready.
    pub fn due(&self) -> Result<Vec<String>, Missing> {
        if self.spec.node_name.is_none() {
            return Err(Missing::Node);
        }
        if self.status.phase.as_deref() != Some("Running") {
            return Err(Missing::Running);
        }
        let mut ids = Vec::new();
        for (_, status) in self.lasting() {
            match status.filter(|status| status.ready).and_then(ContainerStatus::running_id) {
                Some(id) => ids.push(id.to_owned()),
                None => return Err(Missing::ReadyContainer),
            }
        }
        let ready = |c: &PodCondition| c.kind == "ContainersReady" && c.status == "True";
        if ids.is_empty() || !self.status.conditions.iter().any(ready) {
            return Err(Missing::ContainersReady);
        }
        ids.sort_unstable();
        Ok(ids)
    }

    /// Whether every container that runs is one of these, and each of these still runs.
    #[must_use]
    pub fn still_runs(&self, ids: &[String]) -> bool {
        let running: Vec<&str> = self.lasting().filter_map(|(_, s)| s?.running_id()).collect();
        self.lasting().all(|(_, s)| s.is_some_and(|s| s.running_id().is_some()))
            && running.iter().all(|id| ids.iter().any(|known| known == id))
            && ids.iter().all(|id| running.contains(&id.as_str()))
    }

    /// Whether a container that is not `known` started so late that it was never in service: after the pod had ceased
    /// to be Ready, or since `recently`. An unknown one that has served for long is as warm as it will get, and to shut
    /// the gate would take all replicas out at once when an agent comes (back).
    pub(super) fn restarted(&self, recently: Timestamp, known: impl Fn(&str, Option<Timestamp>) -> bool) -> bool {
        let ready = self.status.conditions.iter().find(|condition| condition.kind == "Ready");
        let serves = ready.is_some_and(|condition| condition.status == "True");
        let out_since = ready.and_then(|condition| condition.last_transition_time);
        self.lasting().any(|(_, status)| {
            let Some((id, status)) = status.and_then(|s| Some((s.running_id()?, s))) else { return !serves };
            let started = status.started_at();
            if known(id, started) {
                return false;
            }
            let after_it_served = || !serves && started.is_none_or(|at| out_since.is_none_or(|out| at >= out));
            started.is_some_and(|at| at > recently) || after_it_served()
        })
    }

    /// Where to send requests. Only an address a pod can have: never a link-local one, where metadata services live.
    #[must_use]
    pub fn address(&self) -> Option<IpAddr> {
        let ip: IpAddr = self.status.pod_ip.as_deref()?.parse().ok()?;
        let link_local = match ip.to_canonical() {
            IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        };
        (!link_local && !ip.is_unspecified() && !ip.is_multicast()).then_some(ip)
    }
}

impl ContainerStatus {
    fn running_id(&self) -> Option<&str> {
        self.state.as_ref()?.running.as_ref()?;
        self.container_id.as_deref().filter(|id| !id.is_empty())
    }

    fn started_at(&self) -> Option<Timestamp> {
        self.state.as_ref()?.running.as_ref()?.started_at
    }
}
