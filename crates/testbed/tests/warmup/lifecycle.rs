//! The life of a warm-up, from admission to the condition.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use groundcrew_core::pod::Container;
use groundcrew_core::warmup::rules::Rules;
use groundcrew_testbed::{Cluster, Groundcrew, Layer};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::ResourceExt;
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::runtime::watcher;
use serde_json::{Value, json};

use crate::support::{
    NODE, QUICK, SOON, Server, add_node, agent, apply, asking, condition, is_gated, is_open, make_ready, message,
    reason, up,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_is_gated_warmed_opened_and_warmed_again_when_its_container_restarts() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    add_node(&cluster, NODE).await?;
    let _operator = Groundcrew::builder(&cluster).config_yaml(QUICK).start().await?;
    cluster.webhook_answers().await?;
    let namespace = cluster.namespace("life").await?;
    let pods: Api<Pod> = namespace.api();
    let server = Server::start().await?;
    let settings = [("requests", "5"), ("duration", "1s"), ("endpoint", "warm?x=1")];

    let early = pods.create(&PostParams::default(), &asking("early", &server, &settings)).await?;
    assert!(!is_gated(&early), "no agent lives, so nobody could open the gate");

    let agent = agent(&cluster, "agent").await?;
    let mut attempt = 0;
    let created = loop {
        // Admission hears of the agent through its watch.
        let created =
            pods.create(&PostParams::default(), &asking(&format!("web-{attempt}"), &server, &settings)).await?;
        if is_gated(&created) {
            break created;
        }
        attempt += 1;
        anyhow::ensure!(attempt < 100, "the gate is never added");
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let name = created.name_any();
    make_ready(&pods, &name, "c1").await?;
    let warm = cluster.wait_for(&pods, &name, "gate open", SOON, is_open).await?;
    assert_eq!((reason(&warm), server.hits().len()), ("WarmupComplete", 5));
    assert!(
        message(&warm).starts_with("warmup completed: 5/5 requests succeeded (100.0%), P50="),
        "{}",
        message(&warm)
    );
    let head = &server.hits()[0].head;
    for line in ["get /warm?x=1 http/1.1", "user-agent: kube-booster/1.0", "x-warmup-request: true", "traceparent: 00-"]
    {
        assert!(head.contains(line), "{head}");
    }
    let kinds: Vec<&str> =
        warm.status.iter().flat_map(|s| s.conditions.iter().flatten()).map(|c| c.type_.as_str()).collect();
    assert!(kinds.contains(&"ContainersReady") && kinds.contains(&"Initialized"), "{kinds:?}");
    let events: Api<Event> = namespace.api();
    let all = ["WarmupQueued", "WarmupStarted", "WarmupCompleted"];
    let said = |events: &[&Event]| {
        let reasons: BTreeSet<&str> = events.iter().filter_map(|e| e.reason.as_deref()).collect();
        all.iter().all(|reason| reasons.contains(reason))
    };
    cluster.wait_for_list(&events, watcher::Config::default(), "events", SOON, said).await?;
    agent
        .wait_metric(
            &format!("kube_booster_warmup_total{{namespace=\"{}\",result=\"success\"}} 1", namespace.name()),
            SOON,
        )
        .await?;

    // Nothing changes, nothing is sent or written; then the container dies and comes back.
    let since = condition(&warm).and_then(|c| c.last_transition_time.clone());
    tokio::time::sleep(Duration::from_secs(2)).await;
    let still = pods.get(&name).await?;
    assert_eq!((server.hits().len(), condition(&still).and_then(|c| c.last_transition_time.clone())), (5, since));
    let dead = json!({"status": {"conditions": [{"type": "ContainersReady", "status": "False"}],
        "containerStatuses": [{"name": "main", "ready": false, "restartCount": 0, "image": "none", "imageID": "none",
            "containerID": "containerd://c1", "state": {"terminated": {"exitCode": 1}}}]}});
    pods.patch_status(&name, &PatchParams::default(), &Patch::Strategic(dead)).await?;
    cluster.wait_for(&pods, &name, "stale", SOON, |p| reason(p) == "WarmupStale" && !is_open(p)).await?;
    make_ready(&pods, &name, "c2").await?;
    cluster.wait_for(&pods, &name, "warm again", SOON, is_open).await?;
    assert_eq!(server.hits().len(), 10);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn outcomes_are_written_as_documented() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    add_node(&cluster, NODE).await?;
    install_warmup_config(&cluster).await?;
    let _agent = agent(&cluster, "agent").await?;
    let namespace = cluster.namespace("outcome").await?;
    let pods: Api<Pod> = namespace.api();
    let broken = Server::answering(|_, _| (500, String::new())).await?;
    let shop = Server::answering(|head, body| match head.split(' ').nth(1).unwrap_or_default() {
        "/login" if body == "me" => (201, r#"{"auth":{"token":"s3cret"}}"#.to_owned()),
        "/cart" if head.contains("authorization: bearer s3cret") => (200, String::new()),
        _ => (401, String::new()),
    })
    .await?;
    create_warmup_config(&cluster, namespace.name()).await?;
    let quick = [("requests", "2"), ("duration", "1s")];
    let with = |extra: &[(&'static str, &'static str)]| [&quick[..], extra].concat();

    up(&pods, asking("fails-open", &broken, &with(&[]))).await?;
    up(&pods, asking("retried", &broken, &with(&[("retries", "1")]))).await?;
    up(&pods, asking("closed", &broken, &with(&[("failure-policy", "closed")]))).await?;
    up(&pods, asking("bad", &broken, &[("requests", "0")])).await?;
    up(&pods, asking("no-config", &shop, &with(&[("config", "nowhere")]))).await?;
    up(&pods, asking("steps", &shop, &with(&[("config", "login")]))).await?;

    let open = |name: &'static str| cluster.wait_for(&pods, name, "gate open", SOON, is_open);
    let prefix = "Warmup failed but pod marked ready (fail-open): ";
    assert_eq!(message(&open("fails-open").await?), format!("{prefix}0/2 requests succeeded: status 500 (2)"));
    assert_eq!(message(&open("bad").await?), format!("{prefix}warmup-requests must be at least 1, got 0"));
    let missing = "WarmupConfig \"nowhere\" does not exist in the pod's namespace";
    assert_eq!(message(&open("no-config").await?), format!("{prefix}{missing}"));
    let steps = open("steps").await?;
    assert_eq!((reason(&steps), shop.hits().len()), ("WarmupComplete", 4), "{}", message(&steps));
    assert_eq!(reason(&open("retried").await?), "WarmupFailedOpen");
    let closed = cluster.wait_for(&pods, "closed", "failed", SOON, |p| reason(p) == "WarmupFailed").await?;
    assert!(!is_open(&closed) && message(&closed).contains(" follows at 20"), "{}", message(&closed));
    cluster.wait_for(&pods, "closed", "a later attempt", SOON, |p| message(p).contains("; attempt 3 follows")).await?;
    // One attempt of each, two of the retried, and at least two of the closed one.
    assert!(broken.hits().len() >= 2 + 4 + 4, "{}", broken.hits().len());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_samples_are_accepted() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    install_warmup_config(&cluster).await?;
    let namespace = cluster.namespace("samples").await?;
    create_warmup_config(&cluster, namespace.name()).await?;
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/samples");
    let mut seen = 0;
    for file in
        std::fs::read_dir(directory)?.flatten().filter(|f| f.file_name().to_string_lossy().starts_with("warmup"))
    {
        let text = std::fs::read_to_string(file.path())?;
        let objects: Vec<Value> = serde_saphyr::from_multiple(&text)?;
        seen += objects.len();
        for object in &objects {
            let annotations =
                object.pointer("/spec/template/metadata/annotations").or(object.pointer("/metadata/annotations"));
            let containers = object.pointer("/spec/template/spec/containers").or(object.pointer("/spec/containers"));
            if let (Some(annotations), Some(containers)) = (annotations, containers) {
                let annotations: BTreeMap<String, String> = serde_json::from_value(annotations.clone())?;
                let containers: Vec<Container<String>> = serde_json::from_value(containers.clone())?;
                Rules::read(&annotations, &containers)?;
            }
        }
        apply(&cluster, namespace.name(), objects).await?;
    }
    assert_eq!(seen, 4);
    Ok(())
}

async fn install_warmup_config(cluster: &Cluster) -> anyhow::Result<()> {
    let crds: Api<CustomResourceDefinition> = Api::all(cluster.client());
    let crd = serde_json::from_value(groundcrew::warmup::manifests::warmup_config())?;
    crds.create(&PostParams::default(), &crd).await?;
    let established = |crd: &CustomResourceDefinition| {
        let conditions = crd.status.iter().flat_map(|status| status.conditions.iter().flatten());
        conditions.into_iter().any(|c| c.type_ == "Established" && c.status == "True")
    };
    cluster.wait_for(&crds, "warmupconfigs.kube-booster.io", "established", SOON, established).await?;
    Ok(())
}

fn configs(cluster: &Cluster, namespace: &str) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("kube-booster.io", "v1alpha1", "WarmupConfig");
    Api::namespaced_with(cluster.client(), namespace, &ApiResource::from_gvk_with_plural(&kind, "warmupconfigs"))
}

async fn create_warmup_config(cluster: &Cluster, namespace: &str) -> anyhow::Result<()> {
    let api = configs(cluster, namespace);
    let object = |name: &str, spec: Value| -> anyhow::Result<DynamicObject> {
        let object = json!({"apiVersion": "kube-booster.io/v1alpha1", "kind": "WarmupConfig", "metadata": {"name": name}, "spec": spec});
        Ok(serde_json::from_value(object)?)
    };
    let login = json!({"steps": [
        {"name": "login", "requests": [{"name": "token", "method": "POST", "endpoint": "/login", "body": "me",
            "expectedStatus": 201, "extract": {"token": "$.auth.token"}}]},
        {"name": "use", "requests": [{"name": "cart", "endpoint": "/cart", "count": 3,
            "headers": {"Authorization": "Bearer {{token}}"}}]},
    ]});
    let deadline = tokio::time::Instant::now() + SOON;
    // Established comes a moment before the API server serves it.
    while let Err(e) = api.list(&ListParams::default()).await {
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "WarmupConfigs are never served: {e}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let created = api.create(&PostParams::default(), &object("login", login)?).await?;
    assert_eq!(created.data["spec"]["timeout"], "120s");
    assert_eq!(created.data["spec"]["steps"][0]["timeout"], "30s");
    assert_eq!(created.data["spec"]["steps"][0]["requests"][0]["count"], 1);
    let step = |request: Value| json!({"steps": [{"name": "s", "requests": [request]}]});
    let headers: Value = (0..51).map(|i| (format!("h{i}"), json!("v"))).collect::<serde_json::Map<_, _>>().into();
    for bad in [
        json!({"steps": []}),
        json!({"steps": [{"name": "s", "requests": []}]}),
        json!({"timeout": "6m", "steps": [{"name": "s", "requests": [{"name": "r"}]}]}),
        step(json!({"name": "r", "count": 0})),
        step(json!({"name": "r", "count": 12_001})),
        step(json!({"name": "r", "body": "x".repeat(65_537)})),
        step(json!({"name": "r", "headers": headers})),
        step(json!({"name": "r", "extract": {"a": "a.b"}})),
        step(json!({"name": "r", "protocol": "ftp"})),
    ] {
        let refused = api.create(&PostParams::default(), &object("bad", bad.clone())?).await;
        assert!(refused.is_err(), "{bad}");
    }
    Ok(())
}
