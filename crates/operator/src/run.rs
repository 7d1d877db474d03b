//! One process from its arguments to its last write.
//!
//! ```text
//! start: telemetry ─► clients ─► health ─► webhook socket ─► features ─► lease ─► metrics
//! stop:  not ready ─► controllers end, lease given back ─► grace ─► requests in flight answered ─► out
//! ```

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use groundcrew_core::config::{CertificateSource, Config, everywhere};
use groundcrew_core::feature::Feature;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Api, PostParams};
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use crate::admission::certs::{self, Source};
use crate::admission::registration::Entry;
use crate::admission::tls::ServingCert;
use crate::admission::{self, Admission, registration, server};
use crate::cli::Settings;
use crate::health::{self, Check, Readiness};
use crate::manifests::{CERTIFICATE_SECRET, DEFAULT_NAMESPACE, NAME, WEBHOOK_RECORD};
use crate::runtime::apply::{self, Writer};
use crate::runtime::cache::{Cache, Feed};
use crate::runtime::client::{self, Clients};
use crate::runtime::events::Events;
use crate::runtime::leadership::Leadership;
use crate::runtime::lease::{Elector, LeaseSettings, identity, vacant};
use crate::runtime::queue::Queue;
use crate::telemetry::Telemetry;
use crate::{definitions, features, node_startup, spread};

/// How long new connections are still taken after "not ready", so that nobody is sent to a closed port.
const GRACE: Duration = Duration::from_secs(2);
/// The rest of the ten seconds a shutdown may take.
const LAST_TASKS: Duration = Duration::from_secs(7);
/// Of the webhook server, inside [`LAST_TASKS`].
const DRAIN: Duration = Duration::from_secs(5);
/// Half-open watches are found after this and a little more, so that caches are right again within 30 s.
pub(crate) const WATCH_TIMEOUT: Duration = Duration::from_secs(20);
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// What a feature gets to work with.
#[derive(Clone, Debug)]
pub struct Context {
    pub config: Arc<Config>,
    /// The operator's own.
    pub namespace: String,
    pub clients: Clients,
    pub leadership: Leadership,
    /// For what only the leader may write.
    pub writer: Writer,
    pub events: Events,
    /// What the API server is asked to send us; a feature may change its own part.
    pub entries: Arc<watch::Sender<Vec<Entry>>>,
    pub node_startup: Arc<node_startup::Shared>,
    pub readiness: Readiness,
    pub tasks: TaskTracker,
    /// Work ends here; the webhook goes on for a moment.
    pub stopping: CancellationToken,
    pub clock: fn() -> Timestamp,
    shared: Shared,
    pub spread: Arc<spread::Shared>,
}

/// What several parts of a feature use together, by its type.
type Shared = Arc<Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>>;

impl Context {
    /// The one value of this type, made by whoever asks first: admission and controller see the same caches.
    pub fn shared<T: Send + Sync + 'static>(&self, make: impl FnOnce() -> T) -> Arc<T> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let known = shared.get(&TypeId::of::<T>()).and_then(|value| Arc::clone(value).downcast::<T>().ok());
        known.unwrap_or_else(|| {
            let made = Arc::new(make());
            shared.insert(TypeId::of::<T>(), Arc::clone(&made) as Arc<dyn Any + Send + Sync>);
            made
        })
    }

    /// Keeps a cache filled while the process runs, and the process unready until it is.
    pub fn follow<P: Send + Sync + 'static>(&self, cache: &Cache<P>, fill: impl Future<Output = ()> + Send + 'static) {
        let check = self.readiness.check(cache.what());
        let mut synced = cache.synced();
        self.tasks.spawn(self.stopping.clone().run_until_cancelled_owned(async move {
            if synced.wait_for(|synced| *synced).await.is_ok() {
                check.pass();
            }
        }));
        self.tasks.spawn(self.stopping.clone().run_until_cancelled_owned(fill));
    }

    #[must_use]
    pub fn feed(&self) -> Feed {
        Feed { watch_timeout: Some(WATCH_TIMEOUT), ..Feed::default() }
    }

    #[must_use]
    pub fn queue(&self, feature: Feature) -> Queue {
        Queue {
            name: feature.name(),
            workers: self.config.controller.workers,
            leader: self.leadership.watch(),
            stop: self.stopping.clone(),
        }
    }
}

/// The frame every command that stays runs in.
#[derive(Debug)]
pub struct Process {
    config: Arc<Config>,
    namespace: String,
    clients: Clients,
    readiness: Readiness,
    tasks: TaskTracker,
    stopping: CancellationToken,
    /// The sockets close here.
    closing: CancellationToken,
    started: Check,
    telemetry: Telemetry,
}

/// `groundcrew run`.
pub fn main(settings: &Settings, config: Config) -> Result<(), String> {
    runtime()?.block_on(async {
        let process = Process::start(settings, config).await?;
        let mut registry = Registry::default();
        let (context, elector) = process.context(&mut registry, process.election());
        // Of the replicas alone: an agent that holds its node's lease leads nobody.
        context.leadership.register(&mut registry);
        process.serve_webhook(&context, &mut registry).await?;
        if context.config.controller.enabled {
            definitions::start(&context);
            features::start(&context, &mut registry);
        }
        if let Some(elector) = elector {
            context.tasks.spawn(elector.run(context.stopping.clone()));
        }
        process.serve_metrics(registry).await?;
        info!(version = env!("CARGO_PKG_VERSION"), namespace = context.namespace, "groundcrew started");
        process.until_stopped().await;
        Ok(())
    })
}

/// Two threads carry a webhook and its controllers; more would only cost memory.
pub fn runtime() -> Result<tokio::runtime::Runtime, String> {
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 4));
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()
        .map_err(|e| format!("cannot start the runtime: {e}"))
}

impl Process {
    /// Everything that can fail for reasons outside, before anything listens for work.
    pub async fn start(settings: &Settings, config: Config) -> Result<Self, String> {
        let telemetry = Telemetry::start(&config)?;
        if let Err(e) = server::raise_descriptor_limit() {
            warn!(error = %e, "the limit of open files stays as it is");
        }
        let kube_config = client::load(settings.kubeconfig.as_deref()).await.map_err(|e| e.to_string())?;
        let clients = Clients::new(&kube_config, WATCH_TIMEOUT).map_err(|e| e.to_string())?;
        let in_cluster = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() && settings.kubeconfig.is_none();
        let namespace = match &settings.namespace {
            Some(name) if !name.is_empty() => name.clone(),
            _ if in_cluster => kube_config.default_namespace.clone(),
            _ => DEFAULT_NAMESPACE.to_owned(),
        };
        if !in_cluster {
            let election = config.controller.leader_election.namespace_or(&namespace);
            prepare_namespaces(&clients, &namespace, election).await;
        }
        let readiness = Readiness::default();
        let started = readiness.check("startup");
        let closing = CancellationToken::new();
        health::serve("health", config.health, health::health_router(readiness.clone()), closing.clone()).await?;
        Ok(Self {
            config: Arc::new(config),
            namespace,
            clients,
            readiness,
            tasks: TaskTracker::new(),
            stopping: CancellationToken::new(),
            closing,
            started,
            telemetry,
        })
    }

    /// The lease of the replicas, if they have to agree.
    fn election(&self) -> Option<LeaseSettings> {
        let election = &self.config.controller.leader_election;
        let namespace = election.namespace_or(&self.namespace);
        election.enabled.then(|| LeaseSettings::new(namespace, NAME, identity()))
    }

    /// What features work with, and the elector if there is a lease to hold; it contends once all else is in place.
    pub fn context(&self, registry: &mut Registry, lease: Option<LeaseSettings>) -> (Context, Option<Elector>) {
        let (elector, leadership) = match lease {
            Some(settings) => {
                let (elector, leadership) = Elector::new(self.clients.lease.clone(), settings);
                (Some(elector), leadership)
            }
            None => (None, Leadership::always()),
        };
        let (events, send_events) = Events::prepare(self.clients.write.clone(), registry, self.stopping.clone());
        self.tasks.spawn(send_events);
        let writer = Writer::new(self.clients.write.clone(), leadership.clone(), apply::Metrics::register(registry));
        let context = Context {
            config: Arc::clone(&self.config),
            namespace: self.namespace.clone(),
            clients: self.clients.clone(),
            leadership,
            writer,
            events,
            entries: Arc::new(watch::Sender::new(features::entries(&self.config, &self.namespace))),
            node_startup: node_startup::Shared::new(&self.config),
            readiness: self.readiness.clone(),
            tasks: self.tasks.clone(),
            stopping: self.stopping.clone(),
            clock: Timestamp::now,
            shared: Shared::default(),
            spread: spread::Shared::new(&self.config),
        };
        (context, elector)
    }

    async fn serve_webhook(&self, context: &Context, registry: &mut Registry) -> Result<(), String> {
        if !context.config.webhook.enabled {
            let context = context.clone();
            context.tasks.clone().spawn(async move { remove_registration(&context).await });
            return Ok(());
        }
        let target = features::target(&context.config, &context.namespace)?;
        let serving = ServingCert::register(registry);
        let port = context.config.webhook.port;
        let socket = health::bind(everywhere(port)).await;
        let socket = socket.map_err(|e| format!("cannot bind the webhook (--webhook-port) to port {port}: {e}"))?;

        let admission = Arc::new(Admission {
            features: features::enabled(&context.config).filter_map(|row| (row.admission)(context, registry)).collect(),
            node_features: features::node_features(context),
            validators: features::validators(context),
            exempt_namespaces: features::exempt_namespaces(&context.config, &context.namespace),
            metrics: admission::Metrics::register(registry),
            clock: context.clock,
            limits: admission::body::Limits::default(),
        });
        let streams = context.config.webhook.max_streams;
        let limits = server::Limits { drain: DRAIN, streams, ..server::Limits::default() };
        let metrics = server::Metrics::register(registry);
        let (router, closing) = (admission::router(admission), self.closing.clone());
        let served = server::serve(socket, Arc::clone(&serving), router, limits, closing, metrics);
        context.tasks.spawn(async move {
            if let Err(e) = served.await {
                tracing::error!(error = %e, "the webhook server could not start");
            }
        });

        let loaded = context.readiness.check("webhook certificate");
        let mut has_certificate = serving.loaded();
        context.tasks.spawn(context.stopping.clone().run_until_cancelled_owned(async move {
            if has_certificate.wait_for(|loaded| *loaded).await.is_ok() {
                loaded.pass();
            }
        }));
        let (published, observed) = watch::channel(None);
        let source = start_certificates(context, &target, serving, observed);
        let settings = registration::Settings {
            entries: context.entries.subscribe(),
            target,
            namespace: context.namespace.clone(),
            record: WEBHOOK_RECORD.to_owned(),
            hold: context.config.webhook.recreate_after,
            clock: context.clock,
        };
        let (leader, ready) = (context.leadership.watch(), context.readiness.watch());
        let client = context.clients.write.clone();
        let stop = context.stopping.clone();
        context.tasks.spawn(registration::keep(client, settings, source, leader, ready, published, stop));
        Ok(())
    }

    /// The last step of a start: every metric is registered, and only now the process may be ready.
    pub async fn serve_metrics(&self, registry: Registry) -> Result<(), String> {
        if let Some(address) = self.config.metrics {
            let router = health::metrics_router(Arc::new(registry));
            health::serve("metrics", address, router, self.closing.clone()).await?;
        }
        self.started.pass();
        Ok(())
    }

    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    #[must_use]
    pub fn readiness(&self) -> &Readiness {
        &self.readiness
    }

    #[must_use]
    pub fn clients(&self) -> &Clients {
        &self.clients
    }

    /// Waits for SIGTERM or SIGINT, then leaves in order.
    pub async fn until_stopped(self) {
        stop_signal().await;
        info!("stopping");
        // A check that is never passed.
        let _leaving = self.readiness.check("not on its way out");
        self.stopping.cancel();
        sleep(GRACE).await;
        self.closing.cancel();
        self.tasks.close();
        if timeout(LAST_TASKS, self.tasks.wait()).await.is_err() {
            warn!(tasks = self.tasks.len(), "some tasks did not end in time");
        }
        info!("stopped");
        self.telemetry.flush().await;
    }
}

fn start_certificates(
    context: &Context,
    target: &registration::Target,
    serving: Arc<ServingCert>,
    published: watch::Receiver<Option<certs::Published>>,
) -> Source {
    let webhook = &context.config.webhook;
    let stop = context.stopping.clone();
    match webhook.certificates.source {
        CertificateSource::Files => {
            let (source, keep) = certs::files::prepare(webhook.cert_dir.clone(), serving, context.clock, stop);
            context.tasks.spawn(keep);
            source
        }
        CertificateSource::Managed => {
            let settings = certs::managed::Settings {
                namespace: context.namespace.clone(),
                secret: CERTIFICATE_SECRET.to_owned(),
                names: target.names(),
                rules: webhook.certificates.rules,
                clock: context.clock,
            };
            let client = context.clients.write.clone();
            let leader = context.leadership.watch();
            let (source, keep) = certs::managed::prepare(client, settings, serving, leader, published, stop);
            context.tasks.spawn(keep);
            source
        }
    }
}

/// Turned off means gone, once this replica leads.
async fn remove_registration(context: &Context) {
    let mut leader = context.leadership.watch();
    let removing = async {
        loop {
            let _ = leader.wait_for(|leads| *leads).await;
            let client = context.clients.write.clone();
            match registration::remove(client, &context.namespace, WEBHOOK_RECORD, context.clock).await {
                Ok(()) => return info!("the webhook is turned off and not registered"),
                Err(e) => warn!(error = %e, "the webhook configuration could not be removed, trying again"),
            }
            sleep(CALL_TIMEOUT).await;
        }
    };
    context.stopping.run_until_cancelled(removing).await.unwrap_or(());
}

/// Outside the cluster perhaps nothing was installed before: then the namespace is made, and in a namespace that is new
/// nobody can hold the lease, so it is made vacant and the first leader need not wait it out.
async fn prepare_namespaces(clients: &Clients, own: &str, election: &str) {
    let leases: Api<Lease> = Api::namespaced(clients.write.clone(), election);
    if let Ok(Ok(_)) = timeout(CALL_TIMEOUT, leases.get_metadata(NAME)).await {
        return;
    }
    if own != election {
        create_namespace(clients, own).await;
    }
    if create_namespace(clients, election).await {
        let lease = vacant(election, NAME);
        let _ = timeout(CALL_TIMEOUT, leases.create(&PostParams::default(), &lease)).await;
    }
}

/// Whether it was not there before.
async fn create_namespace(clients: &Clients, namespace: &str) -> bool {
    let namespaces: Api<Namespace> = Api::all(clients.write.clone());
    let mut object = Namespace::default();
    object.metadata.name = Some(namespace.to_owned());
    let made = timeout(CALL_TIMEOUT, namespaces.create(&PostParams::default(), &object)).await;
    let made = matches!(made, Ok(Ok(_)));
    if made {
        info!(namespace, "namespace created");
    }
    made
}

async fn stop_signal() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}
