//! Certificates the operator keeps itself, in one Secret that all replicas share.
//!
//! ```text
//! Secret ──watch──► every replica: serve its leaf, announce its bundle
//!    ▲                 │
//!    └── guarded patch ┴── the leader: decide (crates/core/certificates.rs), one step at a time
//! ```
//!
//! # Guarantees
//! - Whoever comes first creates the Secret; everyone else takes what is there.
//! - Only the leader changes it, under a permit of the lease, and only the version it has looked at.
//! - A deleted Secret comes back with the CA that callers trust, and a successor for it: deleting is how an admin asks
//!   for new certificates, and it costs no handshake.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use groundcrew_core::certificates::{Rules, Verdict, Why, decide};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::single::Watched;
use super::stored::{Contents, Data, View};
use super::{Clock, Published, Source, Trust};
use crate::admission::tls::ServingCert;
use crate::runtime::leadership::Leadership;

/// Deadline of one API call: the client itself has none.
const CALL: Duration = Duration::from_secs(5);
const RETRY_FROM: Duration = Duration::from_millis(200);
const RETRY_TO: Duration = Duration::from_secs(5);
/// Never look again sooner than this: dates are whole seconds, so nothing is missed.
const PAUSE: Duration = Duration::from_millis(50);
/// A rotation takes at most a rewrite, a promotion, a leaf and a drop; more is a mistake of ours.
const STEPS: usize = 8;

/// Which Secret, for whom, and for how long its certificates live.
#[derive(Debug, Clone)]
pub struct Settings {
    pub namespace: String,
    pub secret: String,
    /// The names callers verify: see [`crate::admission::registration::Target::names`].
    pub names: Vec<String>,
    pub rules: Rules,
    pub clock: Clock,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("no answer from the API server within {CALL:?}")]
    Timeout,
    #[error("this replica does not lead any more")]
    NotLeader,
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error("cannot make a certificate: {0}")]
    Mint(#[from] rcgen::Error),
    #[error("certificates still change after {STEPS} steps")]
    Unsettled,
}

/// What callers get at once, and the work that keeps it true until `shutdown`.
pub fn prepare(
    client: Client,
    settings: Settings,
    serving: Arc<ServingCert>,
    leadership: Leadership,
    published: watch::Receiver<Option<Published>>,
    shutdown: CancellationToken,
) -> (Source, impl Future<Output = ()> + Send) {
    let trust = watch::Sender::new(Trust::Unknown);
    let confirmed = watch::Sender::new(false);
    let source = Source { trust: trust.subscribe(), confirmed: confirmed.subscribe() };
    let keeper = Keeper {
        api: Api::namespaced(client, &settings.namespace),
        settings,
        serving,
        leader: leadership.watch(),
        leadership,
        published,
        trust,
        confirmed,
        current: Current::Unread,
        read_at: Instant::now(),
        remembered: None,
        served: None,
    };
    (source, async move { shutdown.run_until_cancelled(keeper.run()).await.unwrap_or(()) })
}

enum Current {
    /// To be read before anything is decided.
    Unread,
    Absent,
    There(Box<Secret>),
}

struct Keeper {
    api: Api<Secret>,
    settings: Settings,
    serving: Arc<ServingCert>,
    leadership: Leadership,
    leader: watch::Receiver<bool>,
    published: watch::Receiver<Option<Published>>,
    trust: watch::Sender<Trust>,
    confirmed: watch::Sender<bool>,
    current: Current,
    read_at: Instant,
    /// The last good contents, for the case that someone deletes the Secret.
    remembered: Option<Contents>,
    /// The contents whose leaf is served, to swap only what changed.
    served: Option<Contents>,
}

impl Keeper {
    async fn run(mut self) {
        let mut secrets = self.watch();
        let mut retry = RETRY_FROM;
        loop {
            let wait = match self.settle().await {
                Ok(until) => {
                    retry = RETRY_FROM;
                    until
                }
                Err(error) => {
                    warn!(%error, secret = %self.settings.secret, "cannot keep the webhook certificates, trying again");
                    self.current = Current::Unread;
                    retry = (retry * 2).min(RETRY_TO);
                    retry
                }
            };
            tokio::select! {
                event = secrets.next() => match event {
                    Some(Ok(Some(secret))) => self.current = Current::There(Box::new(secret)),
                    Some(Ok(None)) => self.current = Current::Absent,
                    // The stream backs off and goes on by itself.
                    Some(Err(_)) => {}
                    None => secrets = self.watch(),
                },
                Ok(()) = self.leader.changed() => {
                    self.confirmed.send_replace(false);
                    self.current = Current::Unread;
                }
                Ok(()) = self.published.changed() => {}
                () = sleep(wait) => {}
            }
            if self.read_at.elapsed() >= self.settings.rules.look_every() && self.watch_was_silent().await {
                secrets = self.watch();
            }
        }
    }

    /// Reads the Secret; the watch should have told us of any version that is not the one we know.
    async fn watch_was_silent(&mut self) -> bool {
        let before = self.version();
        // An error shows again where the Secret is needed.
        self.read().await.is_ok() && before.is_some_and(|before| Some(before) != self.version())
    }

    /// The version we know, `Some(None)` for an absent Secret.
    fn version(&self) -> Option<Option<String>> {
        match &self.current {
            Current::Unread => None,
            Current::Absent => Some(None),
            Current::There(secret) => Some(secret.resource_version()),
        }
    }

    fn watch(&self) -> Watched<Secret> {
        super::single::watch(self.api.clone(), &self.settings.secret)
    }

    /// Brings everything in line with the Secret, and as leader the Secret with the rules. Returns when to look again.
    async fn settle(&mut self) -> Result<Duration, Error> {
        for _ in 0..STEPS {
            let secret = match &self.current {
                Current::Unread => {
                    self.read().await?;
                    continue;
                }
                Current::Absent => {
                    self.create().await?;
                    continue;
                }
                Current::There(secret) => secret,
            };
            let empty = Data::new();
            let data = secret.data.as_ref().unwrap_or(&empty);
            let contents = Contents::from_data(data);
            let view = View::of(&contents);
            let now = (self.settings.clock)();
            let leading = *self.leader.borrow();
            let verdict = decide(
                &self.settings.rules,
                view.seen(&self.settings.names, published_for(&self.published, &contents)),
                now,
            );
            let patch = match verdict {
                Verdict::Keep { .. } => None,
                _ if !leading => None,
                _ => {
                    let to = contents.after(verdict, &self.settings.rules, &self.settings.names, now)?;
                    Some(to.patch(data, &secret.resource_version().unwrap_or_default()))
                }
            };
            self.adopt(contents, view, now);
            if leading {
                self.confirmed.send_replace(true);
            }
            match (patch, verdict) {
                (Some(patch), verdict) => self.write(verdict, patch).await?,
                (None, Verdict::Keep { until }) => return Ok(self.wait(now, until)),
                (None, _) => return Ok(self.settings.rules.look_every()),
            }
        }
        Err(Error::Unsettled)
    }

    /// Announces the bundle, then serves the leaf: in this order nobody sees a leaf before its CA.
    fn adopt(&mut self, contents: Contents, view: View, now: Timestamp) {
        if self.served.as_ref() == Some(&contents) {
            return;
        }
        if view.trustworthy() {
            self.trust.send_if_modified(|trust| {
                let bundle = Trust::Bundle(contents.bundle().as_bytes().into());
                let changed = *trust != bundle;
                *trust = bundle;
                changed
            });
            self.remembered = Some(contents.clone());
        }
        let same_leaf = self.served.as_ref().is_some_and(|served| served.leaf() == contents.leaf());
        if let Some(leaf) = view.leaf.filter(|_| !same_leaf) {
            // An expired leaf is better than none, and worse than any other.
            if self.serving.facts().is_none() || !leaf.facts().validity.expired(now) {
                info!(not_after = %leaf.facts().validity.not_after, names = ?leaf.facts().names, "serving certificate loaded");
                self.serving.swap(leaf);
            }
        }
        self.served = Some(contents);
    }

    fn wait(&self, now: Timestamp, until: Timestamp) -> Duration {
        let left = Duration::try_from(until.duration_since(now)).unwrap_or_default();
        left.clamp(PAUSE, self.settings.rules.look_every())
    }

    async fn read(&mut self) -> Result<(), Error> {
        let found = call(self.api.get_opt(&self.settings.secret)).await?;
        self.read_at = Instant::now();
        self.current = found.map_or(Current::Absent, |secret| Current::There(Box::new(secret)));
        Ok(())
    }

    /// Creates the Secret; if another replica was faster, its version counts.
    async fn create(&mut self) -> Result<(), Error> {
        let (rules, names, now) = (&self.settings.rules, &self.settings.names, (self.settings.clock)());
        let (from, verdict) = match &self.remembered {
            Some(remembered) if remembered.has_next() => (remembered.clone(), Verdict::RewriteBundle),
            Some(remembered) => (remembered.clone(), Verdict::PublishNextCa(Why::Unusable)),
            None => (Contents::default(), Verdict::MintAll(Why::Unusable)),
        };
        let secret = Secret {
            metadata: ObjectMeta {
                name: Some(self.settings.secret.clone()),
                labels: Some(crate::admission::registration::labels()),
                ..ObjectMeta::default()
            },
            data: Some(from.after(verdict, rules, names, now)?.to_data()),
            type_: Some("Opaque".to_owned()),
            ..Secret::default()
        };
        match call(self.api.create(&PostParams::default(), &secret)).await {
            Ok(created) => {
                info!(secret = %self.settings.secret, restored = self.remembered.is_some(), "created the webhook certificates");
                self.current = Current::There(Box::new(created));
                Ok(())
            }
            Err(Error::Api(kube::Error::Api(status))) if status.is_already_exists() => {
                self.current = Current::Unread;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    async fn write(&mut self, verdict: Verdict, patch: serde_json::Value) -> Result<(), Error> {
        let permit = self.leadership.permit(CALL).ok_or(Error::NotLeader)?;
        let (api, name) = (self.api.clone(), self.settings.secret.clone());
        let written = async move { api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await };
        match permit.see_through(written).await.map_err(|_| Error::Timeout)?.map_err(Error::from) {
            Ok(secret) => {
                match verdict {
                    Verdict::MintAll(why) => warn!(?why, "webhook certificates replaced at once, trust follows"),
                    verdict => info!(?verdict, "webhook certificates changed"),
                }
                self.current = Current::There(Box::new(secret));
                Ok(())
            }
            // Changed or deleted since we looked: look again.
            Err(Error::Api(kube::Error::Api(status))) if status.is_conflict() || status.is_not_found() => {
                self.current = Current::Unread;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}

fn published_for(published: &watch::Receiver<Option<Published>>, contents: &Contents) -> Option<Duration> {
    let published = published.borrow();
    let published = published.as_ref()?;
    (*published.bundle == *contents.bundle().as_bytes()).then(|| published.since.elapsed())
}

async fn call<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, Error> {
    Ok(timeout(CALL, request).await.map_err(|_| Error::Timeout)??)
}
