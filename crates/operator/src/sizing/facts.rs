//! What sizing knows of the cluster: templates, DaemonSets and nodes for admission, pods for what comes later.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use groundcrew_core::keys;
use groundcrew_core::sizing::resize::Kubelet;
use groundcrew_core::sizing::{Amounts, Asked, Owner, Problem, Qos, Shape, Template};
use k8s_openapi::api::core::v1 as api;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::{Api, ListParams, ObjectMeta};
use kube::core::DeserializeGuard;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{info, warn};

use super::crd::{FlexDaemonsetTemplate, TemplateStatus};
use crate::run::Context;
use crate::runtime::cache::{self, Cache, Key};

/// How often a cluster without the CRD is asked for it.
const CRD_RETRY: Duration = Duration::from_secs(5);

/// What admission answers from.
#[derive(Debug)]
pub struct Facts {
    pub templates: Arc<Cache<TemplateFacts>>,
    pub daemon_sets: Arc<Cache<DaemonSetFacts>>,
    pub nodes: Arc<Cache<Result<Amounts, Problem>>>,
    /// Whether it is known which templates there are: listed, or of a kind that is not installed.
    pub templates_known: watch::Receiver<bool>,
}

#[derive(Debug)]
pub struct TemplateFacts {
    pub uid: String,
    pub generation: Option<i64>,
    pub template: Result<Template, Problem>,
    pub status: TemplateStatus,
}

#[derive(Debug)]
pub struct DaemonSetFacts {
    pub uid: String,
    /// The template its own annotation names.
    pub template: Option<String>,
    /// What its pod template declares.
    pub shape: Shape,
}

#[derive(Debug)]
pub struct PodFacts {
    pub uid: String,
    pub version: String,
    pub owner: String,
    pub owner_uid: String,
    /// The template its own annotation names.
    pub template: Option<String>,
    pub node: Option<String>,
    pub shape: Shape,
    pub qos: Option<Qos>,
    pub kubelet: Kubelet,
    pub allocated: Vec<Amounts>,
    /// The kubelet has not seen the last change of the spec.
    pub unobserved: bool,
    pub ending: bool,
}

impl Facts {
    /// Starts the watches.
    #[must_use]
    pub fn follow(context: &Context) -> Self {
        let (known, templates_known) = watch::channel(false);
        let facts = Self {
            templates: Cache::new("FlexDaemonsetTemplates"),
            daemon_sets: Cache::new("DaemonSets"),
            nodes: Cache::new("what nodes have to give"),
            templates_known,
        };
        let sets: Api<DeserializeGuard<DaemonSet>> = Api::all(context.clients.watch.clone());
        let fill = cache::fill(Arc::clone(&facts.daemon_sets), sets, context.feed(), |set| Some(daemon_set(set)));
        context.follow(&facts.daemon_sets, fill);
        let nodes: Api<DeserializeGuard<Node>> = Api::all(context.clients.watch.clone());
        let fill = cache::fill(Arc::clone(&facts.nodes), nodes, context.feed(), |node| Some(allocatable(node)));
        context.follow(&facts.nodes, fill);
        follow_templates(context, &facts.templates, known);
        facts
    }

    /// Which template the pod of a DaemonSet should have. A DaemonSet of the same name but another uid is not its own.
    #[must_use]
    pub fn asked<'a>(
        &self,
        set: Option<&'a DaemonSetFacts>,
        owner: Option<Owner<'a>>,
        own: Option<&'a str>,
    ) -> Asked<'a> {
        let set = set.filter(|set| owner.is_some_and(|owner| owner.uid == set.uid));
        Asked::by(owner, set.map(|set| set.template.as_deref()), own)
    }

    #[must_use]
    pub fn template(&self, asked: Asked<'_>) -> Option<Arc<TemplateFacts>> {
        let Asked::Template(name) = asked else { return None };
        self.templates.get(&key("", name))
    }

    #[must_use]
    pub fn node(&self, name: Option<&str>) -> Option<Arc<Result<Amounts, Problem>>> {
        self.nodes.get(&key("", name?))
    }
}

#[must_use]
pub fn key(namespace: &str, name: &str) -> Key {
    Key { namespace: namespace.to_owned(), name: name.to_owned() }
}

/// A cluster without the CRD is one without templates: nothing of ours waits for it.
fn follow_templates(context: &Context, cache: &Arc<Cache<TemplateFacts>>, known: watch::Sender<bool>) {
    let check = context.readiness.check(cache.what());
    let pass = move || {
        check.pass();
        known.send_replace(true);
    };
    let client = context.clients.watch.clone();
    let templates: Api<FlexDaemonsetTemplate> = Api::all(client.clone());
    let guarded: Api<DeserializeGuard<FlexDaemonsetTemplate>> = Api::all(client);
    let (cache, feed) = (Arc::clone(cache), context.feed());
    let mut synced = cache.synced();
    let fill = async move {
        let mut told = false;
        while let Err(kube::Error::Api(status)) = templates.list_metadata(&ListParams::default().limit(1)).await {
            if status.code != 404 {
                break;
            }
            if !told {
                warn!("the CRD of FlexDaemonsetTemplate is not installed; no pod is sized until it is");
                told = true;
            }
            pass();
            sleep(CRD_RETRY).await;
        }
        if told {
            info!("the CRD of FlexDaemonsetTemplate is installed");
        }
        let passed = async {
            if synced.wait_for(|synced| *synced).await.is_ok() {
                pass();
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = cache::fill(cache, guarded, feed, |template| Some(template_facts(template))) => {}
            () = passed => {}
        }
    };
    context.tasks.spawn(context.stopping.clone().run_until_cancelled_owned(fill));
}

/// The DaemonSets' pods, followed by whoever looks after them later.
#[must_use]
pub fn follow_pods(context: &Context) -> Arc<Cache<PodFacts>> {
    let cache = Cache::new("pods of DaemonSets");
    let pods: Api<DeserializeGuard<Pod>> = Api::all(context.clients.watch.clone());
    context.follow(&cache, cache::fill(Arc::clone(&cache), pods, context.feed(), pod_facts));
    cache
}

fn template_facts(template: FlexDaemonsetTemplate) -> TemplateFacts {
    TemplateFacts {
        uid: template.metadata.uid.unwrap_or_default(),
        generation: template.metadata.generation,
        template: template.spec.read(),
        status: template.status.unwrap_or_default(),
    }
}

/// What is decoded of a DaemonSet.
#[derive(Clone, Debug, Serialize, Deserialize, kube::Resource)]
#[resource(inherit = k8s_openapi::api::apps::v1::DaemonSet)]
struct DaemonSet {
    metadata: ObjectMeta,
    #[serde(default)]
    spec: DaemonSetSpec,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct DaemonSetSpec {
    #[serde(default)]
    template: PodTemplate,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct PodTemplate {
    #[serde(default)]
    spec: PodSpec,
}

fn daemon_set(set: DaemonSet) -> DaemonSetFacts {
    DaemonSetFacts {
        uid: set.metadata.uid.unwrap_or_default(),
        template: keys::resource_template(&set.metadata.annotations).map(str::to_owned),
        shape: Shape::of_spec(&set.spec.template.spec.into()),
    }
}

/// What is decoded of a node.
#[derive(Clone, Debug, Serialize, Deserialize, kube::Resource)]
#[resource(inherit = k8s_openapi::api::core::v1::Node)]
struct Node {
    metadata: ObjectMeta,
    #[serde(default)]
    status: NodeStatus,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct NodeStatus {
    #[serde(default)]
    allocatable: BTreeMap<String, Quantity>,
}

fn allocatable(node: Node) -> Result<Amounts, Problem> {
    Amounts::allocatable(&node.status.allocatable)
}

/// What is decoded of a pod.
#[derive(Clone, Debug, Serialize, Deserialize, kube::Resource)]
#[resource(inherit = k8s_openapi::api::core::v1::Pod)]
struct Pod {
    metadata: ObjectMeta,
    #[serde(default)]
    spec: PodSpec,
    #[serde(default)]
    status: PodStatus,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PodSpec {
    node_name: Option<String>,
    affinity: Option<api::Affinity>,
    containers: Vec<Container>,
    init_containers: Option<Vec<Container>>,
    resources: Option<api::ResourceRequirements>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Container {
    name: String,
    restart_policy: Option<String>,
    resources: Option<api::ResourceRequirements>,
    resize_policy: Option<Vec<api::ContainerResizePolicy>>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PodStatus {
    phase: Option<String>,
    qos_class: Option<String>,
    observed_generation: Option<i64>,
    conditions: Option<Vec<PodCondition>>,
    container_statuses: Option<Vec<ContainerStatus>>,
    init_container_statuses: Option<Vec<ContainerStatus>>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct PodCondition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
    reason: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ContainerStatus {
    name: String,
    allocated_resources: Option<BTreeMap<String, Quantity>>,
}

impl From<Container> for api::Container {
    fn from(container: Container) -> Self {
        let Container { name, restart_policy, resources, resize_policy } = container;
        Self { name, restart_policy, resources, resize_policy, ..Self::default() }
    }
}

impl From<PodSpec> for api::PodSpec {
    fn from(spec: PodSpec) -> Self {
        Self {
            containers: spec.containers.into_iter().map(Into::into).collect(),
            init_containers: spec.init_containers.map(|list| list.into_iter().map(Into::into).collect()),
            resources: spec.resources,
            ..Self::default()
        }
    }
}

/// Only pods that a DaemonSet controls are remembered.
fn pod_facts(pod: Pod) -> Option<PodFacts> {
    let Pod { mut metadata, mut spec, status } = pod;
    let owners = metadata.owner_references.take().unwrap_or_default();
    let owner = owners.into_iter().find(|owner| owner.controller == Some(true))?;
    if owner.kind != "DaemonSet" || owner.api_version != "apps/v1" {
        return None;
    }
    let pinned = spec.affinity.take().and_then(pinned);
    let node = spec.node_name.take().filter(|name| !name.is_empty()).or(pinned);
    let finished = status.phase.as_deref().is_some_and(|phase| phase == "Succeeded" || phase == "Failed");
    let shape = Shape::of_spec(&spec.into());
    Some(PodFacts {
        version: metadata.resource_version.unwrap_or_default(),
        template: keys::resource_template(&metadata.annotations).map(str::to_owned),
        owner: owner.name,
        owner_uid: owner.uid,
        node,
        qos: status.qos_class.as_deref().and_then(Qos::read),
        kubelet: kubelet(status.conditions.as_deref().unwrap_or_default()),
        allocated: allocated(&shape, &status),
        unobserved: status.observed_generation.is_some_and(|seen| Some(seen) < metadata.generation),
        ending: finished || metadata.deletion_timestamp.is_some(),
        uid: metadata.uid.unwrap_or_default(),
        shape,
    })
}

/// The DaemonSet controller pins its pods by one field of one term.
fn pinned(affinity: api::Affinity) -> Option<String> {
    let required = affinity.node_affinity?.required_during_scheduling_ignored_during_execution?;
    let fields = required.node_selector_terms.into_iter().next()?.match_fields?;
    let name = fields.into_iter().find(|field| field.key == "metadata.name" && field.operator == "In")?;
    name.values.filter(|values| values.len() == 1)?.pop()
}

fn kubelet(conditions: &[PodCondition]) -> Kubelet {
    let holds = |kind: &str| conditions.iter().find(|c| c.kind == kind && c.status == "True");
    match holds("PodResizePending").map(|condition| condition.reason.as_deref()) {
        Some(Some("Infeasible")) => Kubelet::Infeasible,
        Some(_) => Kubelet::Deferred,
        None => match holds("PodResizeInProgress").map(|condition| condition.reason.as_deref()) {
            Some(Some("Error")) => Kubelet::Failing,
            Some(_) => Kubelet::InProgress,
            None => Kubelet::Idle,
        },
    }
}

/// In the order of the shape.
fn allocated(shape: &Shape, status: &PodStatus) -> Vec<Amounts> {
    let statuses = || status.container_statuses.iter().chain(&status.init_container_statuses).flatten();
    let of = |name: &str| statuses().find(|status| status.name == name)?.allocated_resources.as_ref();
    shape.containers.iter().map(|container| Amounts::declared(&of(&container.name))).collect()
}

#[cfg(test)]
mod tests;
