//! WarmupConfigs as the API server takes or refuses them, and the samples.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context;
use groundcrew::warmup::crd::WarmupConfig;
use groundcrew_core::pod::Container;
use groundcrew_core::warmup::rules::Rules;
use groundcrew_core::warmup::scenario::Scenario;
use groundcrew_testbed::{Cluster, Layer, repository};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use kube::api::{Api, ListParams, PostParams};
use rstest::rstest;
use serde_json::{Value, json};

use crate::support::{SOON, apply};

/// Installs the kind and waits until it is served.
pub async fn install(cluster: &Cluster) -> anyhow::Result<()> {
    let crds: Api<CustomResourceDefinition> = Api::all(cluster.client());
    crds.create(&PostParams::default(), &WarmupConfig::crd()).await?;
    let configs: Api<WarmupConfig> = Api::all(cluster.client());
    let deadline = tokio::time::Instant::now() + SOON;
    while let Err(e) = configs.list(&ListParams::default()).await {
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "WarmupConfigs are never served: {e}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

pub async fn create(cluster: &Cluster, namespace: &str, name: &str, spec: Value) -> kube::Result<WarmupConfig> {
    let api: Api<kube::api::DynamicObject> =
        Api::namespaced_with(cluster.client(), namespace, &WarmupConfig::api_resource());
    let object = json!({
        "apiVersion": "kube-booster.io/v1alpha1", "kind": "WarmupConfig", "metadata": {"name": name}, "spec": spec,
    });
    let object = serde_json::from_value(object).map_err(kube::Error::SerdeError)?;
    api.create(&PostParams::default(), &object).await?;
    Api::namespaced(cluster.client(), namespace).get(name).await
}

/// Logs in and uses the token.
pub fn login() -> Value {
    json!({"steps": [
        {"name": "login", "requests": [{"name": "token", "method": "POST", "endpoint": "/login", "body": "me",
            "expectedStatus": 201, "extract": {"token": "$.auth.token"}}]},
        {"name": "use", "requests": [{"name": "cart", "endpoint": "/cart", "count": 3,
            "headers": {"Authorization": "Bearer {{token}}"}}]},
    ]})
}

fn step(request: Value) -> Value {
    json!({"steps": [{"name": "s", "requests": [request]}]})
}

#[tokio::test(flavor = "multi_thread")]
async fn the_schema_fills_defaults_in_and_refuses_what_could_never_be_sent() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    install(&cluster).await?;
    let namespace = cluster.namespace("schema").await?;
    let spec = create(&cluster, namespace.name(), "login", login()).await?.spec.0;
    assert_eq!(spec.timeout.as_deref(), Some("120s"));
    assert_eq!(spec.steps[0].timeout.as_deref(), Some("30s"));
    let request = &spec.steps[0].requests[0];
    assert_eq!((request.count, request.expected_status), (Some(1), Some(201)));
    Scenario::read(&spec).map_err(anyhow::Error::msg)?;

    for (i, endpoint) in
        ["", "/", "warm", "/a?b=http://c:1/", "?q=1", "{{next}}", "/u/{{id}}?v={{id}}"].iter().enumerate()
    {
        create(&cluster, namespace.name(), &format!("good-{i}"), step(json!({"name": "r", "endpoint": endpoint})))
            .await
            .with_context(|| format!("{endpoint:?}"))?;
    }
    let headers: Value = (0..51).map(|i| (format!("h{i}"), json!("v"))).collect::<serde_json::Map<_, _>>().into();
    let one = json!([{"name": "r"}]);
    for bad in [
        json!({}),
        json!({"steps": []}),
        json!({"steps": [{"name": "s", "requests": []}]}),
        json!({"steps": [{"name": "", "requests": one}]}),
        json!({"timeout": "6m", "steps": [{"name": "s", "requests": one}]}),
        json!({"timeout": "0s", "steps": [{"name": "s", "requests": one}]}),
        json!({"timeout": "soon", "steps": [{"name": "s", "requests": one}]}),
        json!({"steps": [{"name": "s", "timeout": "5m1s", "requests": one}]}),
        json!({"steps": [{"name": "s", "timeout": "0s", "requests": one}]}),
        step(json!({"name": "r", "count": 0})),
        step(json!({"name": "r", "count": 12_001})),
        step(json!({"name": "r", "body": "x".repeat(65_537)})),
        step(json!({"name": "r", "headers": headers})),
        step(json!({"name": "r", "headers": {"X": "a\r\nHost: evil"}})),
        step(json!({"name": "r", "extract": {"a": "a.b"}})),
        step(json!({"name": "r", "protocol": "ftp"})),
        step(json!({"name": "r", "method": "GET /x"})),
        step(json!({"name": "r", "grpcMethod": "Check"})),
        step(json!({"name": "r", "expectedStatus": 99})),
        step(json!({"name": "r", "expectedStatus": 600})),
        step(json!({"name": "r", "endpoint": "http://evil/"})),
        step(json!({"name": "r", "endpoint": "evil:80/"})),
        step(json!({"name": "r", "endpoint": "//evil/"})),
        step(json!({"name": "r", "endpoint": "/@evil"})),
        step(json!({"name": "r", "endpoint": "/a\r\nHost: evil"})),
        step(json!({"name": "r", "endpoint": "/".to_owned() + &"x".repeat(8192)})),
    ] {
        match create(&cluster, namespace.name(), "bad", bad.clone()).await {
            Err(kube::Error::Api(status)) if status.code == 422 => {}
            other => panic!("{bad}: {other:?}"),
        }
    }
    samples_apply(&cluster, namespace.name()).await
}

async fn samples_apply(cluster: &Cluster, namespace: &str) -> anyhow::Result<()> {
    for file in ["http.yaml", "grpc.yaml", "config.yaml", "closed.yaml", "converge.yaml", "from-kube-booster.yaml"] {
        apply(cluster, namespace, sample(file)?).await.context(file)?;
    }
    Ok(())
}

fn sample(file: &str) -> anyhow::Result<Vec<Value>> {
    groundcrew_testbed::objects::sample(&format!("warmup/{file}"))
}

#[rstest]
#[case("http.yaml", 1)]
#[case("grpc.yaml", 1)]
#[case("config.yaml", 2)]
#[case("closed.yaml", 1)]
#[case("converge.yaml", 1)]
#[case("from-kube-booster.yaml", 1)]
fn a_sample_says_nothing_that_is_not_understood(#[case] file: &str, #[case] objects: usize) -> anyhow::Result<()> {
    let sample = sample(file)?;
    assert_eq!(sample.len(), objects);
    for object in sample {
        if object["kind"] == "WarmupConfig" {
            Scenario::read(&serde_json::from_value(object["spec"].clone())?).map_err(anyhow::Error::msg)?;
            continue;
        }
        let template = object.pointer("/spec/template").unwrap_or(&object);
        let annotations: BTreeMap<String, String> =
            serde_json::from_value(template["metadata"]["annotations"].clone())?;
        let containers: Vec<Container<String>> = serde_json::from_value(template["spec"]["containers"].clone())?;
        assert_eq!(annotations.get("kube-booster.io/warmup").map(String::as_str), Some("enabled"));
        Rules::read(&annotations, &containers)?;
    }
    Ok(())
}

#[test]
fn every_sample_is_tested() -> anyhow::Result<()> {
    assert_eq!(std::fs::read_dir(repository().join("deploy/samples/warmup"))?.count(), 6);
    Ok(())
}
