//! One webhook configuration in the API server: read, compared, applied, removed.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration};
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, Patch, PatchParams};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use tokio::time::Instant;
use tracing::{info, warn};

use super::compare::difference;
use super::keep::{Error, RESYNC, call, write};
use super::record::{Memory, Record};
use super::{DOMAIN, NAME};
use crate::admission::certs::single::{self, Watched};
use crate::runtime::leadership::Leadership;

/// Between two corrections of one object: someone who keeps changing it must not make us write without end.
const PACE: Duration = Duration::from_millis(500);

/// One of the two configurations.
pub(super) struct Object {
    kind: &'static str,
    api: Api<DynamicObject>,
    leadership: Leadership,
    pub(super) live: Live,
    applied: Option<Instant>,
    /// The version at which an apply did not bring what we wanted: repeating it would not either.
    stuck: Option<String>,
}

#[derive(Clone)]
pub(super) enum Live {
    Unread,
    Absent,
    There(Box<DynamicObject>),
}

impl Object {
    pub(super) fn both(client: &Client, leadership: &Leadership) -> [Self; 2] {
        let object = |kind, resource: &ApiResource| Self {
            kind,
            api: Api::all_with(client.clone(), resource),
            leadership: leadership.clone(),
            live: Live::Unread,
            applied: None,
            stuck: None,
        };
        [
            object("mutating", &ApiResource::erase::<MutatingWebhookConfiguration>(&())),
            object("validating", &ApiResource::erase::<ValidatingWebhookConfiguration>(&())),
        ]
    }

    pub(super) fn watch(&self) -> Watched<DynamicObject> {
        single::watch(self.api.clone(), NAME)
    }

    /// Takes in a watch event. It may be older than our own last answer, so a deletion is checked before it is believed.
    pub(super) fn saw(&mut self, seen: Option<DynamicObject>) {
        match (&self.live, seen) {
            (Live::Absent, None) => {}
            (_, None) => self.live = Live::Unread,
            (Live::There(live), Some(seen)) if older(&seen, live) => {}
            (_, Some(seen)) => self.live = Live::There(Box::new(seen)),
        }
    }

    pub(super) async fn read(&mut self) -> Result<(), Error> {
        self.live = call(self.api.get_opt(NAME)).await?.map_or(Live::Absent, |live| Live::There(Box::new(live)));
        Ok(())
    }

    /// The version last seen, `Some(None)` for an absent object.
    pub(super) fn version(&self) -> Option<Option<String>> {
        match &self.live {
            Live::Unread => None,
            Live::Absent => Some(None),
            Live::There(live) => Some(live.resource_version()),
        }
    }

    /// The one `caBundle` that all entries of `wanted` have in the API server.
    pub(super) fn bundle(&self, wanted: &Value) -> Option<String> {
        let Live::There(live) = &self.live else { return None };
        let live = live.data.get("webhooks")?.as_array()?;
        let bundle_of = |entry: &Value| {
            let live = live.iter().find(|live| live.get("name") == entry.get("name"))?;
            Some(live.pointer("/clientConfig/caBundle")?.as_str()?.to_owned())
        };
        let bundles: Option<Vec<String>> = wanted.get("webhooks")?.as_array()?.iter().map(bundle_of).collect();
        let mut bundles = bundles?;
        let bundle = bundles.pop()?;
        bundles.iter().all(|other| *other == bundle).then_some(bundle)
    }

    /// Makes the object what we want, or leaves it deleted. Returns when to look again.
    pub(super) async fn ensure(
        &mut self,
        wanted: &Value,
        record: &mut Record,
        hold: Duration,
        now: Timestamp,
    ) -> Result<Duration, Error> {
        let differs = match &self.live {
            Live::There(live) => {
                let differs = difference(&serde_json::to_value(live)?, wanted, NAME);
                differs.or_else(|| stale(live, wanted).first().map(|(_, name)| name.clone()))
            }
            Live::Unread => return Ok(Duration::ZERO),
            Live::Absent => {
                let left = self.left_deleted(record, hold, now).await?;
                if !left.is_zero() {
                    return Ok(left.min(RESYNC));
                }
                Some("absent".to_owned())
            }
        };
        if let Some(differs) = differs {
            let wait = self.applied.map_or(Duration::ZERO, |applied| PACE.saturating_sub(applied.elapsed()));
            if !wait.is_zero() {
                return Ok(wait);
            }
            if self.stuck.is_some() && self.stuck == self.version().flatten() {
                return Ok(RESYNC);
            }
            self.apply(wanted, &differs).await?;
        }
        record.note(self.kind, Memory { registered: true, deleted_at: None }, now).await?;
        Ok(RESYNC)
    }

    /// How long an object that is not there stays so because someone deleted it.
    async fn left_deleted(&self, record: &mut Record, hold: Duration, now: Timestamp) -> Result<Duration, Error> {
        let mut memory = record.of(self.kind).await?;
        if !memory.registered {
            return Ok(Duration::ZERO);
        }
        // A date in the future is another clock's: counted from now.
        if memory.deleted_at.is_none_or(|deleted_at| deleted_at > now) {
            memory.deleted_at = Some(now);
            record.note(self.kind, memory, now).await?;
            warn!(
                configuration = self.kind,
                name = NAME,
                until = %now.checked_add(hold).unwrap_or(now),
                "someone deleted the webhook configuration; leaving it deleted until the time given, \
                 or until the ConfigMap that remembers the deletion is deleted too"
            );
        }
        Ok(memory.remaining(hold, now))
    }

    async fn apply(&mut self, wanted: &Value, differs: &str) -> Result<(), Error> {
        let parameters = PatchParams::apply(NAME).force();
        let mut live = self.patch(parameters, Patch::Apply(wanted.clone())).await?;
        self.applied = Some(Instant::now());
        info!(configuration = self.kind, differs, "webhook configuration applied");
        let stale = stale(&live, wanted);
        if !stale.is_empty() {
            let patch = Patch::Json(serde_json::from_value(removal(&live, &stale))?);
            live = self.patch(PatchParams::default(), patch).await?;
        }
        let left = difference(&serde_json::to_value(&live)?, wanted, NAME);
        self.stuck = left.and_then(|left| {
            warn!(configuration = self.kind, left, "the API server did not take all of the webhook configuration");
            live.resource_version()
        });
        self.live = Live::There(Box::new(live));
        Ok(())
    }

    async fn patch(&self, parameters: PatchParams, patch: Patch<Value>) -> Result<DynamicObject, Error> {
        let api = self.api.clone();
        write(&self.leadership, async move { api.patch(NAME, &parameters, &patch).await }).await
    }

    /// Deletes the object if it is there. The record is cleared first: our own deletion is no admin's.
    pub(super) async fn remove(&mut self, record: &mut Record, now: Timestamp) -> Result<Duration, Error> {
        if record.of(self.kind).await? != Memory::default() {
            record.note(self.kind, Memory::default(), now).await?;
        }
        if matches!(self.live, Live::There(_)) {
            let api = self.api.clone();
            match write(&self.leadership, async move { api.delete(NAME, &DeleteParams::default()).await }).await {
                Ok(_) => info!(configuration = self.kind, "webhook configuration removed"),
                Err(Error::Api(kube::Error::Api(status))) if status.is_not_found() => {}
                Err(error) => return Err(error),
            }
            self.live = Live::Absent;
        }
        Ok(RESYNC)
    }
}

/// Entries with our domain that we do not want, whoever put them there: with their place in the list.
fn stale(live: &DynamicObject, wanted: &Value) -> Vec<(usize, String)> {
    let names = |list: Option<&Value>| -> Vec<String> {
        let names = list.and_then(Value::as_array).into_iter().flatten();
        names.map(|entry| entry.get("name").and_then(Value::as_str).unwrap_or_default().to_owned()).collect()
    };
    let wanted = names(wanted.get("webhooks"));
    let live = names(live.data.get("webhooks")).into_iter().enumerate();
    live.filter(|(_, name)| name.ends_with(DOMAIN) && !wanted.contains(name)).collect()
}

/// A JSON Patch that removes entries by place, last first, and fails if the object has changed since.
fn removal(live: &DynamicObject, stale: &[(usize, String)]) -> Value {
    let guard = json!({ "op": "test", "path": "/metadata/resourceVersion", "value": live.resource_version() });
    let removals = stale.iter().rev().map(|(at, _)| json!({ "op": "remove", "path": format!("/webhooks/{at}") }));
    std::iter::once(guard).chain(removals).collect()
}

/// Whether a watch event tells of an earlier version of the same object.
fn older(seen: &DynamicObject, live: &DynamicObject) -> bool {
    let version = |object: &DynamicObject| object.resource_version().and_then(|version| version.parse::<u64>().ok());
    seen.uid() == live.uid() && version(seen) < version(live)
}

/// `caBundle` as it appears in JSON.
pub(super) fn decode(base64: &str) -> Option<Vec<u8>> {
    let bytes: Result<k8s_openapi::ByteString, _> = serde_json::from_value(Value::from(base64));
    bytes.ok().map(|bytes| bytes.0)
}
