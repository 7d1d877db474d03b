//! What the cluster looks like, as small as decisions need it.
//!
//! ```text
//! watch ──► decode only what is asked for ──► project ──► Cache<P> ──keys──► subscribers
//! ```
//!
//! # Guarantees
//! - A relist replaces everything at once: readers see the old state or the new, and subscribers get the key of every
//!   object that is there and of every one that is gone.
//! - A subscriber that is slow holds nobody up and loses no key; keys are delivered once however often they change.
//! - One object that cannot be decoded is left out with one log line; the watch goes on.
//! - A stream that stays broken is rebuilt from a new list. The server ends each watch after [`Feed::watch_timeout`] and
//!   the client's own read timeout is a little longer, so a connection nobody answers on ends in an error, too.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::fmt::{self, Debug};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use futures::StreamExt;
use kube::core::DeserializeGuard;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep};
use tracing::{debug, info, warn};

/// Where an object is; cluster-scoped ones have an empty namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    pub namespace: String,
    pub name: String,
}

impl Key {
    fn of(object: &impl Resource) -> Self {
        Self { namespace: object.namespace().unwrap_or_default(), name: object.name_any() }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() { f.write_str(&self.name) } else { write!(f, "{}/{}", self.namespace, self.name) }
    }
}

/// The projections of one kind.
#[derive(Debug)]
pub struct Cache<P> {
    what: &'static str,
    objects: RwLock<BTreeMap<Key, Arc<P>>>,
    subscribers: Mutex<Vec<Arc<Changes>>>,
    synced: watch::Sender<bool>,
}

impl<P> Cache<P> {
    #[must_use]
    pub fn new(what: &'static str) -> Arc<Self> {
        Arc::new(Self {
            what,
            objects: RwLock::default(),
            subscribers: Mutex::default(),
            synced: watch::Sender::new(false),
        })
    }

    /// One that is filled already, for tests and replays.
    #[must_use]
    pub fn of(what: &'static str, objects: impl IntoIterator<Item = (Key, P)>) -> Arc<Self> {
        let cache = Self::new(what);
        cache.replace(objects.into_iter().map(|(key, object)| (key, Arc::new(object))).collect());
        cache
    }

    #[must_use]
    pub fn what(&self) -> &'static str {
        self.what
    }

    #[must_use]
    pub fn get(&self, key: &Key) -> Option<Arc<P>> {
        self.objects.read().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    /// Looks at every object without copying; `see` must be quick.
    pub fn for_each(&self, mut see: impl FnMut(&Key, &Arc<P>)) {
        let objects = self.objects.read().unwrap_or_else(PoisonError::into_inner);
        objects.iter().for_each(|(key, object)| see(key, object));
    }

    /// The same for one namespace.
    pub fn for_each_in(&self, namespace: &str, mut see: impl FnMut(&Key, &Arc<P>)) {
        let objects = self.objects.read().unwrap_or_else(PoisonError::into_inner);
        let first = Key { namespace: namespace.to_owned(), name: String::new() };
        let there = objects.range(first..).take_while(|(key, _)| key.namespace == namespace);
        there.for_each(|(key, object)| see(key, object));
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.objects.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True once the first list has been answered.
    #[must_use]
    pub fn synced(&self) -> watch::Receiver<bool> {
        self.synced.subscribe()
    }

    /// The keys that change from now on, and those that are there already.
    #[must_use]
    pub fn subscribe(&self) -> Arc<Changes> {
        let changes = Arc::new(Changes::default());
        self.subscribers.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&changes));
        self.for_each(|key, _| changes.mark(key.clone()));
        changes
    }

    fn announce(&self, key: &Key) {
        for changes in self.subscribers.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            changes.mark(key.clone());
        }
    }

    /// Stores or, with `None`, forgets one object.
    fn put(&self, key: &Key, object: Option<P>) {
        let known = {
            let mut objects = self.objects.write().unwrap_or_else(PoisonError::into_inner);
            match object {
                Some(object) => {
                    objects.insert(key.clone(), Arc::new(object));
                    true
                }
                None => objects.remove(key).is_some(),
            }
        };
        // What was of no interest and still is none is nobody's business.
        if known {
            self.announce(key);
        }
    }

    fn replace(&self, fresh: BTreeMap<Key, Arc<P>>) {
        let count = fresh.len();
        let keys: BTreeSet<Key> = {
            let mut objects = self.objects.write().unwrap_or_else(PoisonError::into_inner);
            let before = std::mem::replace(&mut *objects, fresh);
            before.into_keys().chain(objects.keys().cloned()).collect()
        };
        keys.iter().for_each(|key| self.announce(key));
        if !self.synced.send_replace(true) {
            info!(cache = self.what, objects = count, "cache filled");
        }
    }
}

/// Keys that changed since they were last taken.
#[derive(Debug, Default)]
pub struct Changes {
    keys: Mutex<(HashSet<Key>, VecDeque<Key>)>,
    some: Notify,
}

impl Changes {
    /// Also used to put a key back.
    pub fn mark(&self, key: Key) {
        let (known, order) = &mut *self.lock();
        if known.insert(key.clone()) {
            order.push_back(key);
            self.some.notify_one();
        }
    }

    /// The key that has waited longest. Cancelling the wait loses nothing.
    pub async fn next(&self) -> Key {
        loop {
            if let Some(key) = self.take() {
                return key;
            }
            self.some.notified().await;
        }
    }

    /// Forgets keys that nobody needs to be told of any more.
    pub fn retain(&self, needed: impl Fn(&Key) -> bool) {
        let (known, order) = &mut *self.lock();
        order.retain(|key| needed(key) || !known.remove(key));
        known.shrink_to(order.len());
        order.shrink_to(order.len());
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.lock().1.len()
    }

    fn take(&self) -> Option<Key> {
        let (known, order) = &mut *self.lock();
        let key = order.pop_front()?;
        known.remove(&key);
        Some(key)
    }

    fn lock(&self) -> MutexGuard<'_, (HashSet<Key>, VecDeque<Key>)> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What one cache is filled from.
#[derive(Clone, Debug, Default)]
pub struct Feed {
    pub labels: Option<String>,
    pub fields: Option<String>,
    /// After this the server ends a watch and we ask again; absent means the API server's own five minutes.
    pub watch_timeout: Option<Duration>,
}

const FIRST_RETRY: Duration = Duration::from_millis(200);
const LAST_RETRY: Duration = Duration::from_secs(15);
/// Objects per page where the server cannot stream a list.
const PAGE: u32 = 500;
/// Failures in a row after which a stream is given up for a new list: whatever it waits for does not come.
const FAILURES: u32 = 5;
/// After this long without a failure the next one is a first one.
const CALM: Duration = Duration::from_secs(60);
/// Objects that cannot be read and are named in the log.
const COMPLAINTS: usize = 1000;

impl Feed {
    fn config(&self, streaming: bool) -> watcher::Config {
        let mut config = watcher::Config::default();
        if let Some(labels) = &self.labels {
            config = config.labels(labels);
        }
        if let Some(fields) = &self.fields {
            config = config.fields(fields);
        }
        if let Some(timeout) = self.watch_timeout {
            config = config.timeout(u32::try_from(timeout.as_secs()).unwrap_or(u32::MAX));
        }
        if streaming { config.streaming_lists() } else { config.page_size(PAGE) }
    }
}

/// Keeps the cache like the server, for ever. `project` returns `None` for what is of no interest.
pub async fn fill<K, P>(
    cache: Arc<Cache<P>>,
    api: Api<DeserializeGuard<K>>,
    feed: Feed,
    project: impl Fn(K) -> Option<P>,
) where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let mut intake = Intake { cache: &cache, project, fresh: None, unreadable: BTreeSet::new() };
    let mut streaming = true;
    let mut failures = Failures::default();
    loop {
        let mut events = pin!(watcher(api.clone(), feed.config(streaming)));
        intake.fresh = None;
        while let Some(event) = events.next().await {
            let error = match event {
                Ok(event) => {
                    // The watcher says `Init` before it has asked for anything.
                    if !matches!(event, Event::Init | Event::InitApply(_)) {
                        failures = Failures::default();
                    }
                    intake.take(event);
                    continue;
                }
                Err(error) => error,
            };
            sleep(failures.next_pause()).await;
            if must_rebuild(&error) || failures.in_a_row >= FAILURES {
                streaming = streaming && !is_refusal(&error);
                warn!(cache = cache.what, %error, "watch starts over from a new list");
                break;
            }
            debug!(cache = cache.what, %error, "watch interrupted");
        }
    }
}

/// The watcher lists anew when a running watch reports 410, but not when the request for one is answered so.
fn must_rebuild(error: &watcher::Error) -> bool {
    is_refusal(error) || refused_with(error) == Some(410) || matches!(error, watcher::Error::NoResourceVersion)
}

/// A server that cannot stream a list calls the request invalid; pages work on all of them.
fn is_refusal(error: &watcher::Error) -> bool {
    matches!(refused_with(error), Some(400 | 422))
}

fn refused_with(error: &watcher::Error) -> Option<u16> {
    match error {
        watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::InitialListFailed(kube::Error::Api(status)) => Some(status.code),
        _ => None,
    }
}

/// How often it has gone wrong of late.
#[derive(Debug, Default)]
struct Failures {
    in_a_row: u32,
    last: Option<Instant>,
}

impl Failures {
    fn next_pause(&mut self) -> Duration {
        // A kind that never changes gives no sign of recovery but the absence of failures.
        if self.last.is_some_and(|last| last.elapsed() > CALM) {
            self.in_a_row = 0;
        }
        self.last = Some(Instant::now());
        self.in_a_row = self.in_a_row.saturating_add(1);
        let grown = FIRST_RETRY.saturating_mul(2_u32.saturating_pow((self.in_a_row - 1).min(16)));
        grown.min(LAST_RETRY).mul_f64(0.5 + fastrand::f64())
    }
}

/// Where events of the watch become objects of the cache.
struct Intake<'a, P, F> {
    cache: &'a Cache<P>,
    project: F,
    /// The list that is being received.
    fresh: Option<BTreeMap<Key, Arc<P>>>,
    /// Complained about already.
    unreadable: BTreeSet<Key>,
}

impl<P, F> Intake<'_, P, F> {
    fn take<K>(&mut self, event: Event<DeserializeGuard<K>>)
    where
        K: Resource<DynamicType = ()>,
        F: Fn(K) -> Option<P>,
    {
        match event {
            Event::Init => self.fresh = Some(BTreeMap::new()),
            Event::InitApply(guard) => {
                let (key, object) = self.read(guard);
                if let (Some(object), Some(fresh)) = (object, self.fresh.as_mut()) {
                    fresh.insert(key, Arc::new(object));
                }
            }
            Event::InitDone => {
                if let Some(fresh) = self.fresh.take() {
                    self.cache.replace(fresh);
                }
            }
            Event::Apply(guard) => {
                let (key, object) = self.read(guard);
                self.cache.put(&key, object);
            }
            Event::Delete(guard) => self.cache.put(&Key::of(&guard), None),
        }
    }

    /// What cannot be read is of no interest, in a list as in an event, so that both lead to the same state.
    fn read<K>(&mut self, guard: DeserializeGuard<K>) -> (Key, Option<P>)
    where
        K: Resource<DynamicType = ()>,
        F: Fn(K) -> Option<P>,
    {
        let key = Key::of(&guard);
        let object = match guard.0 {
            Ok(object) => (self.project)(object),
            Err(error) => {
                if self.unreadable.len() < COMPLAINTS && self.unreadable.insert(key.clone()) {
                    warn!(cache = self.cache.what, %key, %error, "object cannot be read");
                }
                None
            }
        };
        (key, object)
    }
}

#[cfg(test)]
mod tests;
