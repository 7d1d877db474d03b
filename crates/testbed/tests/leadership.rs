//! The lease and the caches on a real API server that restarts, hangs and is cut off.
#![expect(clippy::unwrap_used, reason = "a test ends where its assumption fails")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use groundcrew::runtime::cache::{self, Cache, Feed};
use groundcrew::runtime::client::{self, Clients};
use groundcrew::runtime::leadership::{DEADLINE, Leadership};
use groundcrew::runtime::lease::{Elector, LeaseSettings, vacant};
use groundcrew_testbed::{Cluster, Layer, Proxy, TestNamespace};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::DeserializeGuard;
use serde_json::json;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

const S: Duration = Duration::from_secs(1);
/// At once, on a machine that may stand still for a while: well before a lease of 15 s ends.
const AT_ONCE: Duration = Duration::from_secs(10);
const LEASE: &str = "groundcrew";
/// Short, so that a test sees a silent watch end.
const WATCH: Duration = Duration::from_secs(5);

async fn clients(kubeconfig: &Path) -> Clients {
    Clients::new(&client::load(Some(kubeconfig)).await.unwrap(), WATCH).unwrap()
}

struct Candidate {
    leadership: Leadership,
    shutdown: CancellationToken,
    task: JoinHandle<()>,
}

impl Candidate {
    async fn start(kubeconfig: &Path, namespace: &TestNamespace, name: &str) -> Self {
        let settings = LeaseSettings::new(namespace.name(), LEASE, name);
        let (elector, leadership) = Elector::new(clients(kubeconfig).await.lease, settings);
        let shutdown = CancellationToken::new();
        Self { leadership, task: tokio::spawn(elector.run(shutdown.clone())), shutdown }
    }

    /// How long it took to lead.
    async fn leads_within(&self, limit: Duration) -> Duration {
        let began = Instant::now();
        let mut watch = self.leadership.watch();
        timeout(limit, watch.wait_for(|leads| *leads)).await.unwrap().unwrap();
        began.elapsed()
    }
}

/// Looks all the time and fails if two lead at once.
fn never_both(a: &Candidate, b: &Candidate) -> JoinHandle<()> {
    let (a, b) = (a.leadership.clone(), b.leadership.clone());
    tokio::spawn(async move {
        loop {
            let both = a.is_leader() && b.is_leader();
            // Asked again: time may pass between two looks, and the first may have stopped in it.
            assert!(!(both && a.is_leader()), "two leaders");
            sleep(Duration::from_millis(5)).await;
        }
    })
}

async fn vacant_lease(cluster: &Cluster) -> TestNamespace {
    let namespace = cluster.namespace("lease").await.unwrap();
    let mut lease = vacant(namespace.name(), LEASE);
    lease.annotations_mut().insert("state".into(), "kept".into());
    namespace.api::<Lease>().create(&PostParams::default(), &lease).await.unwrap();
    namespace
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_leaves_is_followed_at_once_and_one_that_dies_after_its_lease() {
    let cluster = Cluster::start(Layer::Api).await.unwrap();
    let namespace = vacant_lease(&cluster).await;
    let a = Candidate::start(cluster.kubeconfig(), &namespace, "a").await;
    a.leads_within(AT_ONCE).await;
    let b = Candidate::start(cluster.kubeconfig(), &namespace, "b").await;
    sleep(3 * S).await;
    let watch = never_both(&a, &b);
    let began = Instant::now();
    a.shutdown.cancel();
    b.leads_within(AT_ONCE).await;
    eprintln!("graceful takeover after {:?}", began.elapsed());
    timeout(AT_ONCE, a.task).await.unwrap().unwrap();
    assert!(!watch.is_finished());
    watch.abort();

    let lease = namespace.api::<Lease>().get(LEASE).await.unwrap();
    assert_eq!(lease.annotations().get("state").map(String::as_str), Some("kept"));
    let spec = lease.spec.unwrap();
    assert_eq!((spec.holder_identity.as_deref(), spec.lease_transitions), (Some("b"), Some(1)));
    assert_eq!(spec.lease_duration_seconds, Some(15));

    let c = Candidate::start(cluster.kubeconfig(), &namespace, "c").await;
    sleep(3 * S).await;
    b.task.abort();
    let died = namespace.api::<Lease>().get(LEASE).await.unwrap().spec.unwrap();
    let took = c.leads_within(40 * S).await;
    eprintln!("takeover after a crash: {took:?}");
    let lease = namespace.api::<Lease>().get(LEASE).await.unwrap().spec.unwrap();
    assert_eq!((died.holder_identity.as_deref(), lease.holder_identity.as_deref()), (Some("b"), Some("c")));
    // By the record, for b may have been late with its last renewal.
    let waited = lease.acquire_time.unwrap().0.duration_since(died.renew_time.unwrap().0);
    assert!(waited.as_millis() >= 14_900, "{waited:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_is_cut_off_has_stopped_before_another_begins() {
    let cluster = Cluster::start(Layer::Api).await.unwrap();
    let namespace = vacant_lease(&cluster).await;
    let proxy = Proxy::to(cluster.api_addr()).await.unwrap();
    let a = Candidate::start(&proxy.kubeconfig(&cluster).unwrap(), &namespace, "a").await;
    a.leads_within(AT_ONCE).await;
    let b = Candidate::start(cluster.kubeconfig(), &namespace, "b").await;
    let watch = never_both(&a, &b);
    sleep(3 * S).await;
    proxy.freeze();
    let began = Instant::now();
    let mut leads = a.leadership.watch();
    timeout(15 * S, leads.wait_for(|leads| !*leads)).await.unwrap().unwrap();
    let stopped = began.elapsed();
    assert!(a.leadership.permit(DEADLINE).is_none());
    b.leads_within(30 * S).await;
    eprintln!("stopped after {stopped:?}, followed after {:?}", began.elapsed());
    proxy.thaw();
    sleep(5 * S).await;
    assert!(b.leadership.is_leader() && !a.leadership.is_leader());
    assert!(!watch.is_finished());
    watch.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn one_leads_again_after_the_api_server_was_away() {
    let cluster = Cluster::start(Layer::Api).await.unwrap();
    let namespace = vacant_lease(&cluster).await;
    let a = Candidate::start(cluster.kubeconfig(), &namespace, "a").await;
    a.leads_within(AT_ONCE).await;
    let b = Candidate::start(cluster.kubeconfig(), &namespace, "b").await;
    let watch = never_both(&a, &b);
    sleep(2 * S).await;
    cluster.stop_apiserver().await.unwrap();
    sleep(12 * S).await;
    assert!(!a.leadership.is_leader() && !b.leadership.is_leader());
    cluster.start_apiserver().await.unwrap();
    let began = Instant::now();
    while !(a.leadership.is_leader() || b.leadership.is_leader()) {
        assert!(began.elapsed() < 30 * S, "nobody leads");
        sleep(Duration::from_millis(10)).await;
    }
    eprintln!("a leader {:?} after the server was back", began.elapsed());
    assert!(!watch.is_finished());
    watch.abort();
}

/// Name and content of every object, on the server and in the cache.
type Contents = BTreeMap<String, String>;

fn content(map: &ConfigMap) -> String {
    map.data.as_ref().and_then(|data| data.get("v").cloned()).unwrap_or_default()
}

/// A cache behind a line that can fail.
struct Followed {
    cache: Arc<Cache<String>>,
    truth: Api<ConfigMap>,
    task: JoinHandle<()>,
}

impl Followed {
    async fn start(cluster: &Cluster, proxy: &Proxy, namespace: &TestNamespace) -> Self {
        let watch = clients(&proxy.kubeconfig(cluster).unwrap()).await.watch;
        let api: Api<DeserializeGuard<ConfigMap>> = Api::namespaced(watch, namespace.name());
        let cache = Cache::new("maps");
        let feed = Feed { watch_timeout: Some(WATCH), ..Feed::default() };
        let task = tokio::spawn(cache::fill(Arc::clone(&cache), api, feed, |map: ConfigMap| Some(content(&map))));
        Self { cache, truth: namespace.api(), task }
    }

    /// Creates, changes and deletes, so that every kind of event can be missed.
    async fn stir(&self, round: u32) {
        let name = |n: u32| format!("map-{n}");
        let map: ConfigMap = serde_json::from_value(json!({"metadata": {"name": name(round)}})).unwrap();
        self.truth.create(&PostParams::default(), &map).await.unwrap();
        if round >= 1 {
            let patch = Patch::Merge(json!({"data": {"v": round.to_string()}}));
            self.truth.patch(&name(round - 1), &PatchParams::default(), &patch).await.unwrap();
        }
        if round >= 2 {
            self.truth.delete(&name(round - 2), &DeleteParams::default()).await.unwrap();
        }
    }

    async fn stir_all(&self, rounds: std::ops::Range<u32>) {
        for round in rounds {
            self.stir(round).await;
        }
    }

    /// How long it took until the cache was what the server has.
    async fn equal_within(&self, limit: Duration) -> Duration {
        let began = Instant::now();
        let list = self.truth.list(&ListParams::default()).await.unwrap();
        let truth: Contents = list.iter().map(|map| (map.name_any(), content(map))).collect();
        loop {
            let mut seen = Contents::new();
            self.cache.for_each(|key, value| {
                seen.insert(key.name.clone(), value.as_ref().clone());
            });
            if seen == truth {
                return began.elapsed();
            }
            assert!(began.elapsed() < limit, "cache: {seen:?}\nserver: {truth:?}");
            sleep(Duration::from_millis(5)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cache_is_what_the_server_has_after_every_kind_of_interruption() {
    let cluster = Cluster::start(Layer::Api).await.unwrap();
    let namespace = cluster.namespace("cache").await.unwrap();
    let proxy = Proxy::to(cluster.api_addr()).await.unwrap();
    let followed = Followed::start(&cluster, &proxy, &namespace).await;
    followed.stir_all(0..4).await;
    eprintln!("undisturbed: {:?}", followed.equal_within(30 * S).await);

    proxy.cut();
    followed.stir_all(4..8).await;
    eprintln!("after a cut: {:?}", followed.equal_within(30 * S).await);

    // Longer than a silent watch is waited for.
    proxy.freeze();
    followed.stir_all(8..12).await;
    sleep(WATCH * 5).await;
    proxy.thaw();
    followed.stir_all(12..14).await;
    eprintln!("after a frozen line: {:?}", followed.equal_within(30 * S).await);

    // A line that hangs and then breaks.
    proxy.freeze();
    followed.stir_all(14..16).await;
    proxy.cut();
    proxy.thaw();
    eprintln!("after lost connections: {:?}", followed.equal_within(30 * S).await);

    cluster.stop_apiserver().await.unwrap();
    sleep(5 * S).await;
    cluster.start_apiserver().await.unwrap();
    followed.stir_all(16..20).await;
    eprintln!("after a restart of the server: {:?}", followed.equal_within(30 * S).await);
    assert!(!followed.task.is_finished());
}
