//! Remembers across restarts and leaders that a configuration existed, and when someone deleted it.
//!
//! A ConfigMap of its own: the Secret exists only with managed certificates, and the Lease only with leader election.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Client;
use kube::api::{Api, ObjectMeta, Patch, PatchParams};

use super::keep::{Error, call, write};
use super::labels;
use crate::runtime::leadership::Leadership;

/// What is known of one configuration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Memory {
    pub(super) registered: bool,
    pub(super) deleted_at: Option<Timestamp>,
}

impl Memory {
    /// How long it must still stay away.
    pub(super) fn remaining(&self, hold: Duration, now: Timestamp) -> Duration {
        let Some(deleted_at) = self.deleted_at else { return Duration::ZERO };
        let gone_for = Duration::try_from(now.duration_since(deleted_at)).unwrap_or_default();
        hold.saturating_sub(gone_for)
    }
}

#[derive(Clone)]
pub(super) struct Record {
    api: Api<ConfigMap>,
    leadership: Leadership,
    name: String,
    data: Option<BTreeMap<String, String>>,
}

impl Record {
    pub(super) fn new(client: Client, leadership: Leadership, namespace: &str, name: &str) -> Self {
        Self { api: Api::namespaced(client, namespace), leadership, name: name.to_owned(), data: None }
    }

    /// To be read again before it is next used.
    pub(super) fn forget(&mut self) {
        self.data = None;
    }

    pub(super) async fn of(&mut self, kind: &str) -> Result<Memory, Error> {
        let data = match self.data.take() {
            Some(data) => data,
            None => call(self.api.get_opt(&self.name)).await?.and_then(|map| map.data).unwrap_or_default(),
        };
        let memory = Memory {
            registered: data.contains_key(&registered(kind)),
            deleted_at: data.get(&deleted_at(kind)).and_then(|at| at.parse().ok()),
        };
        self.data = Some(data);
        Ok(memory)
    }

    /// Writes only what changes.
    pub(super) async fn note(&mut self, kind: &str, memory: Memory, now: Timestamp) -> Result<(), Error> {
        if self.of(kind).await? == memory {
            return Ok(());
        }
        let mut data = self.data.take().unwrap_or_default();
        if memory.registered {
            data.entry(registered(kind)).or_insert_with(|| now.to_string());
        } else {
            data.remove(&registered(kind));
        }
        match memory.deleted_at {
            Some(at) => data.insert(deleted_at(kind), at.to_string()),
            None => data.remove(&deleted_at(kind)),
        };
        let map = ConfigMap {
            metadata: ObjectMeta { name: Some(self.name.clone()), labels: Some(labels()), ..ObjectMeta::default() },
            data: Some(data.clone()),
            ..ConfigMap::default()
        };
        let (api, name) = (self.api.clone(), self.name.clone());
        let parameters = PatchParams::apply(super::NAME).force();
        let patched = async move { api.patch(&name, &parameters, &Patch::Apply(&map)).await };
        write(&self.leadership, patched).await?;
        self.data = Some(data);
        Ok(())
    }
}

fn registered(kind: &str) -> String {
    format!("{kind}-registered-at")
}

fn deleted_at(kind: &str) -> String {
    format!("{kind}-deleted-at")
}
