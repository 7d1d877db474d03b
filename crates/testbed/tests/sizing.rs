//! `sizing` on a real Kubernetes: the schema, admission, a fleet of fake nodes, and one real node.

#![expect(clippy::expect_used, clippy::indexing_slicing, reason = "a test ends where its assumption fails")]

use std::collections::BTreeMap;
use std::time::Duration;

use groundcrew::sizing::crd::FlexDaemonsetTemplate;
use groundcrew_testbed::objects::is_established;
use groundcrew_testbed::{Cluster, Groundcrew};
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Event, Pod, ResourceRequirements};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DynamicObject, PostParams};
use kube::core::ApiResource;
use kube::runtime::watcher;
use kube::{CustomResourceExt, ResourceExt};
use serde_json::{Value, json};

#[path = "sizing/admission.rs"]
mod admission;
#[path = "sizing/fleet.rs"]
mod fleet;
#[path = "sizing/node.rs"]
mod node;
#[path = "sizing/quantities.rs"]
mod quantities;
#[path = "sizing/schema.rs"]
mod schema;

const SOON: Duration = Duration::from_secs(60);
const CRD: &str = "flexdaemonsettemplates.flexdaemonsets.xai";

type Templates = Api<FlexDaemonsetTemplate>;

/// Installs the CRD and waits until the API server serves it.
async fn install_crd(cluster: &Cluster) -> anyhow::Result<Templates> {
    let crds: Api<CustomResourceDefinition> = Api::all(cluster.client());
    crds.create(&PostParams::default(), &FlexDaemonsetTemplate::crd()).await?;
    cluster.wait_for(&crds, CRD, "established", SOON, is_established).await?;
    let templates: Templates = Api::all(cluster.client());
    // Served by discovery a moment before it is served by itself.
    while templates.list(&Default::default()).await.is_err() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(templates)
}

/// The CRD, the operator, and its webhook registered and called.
async fn start(cluster: &Cluster) -> anyhow::Result<(Templates, Groundcrew)> {
    let templates = install_crd(cluster).await?;
    let groundcrew = Groundcrew::builder(cluster).start().await?;
    let webhooks: Api<MutatingWebhookConfiguration> = Api::all(cluster.client());
    let ours = |c: &MutatingWebhookConfiguration| c.webhooks.iter().flatten().any(|w| w.name.starts_with("sizing."));
    cluster.wait_for(&webhooks, "groundcrew", "registered", SOON, ours).await?;
    cluster.webhook_answers().await?;
    groundcrew.wait_metric("groundcrew_leader 1", SOON).await?;
    Ok((templates, groundcrew))
}

fn template(name: &str, spec: Value) -> FlexDaemonsetTemplate {
    let object = json!({
        "apiVersion": "flexdaemonsets.xai/v1alpha1", "kind": "FlexDaemonsetTemplate",
        "metadata": {"name": name}, "spec": spec,
    });
    serde_json::from_value(object).expect("a template")
}

fn percent(cpu: u8, memory: u8, storage: u8) -> Value {
    json!({"cpuPercentage": cpu, "memoryPercentage": memory, "storagePercentage": storage})
}

/// A DaemonSet with one container; kwok plays it on every node.
fn daemon_set(name: &str, template: Option<&str>) -> DaemonSet {
    let mut object = json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {
                    "tolerations": [{"operator": "Exists"}],
                    "containers": [{"name": "agent", "image": "none"}],
                },
            },
        },
    });
    if let Some(template) = template {
        object["metadata"]["annotations"] = json!({"flexdaemonsets.xai/resource-template": template});
    }
    serde_json::from_value(object).expect("a DaemonSet")
}

fn resources(pod: &Pod, index: usize) -> ResourceRequirements {
    let container = pod.spec.as_ref().and_then(|spec| spec.containers.get(index));
    container.and_then(|container| container.resources.clone()).unwrap_or_default()
}

/// Requests of a container that must equal its limits, as texts.
fn sizes(pod: &Pod, index: usize) -> BTreeMap<String, String> {
    let ResourceRequirements { requests, limits, .. } = resources(pod, index);
    assert_eq!(requests, limits, "{}", pod.name_any());
    requests.unwrap_or_default().into_iter().map(|(name, quantity)| (name, quantity.0)).collect()
}

fn expected(cpu: &str, memory: &str, storage: &str) -> BTreeMap<String, String> {
    [("cpu", cpu), ("memory", memory), ("ephemeral-storage", storage)]
        .map(|(name, text)| (name.to_owned(), text.to_owned()))
        .into()
}

async fn wait_event(cluster: &Cluster, namespace: &str, reason: &str, about: &str) -> anyhow::Result<Event> {
    let events: Api<Event> = Api::namespaced(cluster.client(), namespace);
    let found =
        |event: &Event| event.reason.as_deref() == Some(reason) && event.involved_object.name.as_deref() == Some(about);
    let what = format!("an event {reason} about {about}");
    let any = |events: &[&Event]| events.iter().any(|event| found(event));
    let events = cluster.wait_for_list(&events, watcher::Config::default(), &what, SOON, any).await?;
    events.into_iter().find(|event| found(event)).ok_or_else(|| anyhow::anyhow!("{what}"))
}
