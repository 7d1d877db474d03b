//! Builders that let a test show only what matters.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Context;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DynamicObject, ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt, discovery};
use serde_json::Value;

use crate::locate;

/// After this long without an answer the API server goes on without the webhook.
const WEBHOOK_TIMEOUT: Duration = Duration::from_secs(1);
/// Late so often in a row is not the machine.
const ATTEMPTS: usize = 5;

/// The smallest legal pod.
#[must_use]
pub fn pod(name: &str) -> Pod {
    let container = Container {
        name: "main".to_owned(),
        image: Some("none".to_owned()),
        image_pull_policy: Some("Never".to_owned()),
        ..Container::default()
    };
    Pod {
        metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
        spec: Some(PodSpec { containers: vec![container], ..PodSpec::default() }),
        status: None,
    }
}

/// Adds to a pod, in the order a sentence would.
pub trait PodExt: Sized {
    #[must_use]
    fn annotated(self, key: &str, value: &str) -> Self;
    #[must_use]
    fn with_image(self, image: &str, command: &[&str]) -> Self;
}

impl PodExt for Pod {
    fn annotated(mut self, key: &str, value: &str) -> Self {
        let annotations = self.metadata.annotations.get_or_insert_with(BTreeMap::new);
        annotations.insert(key.to_owned(), value.to_owned());
        self
    }

    fn with_image(mut self, image: &str, command: &[&str]) -> Self {
        for container in self.spec.iter_mut().flat_map(|spec| &mut spec.containers) {
            container.image = Some(image.to_owned());
            container.command = Some(command.iter().map(|word| (*word).to_owned()).collect());
        }
        self
    }
}

/// The documents of a YAML file.
///
/// # Errors
/// It is not YAML.
pub fn documents(text: &str) -> anyhow::Result<Vec<Value>> {
    let all: Vec<Value> = serde_saphyr::from_multiple(text)?;
    Ok(all.into_iter().filter(|document| !document.is_null()).collect())
}

/// The objects of a file under `deploy/samples`.
///
/// # Errors
/// It is not there, or not YAML.
pub fn sample(path: &str) -> anyhow::Result<Vec<Value>> {
    let text = std::fs::read_to_string(locate::repository().join("deploy/samples").join(path));
    documents(&text.with_context(|| format!("cannot read the sample {path}"))?)
}

/// Whether the API server serves this kind.
#[must_use]
pub fn is_established(definition: &CustomResourceDefinition) -> bool {
    let conditions = definition.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Established" && condition.status == "True")
}

/// Creates a pod that wants a stamp and never runs; whether the webhook gave it one.
///
/// # Errors
/// The API server refused it.
pub async fn stamped(pods: &Api<Pod>) -> anyhow::Result<bool> {
    let mut asking = pod("asking").annotated("addtime", "");
    asking.spec.get_or_insert_default().scheduler_name = Some("nobody".to_owned());
    stamped_as(pods, &asking).await
}

/// Creates this pod, whose name is a prefix; whether the webhook gave it the stamp it wants.
///
/// # Errors
/// The API server refused it.
pub async fn stamped_as(pods: &Api<Pod>, asking: &Pod) -> anyhow::Result<bool> {
    let mut asking = asking.clone();
    asking.metadata.generate_name = asking.metadata.name.take().map(|name| format!("{name}-"));
    let is_stamped = |pod: &Pod| pod.annotations().contains_key("timestamp");
    let created = create_in_time(pods, &PostParams::default(), |_| asking.clone(), is_stamped).await?;
    Ok(created.as_ref().is_some_and(is_stamped))
}

/// Creates this pod, its name with a number, in a review that the webhook could take part in.
///
/// # Errors
/// The API server refused it, or was late each time.
pub async fn reviewed(pods: &Api<Pod>, how: &PostParams, new: &Pod) -> anyhow::Result<Pod> {
    let numbered = |attempt: usize| {
        let mut new = new.clone();
        new.metadata.name = new.metadata.name.map(|name| format!("{name}-{attempt}"));
        new
    };
    let created = create_in_time(pods, how, numbered, |_| false).await?;
    created.context("creates take longer than a second, again and again")
}

/// A webhook that is passed over at once is told from one that a stalled machine made late: a create that took so long
/// is made again, unless it shows the webhook's work.
async fn create_in_time(
    pods: &Api<Pod>,
    how: &PostParams,
    new: impl Fn(usize) -> Pod,
    shows: impl Fn(&Pod) -> bool,
) -> anyhow::Result<Option<Pod>> {
    for attempt in 0..ATTEMPTS {
        let began = Instant::now();
        let created = pods.create(how, &new(attempt)).await.context("a create failed")?;
        if shows(&created) || began.elapsed() < WEBHOOK_TIMEOUT {
            return Ok(Some(created));
        }
    }
    Ok(None)
}

/// Creates an object of any kind that the API server knows.
///
/// # Errors
/// The kind is unknown, or the API server refused.
pub async fn create(client: &Client, object: Value) -> anyhow::Result<DynamicObject> {
    let object: DynamicObject = serde_json::from_value(object)?;
    let api = api_of(client, &object, client.default_namespace()).await?;
    Ok(api.create(&PostParams::default(), &object).await?)
}

/// Applies objects of any kind as kubectl would, those without a namespace of their own in `namespace`.
///
/// # Errors
/// A kind is unknown, or the API server refused.
pub async fn apply(client: &Client, namespace: &str, objects: Vec<Value>) -> anyhow::Result<()> {
    for object in objects {
        let object: DynamicObject = serde_json::from_value(object)?;
        let (api, name) = (api_of(client, &object, namespace).await?, object.name_any());
        let params = PatchParams::apply("kubectl").force();
        api.patch(&name, &params, &Patch::Apply(&object)).await.with_context(|| format!("cannot apply {name}"))?;
    }
    Ok(())
}

async fn api_of(client: &Client, object: &DynamicObject, namespace: &str) -> anyhow::Result<Api<DynamicObject>> {
    let kind = object.types.as_ref().context("an object without a kind")?.try_into()?;
    let (resource, capabilities) = discovery::pinned_kind(client, &kind).await?;
    let namespace = object.metadata.namespace.as_deref().unwrap_or(namespace);
    Ok(match capabilities.scope {
        discovery::Scope::Namespaced => Api::namespaced_with(client.clone(), namespace, &resource),
        discovery::Scope::Cluster => Api::all_with(client.clone(), &resource),
    })
}
