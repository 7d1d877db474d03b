//! Holds the API server to the desired webhook configurations.
//!
//! ```text
//! watch, resync ──► live ──┬─ same ────────────► nothing (and: the bundle is published since …)
//!                          ├─ differs ─────────► server-side apply
//!                          └─ gone ─┬─ was never there ─► apply
//!                                   └─ was there: an admin deleted it ─► leave it for `hold`
//! ```
//!
//! # Guarantees
//! - Only a leader writes, each time under a permit of the lease, and only once it serves and has read the bundle anew.
//! - Nothing is written while the API server has what we want.
//! - A deletion by someone else is respected by every later leader too; our own is never taken for one.

use std::time::Duration;

use futures::StreamExt;
use futures::stream::{BoxStream, select};
use kube::Client;
use kube::api::DynamicObject;
use kube::runtime::watcher;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::compare::concede_injected;
use super::object::{Live, Object, decode};
use super::record::Record;
use super::{Entry, Target, desired};
use crate::admission::certs::{Clock, Published, Source, Trust};
use crate::runtime::leadership::Leadership;

/// Deadline of one API call: the client itself has none.
const CALL: Duration = Duration::from_secs(5);
const RETRY_FROM: Duration = Duration::from_millis(200);
const RETRY_TO: Duration = Duration::from_secs(3);
/// The objects are read this often whatever the watch says: a watch can fall silent.
pub(super) const RESYNC: Duration = Duration::from_secs(30);

/// What to register, and where to remember it.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Features may change their part while the process runs.
    pub entries: watch::Receiver<Vec<Entry>>,
    pub target: Target,
    /// The operator's own namespace and the name of the ConfigMap in it that remembers deletions.
    pub namespace: String,
    pub record: String,
    /// How long a configuration that an admin deleted is left deleted.
    pub hold: Duration,
    pub clock: Clock,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no answer from the API server within {CALL:?}")]
    Timeout,
    #[error("this replica does not lead any more")]
    NotLeader,
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

/// Keeps both configurations until `shutdown`.
pub async fn keep(
    client: Client,
    settings: Settings,
    source: Source,
    leadership: Leadership,
    ready: watch::Receiver<bool>,
    published: watch::Sender<Option<Published>>,
    shutdown: CancellationToken,
) {
    let keeper = Keeper {
        objects: Object::both(&client, &leadership),
        leader: leadership.watch(),
        record: Record::new(client, leadership, &settings.namespace, &settings.record),
        settings,
        source,
        ready,
        published,
        resynced: Instant::now(),
    };
    shutdown.run_until_cancelled(keeper.run()).await.unwrap_or(());
}

/// Removes both configurations, once; for `--enable-webhook=false`.
pub async fn remove(
    client: Client,
    leadership: Leadership,
    namespace: &str,
    record: &str,
    clock: Clock,
) -> Result<(), Error> {
    let objects = Object::both(&client, &leadership);
    let mut record = Record::new(client, leadership, namespace, record);
    for mut object in objects {
        object.read().await?;
        object.remove(&mut record, clock()).await?;
    }
    Ok(())
}

struct Keeper {
    settings: Settings,
    objects: [Object; 2],
    record: Record,
    source: Source,
    leader: watch::Receiver<bool>,
    ready: watch::Receiver<bool>,
    published: watch::Sender<Option<Published>>,
    resynced: Instant,
}

type Events = BoxStream<'static, (usize, watcher::Result<Option<DynamicObject>>)>;

impl Keeper {
    async fn run(mut self) {
        let mut events = self.watch();
        let mut retry = RETRY_FROM;
        loop {
            let wait = match self.settle().await {
                Ok(wait) => {
                    retry = RETRY_FROM;
                    wait
                }
                Err(error) => {
                    warn!(%error, "cannot keep the webhook configuration, trying again");
                    self.objects.iter_mut().for_each(|object| object.live = Live::Unread);
                    retry = (retry * 2).min(RETRY_TO);
                    retry
                }
            };
            tokio::select! {
                Some((at, event)) = events.next() => {
                    if let (Ok(seen), Some(object)) = (event, self.objects.get_mut(at)) {
                        object.saw(seen);
                    }
                }
                Ok(()) = self.leader.changed() => {
                    self.record.forget();
                    self.objects.iter_mut().for_each(|object| object.live = Live::Unread);
                }
                Ok(()) = self.source.trust.changed() => {}
                Ok(()) = self.source.confirmed.changed() => {}
                Ok(()) = self.ready.changed() => {}
                Ok(()) = self.settings.entries.changed() => {}
                () = sleep(wait) => {}
            }
            if self.resynced.elapsed() >= RESYNC {
                events = self.resync(events).await;
            }
        }
    }

    /// Reads both objects, and starts the watch anew if it should have told us something.
    async fn resync(&mut self, events: Events) -> Events {
        self.resynced = Instant::now();
        if self.objects.iter().any(|object| matches!(object.live, Live::Absent)) {
            // An admin may have deleted the record, to have the configuration back at once.
            self.record.forget();
        }
        let mut silent = false;
        for object in &mut self.objects {
            let before = object.version();
            if object.read().await.is_ok() {
                silent |= before.is_some_and(|before| Some(before) != object.version());
            }
        }
        if silent { self.watch() } else { events }
    }

    fn watch(&self) -> Events {
        let [mutating, validating] = &self.objects;
        let one = mutating.watch().map(|event| (0, event));
        let two = validating.watch().map(|event| (1, event));
        select(one, two).boxed()
    }

    async fn settle(&mut self) -> Result<Duration, Error> {
        for object in &mut self.objects {
            if matches!(object.live, Live::Unread) {
                object.read().await?;
            }
        }
        let trust = self.source.trust.borrow().clone();
        let wanted = self.wanted(&trust)?;
        self.observe(&wanted);
        let writes = *self.leader.borrow() && *self.source.confirmed.borrow();
        if !writes || trust == Trust::Unknown || !*self.ready.borrow() {
            return Ok(RESYNC);
        }
        let mut wait = RESYNC;
        for (object, wanted) in self.objects.iter_mut().zip(&wanted) {
            let now = (self.settings.clock)();
            let next = match wanted {
                Some(wanted) => object.ensure(wanted, &mut self.record, self.settings.hold, now).await?,
                None => object.remove(&mut self.record, now).await?,
            };
            wait = wait.min(next);
        }
        self.observe(&wanted);
        Ok(wait)
    }

    fn wanted(&self, trust: &Trust) -> Result<[Option<Value>; 2], Error> {
        let desired = desired(&self.settings.entries.borrow(), &self.settings.target, trust);
        let mutating = desired.mutating.map(serde_json::to_value).transpose()?;
        let validating = desired.validating.map(serde_json::to_value).transpose()?;
        let mut wanted = [mutating, validating];
        if matches!(trust, Trust::Offered(_)) {
            for (object, wanted) in self.objects.iter().zip(wanted.iter_mut().flatten()) {
                if let Live::There(live) = &object.live {
                    concede_injected(wanted, &serde_json::to_value(live)?);
                }
            }
        }
        Ok(wanted)
    }

    /// Tells since when one bundle is in every entry we want.
    fn observe(&self, wanted: &[Option<Value>; 2]) {
        let wanted = self.objects.iter().zip(wanted).filter_map(|(object, wanted)| Some((object, wanted.as_ref()?)));
        let bundles: Option<Vec<String>> = wanted.map(|(object, wanted)| object.bundle(wanted)).collect();
        let bundle = bundles.filter(|bundles| bundles.windows(2).all(|pair| pair.first() == pair.last()));
        let bundle = bundle.and_then(|bundles| bundles.into_iter().next()).and_then(|bundle| decode(&bundle));
        self.published.send_if_modified(|published| {
            let same = published.as_ref().map(|published| &*published.bundle) == bundle.as_deref();
            if !same {
                *published = bundle.map(|bundle| Published { bundle: bundle.into(), since: Instant::now() });
            }
            !same
        });
    }
}

/// One write, while we lead; see [`Leadership::permit`].
pub(super) async fn write<T, F>(leadership: &Leadership, request: F) -> Result<T, Error>
where
    T: Send + 'static,
    F: Future<Output = Result<T, kube::Error>> + Send + 'static,
{
    let permit = leadership.permit(CALL).ok_or(Error::NotLeader)?;
    Ok(permit.see_through(request).await.map_err(|_| Error::Timeout)??)
}

pub(super) async fn call<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, Error> {
    Ok(timeout(CALL, request).await.map_err(|_| Error::Timeout)??)
}
