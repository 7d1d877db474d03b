//! The life of a warm-up, from admission to the condition.

use std::collections::BTreeSet;
use std::time::Duration;

use groundcrew_testbed::{Cluster, Groundcrew, Layer};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::events::v1::Event;
use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use serde_json::json;

use crate::configs::{create, install, login};
use crate::support::{
    NODE, QUICK, SOON, Server, add_node, agent, asking, condition, is_gated, is_open, make_ready, message, reason, up,
    warnings,
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
    let settings = [("requests", "5"), ("mode", "asap"), ("duration", "50s"), ("endpoint", "warm?x=1")];

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
async fn whoever_writes_a_bad_annotation_hears_of_it_and_is_not_stopped() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let _operator = Groundcrew::builder(&cluster).start().await?;
    cluster.webhook_answers().await?;
    let namespace = cluster.namespace("warned").await?;
    let bad = json!({"kube-booster.io/warmup": "enabled", "kube-booster.io/warmup-requests": "0",
        "kube-booster.io/warmup-duration": "1.5h"});
    let spec = json!({"containers": [{"name": "main", "image": "none", "ports": [{"containerPort": 80}]}]});
    let metadata = json!({"name": "web", "annotations": bad});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec});
    let template = json!({"metadata": {"labels": {"app": "web"}, "annotations": bad}, "spec": spec});
    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"},
        "spec": {"selector": {"matchLabels": {"app": "web"}}, "template": template}});
    let home = format!("namespaces/{}", namespace.name());
    for (path, object) in
        [(format!("/api/v1/{home}/pods"), pod), (format!("/apis/apps/v1/{home}/deployments"), deployment)]
    {
        // The two webhook configurations come into force one after the other.
        let deadline = tokio::time::Instant::now() + SOON;
        let said = loop {
            let said = warnings(&cluster, &path, &object).await?.join(" ");
            if !said.is_empty() || tokio::time::Instant::now() > deadline {
                break said;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        };
        assert!(
            said.contains("kube-booster.io/warmup-requests: warmup-requests must be at least 1, got 0"),
            "{said:?}"
        );
        assert!(said.contains("warmup-duration must not exceed 5m, got 1h30m0s"), "{said:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn outcomes_are_written_as_documented() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    add_node(&cluster, NODE).await?;
    install(&cluster).await?;
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
    create(&cluster, namespace.name(), "login", login()).await?;
    // Ten seconds for each request: what one answered is told, whatever the machine does meanwhile.
    let quick = [("requests", "2"), ("mode", "asap"), ("duration", "20s")];
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
    // The third follows after a second or two and may be over by now.
    let later = |p: &Pod| (3..50).any(|n| message(p).contains(&format!("; attempt {n} follows")));
    cluster.wait_for(&pods, "closed", "a later attempt", SOON, later).await?;
    // One attempt of each, two of the retried, and at least two of the closed one.
    assert!(broken.hits().len() >= 2 + 4 + 4, "{}", broken.hits().len());
    Ok(())
}
