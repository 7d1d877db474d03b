//! `groundcrew cleanup`: takes back everything that would outlive the operator, whether its feature is on or not.
//!
//! ```text
//! operator and agents stop ─► webhooks ─► policies and taints ─► gates open ─► leases, Secret, ConfigMaps
//! ```
//!
//! Users' pods, custom resources and their definitions stay. It may be run again at any time, by an admin or by the Job
//! of [`manifests`]; every step finds what an earlier run left.

pub mod manifests;

use std::fmt::Debug;
use std::time::Duration;

use groundcrew_core::config::Config;
use jiff::Timestamp;
use k8s_openapi::api::admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use kube::api::{Api, DeleteParams, ListParams};
use kube::{Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep, timeout};
use tracing::info;

use crate::cli::Settings;
use crate::manifests::{
    CERTIFICATE_SECRET, DEFAULT_NAMESPACE, NAME, NODE_STARTUP_RECORD, SPREAD_MEMORY, WEBHOOK_RECORD,
};
use crate::run::{WATCH_TIMEOUT, block_on, runtime};
use crate::runtime::client::{self, Clients};
use crate::telemetry::Telemetry;
use crate::{node_startup, warmup};

const CALL: Duration = Duration::from_secs(10);
/// Pods get 20 seconds to end; a lease whose holder died runs out in 15.
const STOPPED: Duration = Duration::from_secs(60);
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
    stop(client, namespace).await?;
    delete(&Api::<MutatingWebhookConfiguration>::all(client.clone()), NAME).await?;
    delete(&Api::<ValidatingWebhookConfiguration>::all(client.clone()), NAME).await?;
    node_startup::cleanup::run(clients, config, namespace).await?;
    let opened = warmup::farewell::open(clients).await?;
    info!(opened, "warm-up gates opened");
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    for lease in list(&leases, &warmup::agent_leases()).await? {
        delete(&leases, &lease.name_any()).await?;
    }
    delete(&leases, NAME).await?;
    delete(&Api::<Secret>::namespaced(client.clone(), namespace), CERTIFICATE_SECRET).await?;
    let records: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    for name in [WEBHOOK_RECORD, SPREAD_MEMORY, NODE_STARTUP_RECORD] {
        delete(&records, name).await?;
    }
    info!("nothing of groundcrew is left but its custom resources and what installed it");
    Ok(())
}

/// Whatever is taken back below, a running operator would put there again.
async fn stop(client: &Client, namespace: &str) -> Result<(), String> {
    delete(&Api::<Deployment>::namespaced(client.clone(), namespace), NAME).await?;
    delete(&Api::<DaemonSet>::namespaced(client.clone(), namespace), warmup::manifests::AGENT).await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    let began = Instant::now();
    let mut first_renewal = None;
    loop {
        let left = list(&pods, &manifests::running_parts()).await?.len();
        let lease = answer(leases.get_opt(NAME)).await?;
        let holder = lease.as_ref().and_then(|lease| holder(lease, Timestamp::now()));
        let late = began.elapsed() > STOPPED;
        match holder {
            None if left == 0 => return Ok(()),
            None if late => return Err(format!("{left} pods of groundcrew do not end")),
            None => {}
            Some((name, renewed)) => {
                // Without pods that could still be ending, whoever renews runs elsewhere and goes on.
                let goes_on = left == 0 && renewed != *first_renewal.get_or_insert(renewed);
                if goes_on || late {
                    return Err(format!("the operator still runs: {name} holds the lease; stop it and run this again"));
                }
            }
        }
        sleep(LOOK).await;
    }
}

/// Who leads, if anybody still may, and when that was last confirmed.
fn holder(lease: &Lease, now: Timestamp) -> Option<(&str, Timestamp)> {
    let spec = lease.spec.as_ref()?;
    let holder = spec.holder_identity.as_deref().filter(|holder| !holder.is_empty())?;
    let renewed = spec.renew_time.as_ref()?.0;
    let lasts = i64::from(spec.lease_duration_seconds.unwrap_or_default());
    (now.as_second() <= renewed.as_second().saturating_add(lasts)).then_some((holder, renewed))
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

#[cfg(test)]
mod tests {
    use k8s_openapi::api::coordination::v1::LeaseSpec;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

    use super::*;

    #[test]
    fn a_lease_is_held_until_it_runs_out_or_is_given_back() {
        let renewed: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let lease = |holder: &str| Lease {
            spec: Some(LeaseSpec {
                holder_identity: Some(holder.to_owned()),
                renew_time: Some(MicroTime(renewed)),
                lease_duration_seconds: Some(15),
                ..LeaseSpec::default()
            }),
            ..Lease::default()
        };
        let after = |seconds| renewed + Duration::from_secs(seconds);
        assert_eq!(holder(&lease("a"), after(15)), Some(("a", renewed)));
        assert_eq!(holder(&lease("a"), after(16)), None);
        assert_eq!(holder(&lease(""), after(1)), None);
        assert_eq!(holder(&Lease::default(), after(1)), None);
    }
}
