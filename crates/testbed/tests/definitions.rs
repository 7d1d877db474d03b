//! The custom resource definitions follow the release.

use std::time::Duration;

use groundcrew::sizing::crd::FlexDaemonsetTemplate;
use groundcrew_testbed::objects::is_established;
use groundcrew_testbed::{Cluster, Groundcrew, Layer};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, PostParams};
use kube::{CustomResourceExt, ResourceExt};
use serde_json::json;
use tokio::time::{Instant, sleep};

const SOON: Duration = Duration::from_secs(60);
const RELEASE: &str = "groundcrew.io/release";
const TEMPLATES: &str = "flexdaemonsettemplates.flexdaemonsets.xai";
const RULES: &str = "nodestartuprules.groundcrew.io";

type Definitions = Api<CustomResourceDefinition>;

/// A definition as an earlier or later release would have left it.
async fn put(definitions: &Definitions, release: Option<&str>) -> anyhow::Result<()> {
    let mut definition = FlexDaemonsetTemplate::crd();
    definition.spec.names.short_names = Some(vec!["other".to_owned()]);
    if let Some(release) = release {
        definition.metadata.annotations.get_or_insert_default().insert(RELEASE.to_owned(), release.to_owned());
    }
    definitions.create(&PostParams::default(), &definition).await?;
    Ok(())
}

fn short_names(definition: &CustomResourceDefinition) -> &[String] {
    definition.spec.names.short_names.as_deref().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_definition_is_brought_up_to_date_and_its_objects_stay() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let definitions: Definitions = Api::all(cluster.client());
    put(&definitions, None).await?;
    cluster.wait_for(&definitions, TEMPLATES, "established", SOON, is_established).await?;
    let templates: Api<FlexDaemonsetTemplate> = Api::all(cluster.client());
    let template: FlexDaemonsetTemplate = serde_json::from_value(json!({
        "apiVersion": "flexdaemonsets.xai/v1alpha1", "kind": "FlexDaemonsetTemplate", "metadata": {"name": "kept"},
        "spec": {"cpuPercentage": 1, "memoryPercentage": 1, "storagePercentage": 1},
    }))?;
    // Established is written a moment before the API server serves the kind.
    let began = Instant::now();
    let before = loop {
        match templates.create(&PostParams::default(), &template).await {
            Err(kube::Error::Api(status)) if status.code == 404 && began.elapsed() < SOON => {}
            created => break created?,
        }
        sleep(Duration::from_millis(20)).await;
    };

    let _groundcrew = Groundcrew::builder(&cluster).config_yaml("nodeStartup: {enabled: true}").start().await?;
    let upgraded = |d: &CustomResourceDefinition| d.annotations().contains_key(RELEASE) && is_established(d);
    let after = cluster.wait_for(&definitions, TEMPLATES, "of this release", SOON, upgraded).await?;
    assert_eq!(short_names(&after), short_names(&FlexDaemonsetTemplate::crd()));
    cluster.wait_for(&definitions, RULES, "created and established", SOON, upgraded).await?;
    assert_eq!(templates.get("kept").await?.uid(), before.uid());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_definition_of_a_newer_release_is_left_alone() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let definitions: Definitions = Api::all(cluster.client());
    put(&definitions, Some("99.0.0")).await?;
    let _groundcrew = Groundcrew::builder(&cluster).config_yaml("nodeStartup: {enabled: true}").start().await?;
    // Features are served in the order of their names, so by now the other one was looked at too.
    let there = |d: &CustomResourceDefinition| d.annotations().contains_key(RELEASE);
    cluster.wait_for(&definitions, "warmupconfigs.kube-booster.io", "created", SOON, there).await?;
    assert_eq!(short_names(&definitions.get(TEMPLATES).await?), ["other"]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn definitions_that_somebody_else_manages_are_not_touched() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let definitions: Definitions = Api::all(cluster.client());
    let config = "crds: {manage: false}\nsizing: {enabled: false}\nwarmup: {enabled: false}";
    let groundcrew = Groundcrew::builder(&cluster).config_yaml(config).start().await?;
    groundcrew.wait_metric("groundcrew_leader 1", SOON).await?;
    let tried = cluster.audit_events().await?.into_iter().any(|event| event.is_about("customresourcedefinitions", ""));
    let list = definitions.list(&Default::default()).await?;
    assert!(list.items.is_empty() && !tried);
    Ok(())
}
