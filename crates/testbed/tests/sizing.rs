//! `sizing` on a real Kubernetes: the schema, admission, a fleet of fake nodes, and one real node.

#![expect(clippy::expect_used, clippy::indexing_slicing, reason = "a test ends where its assumption fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use groundcrew::sizing::crd::FlexDaemonsetTemplate;
use groundcrew_testbed::objects::is_established;
use groundcrew_testbed::{AuditEvent, Cluster, Groundcrew};
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Event, Pod, ResourceRequirements};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
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
const LONG: Duration = Duration::from_secs(240);
const CRD: &str = "flexdaemonsettemplates.flexdaemonsets.xai";

type Templates = Api<FlexDaemonsetTemplate>;

/// Installs the CRD and waits until the API server serves it.
async fn install_crd(cluster: &Cluster) -> anyhow::Result<Templates> {
    let crds: Api<CustomResourceDefinition> = Api::all(cluster.client());
    crds.create(&PostParams::default(), &FlexDaemonsetTemplate::crd()).await?;
    cluster.wait_for(&crds, CRD, "established", SOON, is_established).await?;
    let templates: Templates = Api::all(cluster.client());
    // Served by discovery a moment before it is served by itself.
    let began = Instant::now();
    while let Err(error) = templates.list(&Default::default()).await {
        anyhow::ensure!(began.elapsed() < SOON, "the CRD is not served: {error}");
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

/// Creates a DaemonSet of the template `t` that makes its pods once groundcrew knows both: the pods of one that is
/// newer than the caches are born unsized.
async fn create_known(
    cluster: &Cluster,
    templates: &Templates,
    sets: &Api<DaemonSet>,
    mut set: DaemonSet,
) -> anyhow::Result<()> {
    let pod = set.spec.as_mut().and_then(|spec| spec.template.spec.as_mut()).expect("a pod template");
    pod.node_selector = Some([("example.com/none".to_owned(), "here".to_owned())].into());
    sets.create(&PostParams::default(), &set).await?;
    let known = |t: &FlexDaemonsetTemplate| t.status.as_ref().is_some_and(|status| status.daemon_sets == 1);
    cluster.wait_for(templates, "t", "its DaemonSet is known", SOON, known).await?;
    let everywhere = Patch::Merge(json!({"spec": {"template": {"spec": {"nodeSelector": null}}}}));
    sets.patch(&set.name_any(), &PatchParams::default(), &everywhere).await?;
    Ok(())
}

/// Waits for pods of DaemonSets. After a second without an answer the API server goes on without a webhook, as on a
/// stalled machine: those it let in so are deleted, and their DaemonSet makes them again.
async fn wait_reviewed(
    cluster: &Cluster,
    pods: &Api<Pod>,
    config: watcher::Config,
    what: &str,
    hold: impl Fn(&[&Pod]) -> bool,
) -> anyhow::Result<Vec<Pod>> {
    let began = Instant::now();
    loop {
        let found = cluster.wait_for_list(pods, config.clone(), what, LONG, &hold).await?;
        let missed = missed(cluster, &found).await?;
        if missed.is_empty() {
            return Ok(found);
        }
        anyhow::ensure!(began.elapsed() < LONG, "let in without us again and again: {missed:?}");
        for name in missed {
            pods.delete(&name, &DeleteParams::default().grace_period(0)).await?;
            cluster.wait_gone(pods, &name, SOON).await?;
        }
    }
}

/// Those of the pods that the API server let in because the webhook was late.
async fn missed(cluster: &Cluster, pods: &[Pod]) -> anyhow::Result<Vec<String>> {
    // Who has a size was reviewed, and the log is long.
    if pods.iter().all(|pod| !sizes(pod, 0).is_empty()) {
        return Ok(Vec::new());
    }
    let passed_over = |event: &&AuditEvent| {
        let open = event.annotations.keys().any(|key| key.starts_with("failed-open."));
        open && event.verb == "create" && event.is_about("pods", "")
    };
    let events = cluster.audit_events().await?;
    let open: BTreeSet<String> = events.iter().filter(passed_over).filter_map(AuditEvent::object_key).collect();
    let key = |pod: &Pod| format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
    Ok(pods.iter().filter(|pod| open.contains(&key(pod))).map(Pod::name_any).collect())
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
