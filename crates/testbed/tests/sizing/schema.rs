use groundcrew_testbed::Layer;
use groundcrew_testbed::objects::sample;
use kube::{Client, Error};

use super::*;

/// Untyped, so that what is wrong goes over the wire as it is written.
fn raw(client: &Client) -> Api<DynamicObject> {
    Api::all_with(client.clone(), &ApiResource::erase::<FlexDaemonsetTemplate>(&()))
}

async fn refusal(client: &Client, spec: &Value) -> anyhow::Result<String> {
    let object: DynamicObject = serde_json::from_value(json!({
        "apiVersion": "flexdaemonsets.xai/v1alpha1", "kind": "FlexDaemonsetTemplate",
        "metadata": {"generateName": "t-"}, "spec": spec,
    }))?;
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    match raw(client).create(&dry, &object).await {
        Ok(_) => Ok(String::new()),
        Err(Error::Api(status)) => Ok(status.message.clone()),
        Err(error) => Err(error.into()),
    }
}

fn with(changes: &Value) -> Value {
    let mut spec = percent(10, 15, 5);
    for (field, value) in changes.as_object().expect("fields") {
        spec[field] = value.clone();
    }
    spec
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_refuses_what_could_not_be_used_and_says_why() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    install_crd(&cluster).await?;
    let client = cluster.client();
    let cases = [
        (
            json!({"cpuPercentage": 0}),
            "spec.cpuPercentage: Invalid value: 0: spec.cpuPercentage in body should be greater than or equal to 1",
        ),
        (json!({"memoryPercentage": 101}), "spec.memoryPercentage in body should be less than or equal to 100"),
        (json!({"storagePercentage": null}), "spec.storagePercentage: Required value"),
        (json!({"cpuPercentage": 10.5}), "spec.cpuPercentage in body must be of type int"),
        (
            json!({"minCPU": "abc"}),
            "spec.minCPU: Invalid value: \"abc\": must be a quantity from 0 up, like 100m or 128Mi",
        ),
        (json!({"minMemory": "-1"}), "spec.minMemory: Invalid value: \"-1\": must be a quantity from 0 up"),
        (json!({"maxStorage": "0"}), "spec.maxStorage: Invalid value: \"0\": must be a quantity above 0"),
        (json!({"maxCPU": "--1"}), "spec.maxCPU: Invalid value: \"--1\": must be a quantity above 0"),
        (json!({"minCPU": "2", "maxCPU": "1500m"}), "minCPU must not be above maxCPU"),
        (json!({"minMemory": "1Gi", "maxMemory": "1023Mi"}), "minMemory must not be above maxMemory"),
        (json!({"minStorage": "2k", "maxStorage": "1.9k"}), "minStorage must not be above maxStorage"),
        (json!({"distribution": "Fair"}), "spec.distribution: Unsupported value: \"Fair\""),
    ];
    for (changes, message) in cases {
        let refused = refusal(&client, &with(&changes)).await?;
        assert!(refused.contains(message), "{changes}: {refused:?}");
    }
    for fine in [
        json!({}),
        json!({"minCPU": "", "maxCPU": ""}),
        json!({"minCPU": "0", "maxCPU": "0.5"}),
        json!({"minMemory": "1Gi", "maxMemory": "1073741824"}),
        json!({"minStorage": "1e3", "distribution": "PerContainer"}),
    ] {
        assert_eq!(refusal(&client, &with(&fine)).await?, "", "{fine}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn samples_and_objects_of_the_original_apply_unchanged() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let templates = install_crd(&cluster).await?;
    let namespace = cluster.namespace("samples").await?;
    for file in ["template.yaml", "daemonset.yaml", "shared-by-two.yaml", "from-flexdaemonsets.yaml"] {
        for object in sample(&format!("sizing/{file}"))? {
            let stored = if object["kind"] == "DaemonSet" {
                let set: DaemonSet = serde_json::from_value(object.clone())?;
                serde_json::to_value(namespace.api::<DaemonSet>().create(&PostParams::default(), &set).await?)?
            } else {
                let untyped: DynamicObject = serde_json::from_value(object.clone())?;
                serde_json::to_value(raw(&cluster.client()).create(&PostParams::default(), &untyped).await?)?
            };
            let Value::Object(fields) = &object["spec"] else { anyhow::bail!("{file} has no spec") };
            for (field, value) in fields.iter().filter(|_| object["kind"] != "DaemonSet") {
                assert_eq!(&stored["spec"][field], value, "{file}: {field}");
            }
        }
    }
    let original = templates.get("default-resource-percentages").await?;
    assert!(original.spec.read().is_ok());
    assert_eq!(serde_json::to_value(original.spec.distribution)?, json!("Pod"), "the default is written");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_without_the_crd_is_ready_and_takes_it_up_when_it_comes() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let groundcrew = Groundcrew::builder(&cluster).config_yaml("crds: {manage: false}").start().await?;
    assert!(groundcrew.log()?.contains("is not installed"));
    let templates = install_crd(&cluster).await?;
    templates.create(&PostParams::default(), &template("late", percent(1, 2, 3))).await?;
    let ready = |t: &FlexDaemonsetTemplate| {
        let conditions = t.status.iter().flat_map(|status| &status.conditions);
        conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True" && c.reason == "Unused")
    };
    cluster.wait_for(&templates, "late", "seen", SOON, ready).await?;
    Ok(())
}
