//! `groundcrew cleanup`: takes back everything that would outlive the operator, whether its feature is on or not.
//!
//! ```text
//! operator and agents stop ─► webhooks ─► policies and taints ─► gates open ─► leases, Secret, ConfigMaps
//! ```
//!
//! Users' pods, custom resources and their definitions stay. It may be run again at any time, by an admin or by the Job
//! of [`manifests`]; every step finds what an earlier run left.

pub mod manifests;
mod stopping;

use std::fmt::Debug;
use std::time::Duration;

use groundcrew_core::config::Config;
use k8s_openapi::api::admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use kube::api::{Api, DeleteParams, ListParams};
use kube::{Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use crate::cli::Settings;
use crate::manifests::{
    CERTIFICATE_SECRET, DEFAULT_NAMESPACE, NAME, NODE_STARTUP_RECORD, SPREAD_MEMORY, WEBHOOK_RECORD,
};
use crate::run::{WATCH_TIMEOUT, block_on, runtime};
use crate::runtime::client::{self, Clients};
use crate::telemetry::Telemetry;
use crate::{node_startup, warmup};
use stopping::{Stopping, Verdict};

const CALL: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(500);

pub fn main(settings: &Settings, config: &Config) -> Result<(), String> {
    block_on(runtime()?, async {
        let telemetry = Telemetry::start(config)?;
        let kube_config = client::load(settings.kubeconfig.as_deref()).await.map_err(|e| e.to_string())?;
        let clients = Clients::new(&kube_config, WATCH_TIMEOUT).map_err(|e| e.to_string())?;
        let namespace = settings.namespace.as_deref().filter(|name| !name.is_empty()).unwrap_or(DEFAULT_NAMESPACE);
        let done = run(&clients, config, namespace).await;
        telemetry.flush().await;
        done
    })
}

async fn run(clients: &Clients, config: &Config, namespace: &str) -> Result<(), String> {
    let client = &clients.write;
    if let Some(other) = installed_in(client).await?.filter(|other| other != namespace) {
        return Err(format!(
            "groundcrew is installed in {other}, not in {namespace}: run this with --namespace {other}"
        ));
    }
    let election = config.controller.leader_election.namespace_or(namespace);
    stop(client, namespace, election).await?;
    delete(&Api::<MutatingWebhookConfiguration>::all(client.clone()), NAME).await?;
    delete(&Api::<ValidatingWebhookConfiguration>::all(client.clone()), NAME).await?;
    node_startup::cleanup::run(clients, config, namespace).await?;
    let opened = warmup::farewell::open(clients).await?;
    info!(opened, "warm-up gates opened");
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    for lease in list(&leases, &warmup::agent_leases()).await? {
        delete(&leases, &lease.name_any()).await?;
    }
    delete(&Api::<Lease>::namespaced(client.clone(), election), NAME).await?;
    delete(&Api::<Secret>::namespaced(client.clone(), namespace), CERTIFICATE_SECRET).await?;
    let records: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    for name in [WEBHOOK_RECORD, SPREAD_MEMORY, NODE_STARTUP_RECORD] {
        delete(&records, name).await?;
    }
    info!("nothing of groundcrew is left but its custom resources and what installed it");
    Ok(())
}

/// In which namespace an installation serves the webhooks that are registered, if by a Service.
async fn installed_in(client: &Client) -> Result<Option<String>, String> {
    let mutating = Api::<MutatingWebhookConfiguration>::all(client.clone());
    let validating = Api::<ValidatingWebhookConfiguration>::all(client.clone());
    let mutating = answer(mutating.get_opt(NAME)).await?.and_then(|found| found.webhooks);
    let validating = answer(validating.get_opt(NAME)).await?.and_then(|found| found.webhooks);
    let mutating = mutating.into_iter().flatten().map(|webhook| webhook.client_config);
    let validating = validating.into_iter().flatten().map(|webhook| webhook.client_config);
    Ok(mutating.chain(validating).find_map(|called| Some(called.service?.namespace)))
}

/// Whatever is taken back below, a running operator would put there again.
async fn stop(client: &Client, namespace: &str, election: &str) -> Result<(), String> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), election);
    // Before anything goes: without the right to read it nobody could tell whether an operator runs elsewhere.
    answer(leases.get_opt(NAME)).await?;
    delete(&Api::<Deployment>::namespaced(client.clone(), namespace), NAME).await?;
    delete(&Api::<DaemonSet>::namespaced(client.clone(), namespace), warmup::manifests::AGENT).await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let mut stopping = Stopping::new(Instant::now());
    loop {
        let left = list(&pods, &manifests::running_parts()).await?;
        let lease = answer(leases.get_opt(NAME)).await?;
        match stopping.look(&left, lease, Instant::now()) {
            Verdict::Wait => sleep(LOOK).await,
            Verdict::Refused(why) => return Err(why),
            Verdict::Stopped(stuck) => {
                for pod in stuck {
                    warn!(pod, "its node does not say that it ended; going on without it");
                }
                return Ok(());
            }
        }
    }
}

async fn list<K>(api: &Api<K>, labels: &str) -> Result<Vec<K>, String>
where
    K: Clone + Debug + DeserializeOwned,
{
    Ok(answer(api.list(&ListParams::default().labels(labels))).await?.items)
}

async fn delete<K>(api: &Api<K>, name: &str) -> Result<(), String>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    // Owned objects go in the background, as with kubectl.
    match answer(api.delete(name, &DeleteParams::background())).await {
        Ok(_) => {
            info!(kind = %K::kind(&()), name, "deleted");
            Ok(())
        }
        Err(Failure::Gone) => Ok(()),
        Err(failure) => Err(format!("{} {name}: {}", K::kind(&()), String::from(failure))),
    }
}

enum Failure {
    Gone,
    Other(String),
}

impl From<Failure> for String {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Gone => "not found".to_owned(),
            Failure::Other(reason) => reason,
        }
    }
}

async fn answer<T>(call: impl Future<Output = kube::Result<T>>) -> Result<T, Failure> {
    match timeout(CALL, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) if status.code == 404 => Err(Failure::Gone),
        Ok(Err(error)) => Err(Failure::Other(error.to_string())),
        Err(_) => Err(Failure::Other(format!("no answer within {CALL:?}"))),
    }
}
