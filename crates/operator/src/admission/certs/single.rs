//! Watches one named object.

use std::fmt::Debug;
use std::time::Duration;

use backon::ExponentialBuilder;
use futures::StreamExt;
use futures::future::ready;
use futures::stream::BoxStream;
use kube::runtime::watcher::{Config, Event, ExponentialBackoff, Result};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;

/// The server ends each watch after this. Less than the read timeout of any client of ours: an object that never
/// changes would otherwise look like a dead connection.
const WATCH_SECONDS: u32 = 25;
/// A wrong bundle is to be right again within five seconds, also just after the API server was away.
const RETRY: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(2));

pub(in crate::admission) type Watched<K> = BoxStream<'static, Result<Option<K>>>;

/// Each state of the object, `None` while it does not exist. Goes on after errors by itself.
pub(in crate::admission) fn watch<K>(api: Api<K>, name: &str) -> Watched<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let config = Config::default().fields(&format!("metadata.name={name}")).timeout(WATCH_SECONDS);
    let retry = ExponentialBuilder::new().with_min_delay(RETRY.0).with_max_delay(RETRY.1).without_max_times();
    let mut listed = false;
    let tell = move |event| {
        ready(match event {
            Ok(Event::Init) => {
                listed = false;
                None
            }
            Ok(Event::InitApply(object)) => {
                listed = true;
                Some(Ok(Some(object)))
            }
            Ok(Event::InitDone) => (!listed).then_some(Ok(None)),
            Ok(Event::Apply(object)) => Some(Ok(Some(object))),
            Ok(Event::Delete(_)) => Some(Ok(None)),
            Err(error) => Some(Err(error)),
        })
    };
    watcher(api, config).backoff(ExponentialBackoff::from(retry.with_jitter())).filter_map(tell).boxed()
}
