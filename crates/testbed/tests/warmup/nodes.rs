//! Real containers on a real node: groundcrew and its agent from their own image, under their own rights.

use std::time::Duration;

use anyhow::Context;
use groundcrew_core::config;
use groundcrew_testbed::objects::{PodExt, pod};
use groundcrew_testbed::{Cluster, Image, Layer};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::support::{GATE, apply, condition, is_gated, reason};

const HOME: &str = "groundcrew-system";
const PATIENCE: Duration = Duration::from_secs(120);

fn since(pod: &Pod, kind: &str) -> Option<Timestamp> {
    let mut all = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let found = all.find(|c| c.type_ == kind && c.status == "True")?;
    found.last_transition_time.as_ref().map(|time| time.0)
}

fn container_id(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.container_statuses.as_ref()?.first()?.container_id.as_deref()
}

fn web(image: &str, revision: &str, requests: &str, duration: &str) -> Value {
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": {
        "replicas": 2, "selector": {"matchLabels": {"app": "web"}},
        "template": {
            "metadata": {"labels": {"app": "web"}, "annotations": {
                "revision": revision,
                "kube-booster.io/warmup": "enabled",
                "kube-booster.io/warmup-requests": requests,
                "kube-booster.io/warmup-duration": duration,
                "kube-booster.io/warmup-endpoint": "/index.html",
            }},
            "spec": {"terminationGracePeriodSeconds": 0, "containers": [{
                "name": "web", "image": image, "imagePullPolicy": "Never",
                "args": ["httpd", "-f", "-p", "8080", "-h", "/www"],
                "ports": [{"containerPort": 8080}],
                "readinessProbe": {"httpGet": {"port": 8080, "path": "/"}, "periodSeconds": 1},
            }]},
        },
    }})
}

/// Ends the container's process from the node, as a crash would.
fn kill_container(id: &str) -> anyhow::Result<()> {
    let id = id.rsplit('/').next().unwrap_or(id);
    for process in std::fs::read_dir("/proc")?.flatten() {
        let groups = std::fs::read_to_string(process.path().join("cgroup")).unwrap_or_default();
        let pid = process.file_name().to_string_lossy().parse().ok().and_then(rustix::process::Pid::from_raw);
        if let (true, Some(pid)) = (groups.contains(id), pid) {
            return Ok(rustix::process::kill_process(pid, rustix::process::Signal::KILL)?);
        }
    }
    anyhow::bail!("no process of container {id}")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deployment_is_ready_only_when_warm_and_rolls_on_without_its_agents() -> anyhow::Result<()> {
    if !Layer::Nodes.available_or_skip()? {
        return Ok(());
    }
    let cluster = Cluster::start(Layer::Nodes).await?;
    let image = Image::groundcrew("groundcrew.test/groundcrew:1")?;
    let server = Image::busybox("groundcrew.test/web:1")?.text("/www/index.html", "hello");
    cluster.load_image(&image).await?;
    cluster.load_image(&server).await?;
    let config = config::load(json!({"warmup": {"agentTimeout": "15s"}}), vec![])?;
    let objects = groundcrew::manifests::objects(&config, HOME, image.name());
    // Rights first: a program that starts before them is refused.
    let is_right = |kind: &str| kind == "Namespace" || kind.contains("Role");
    let rights = objects.iter().filter(|object| object["kind"].as_str().is_some_and(is_right)).cloned().collect();
    apply(&cluster, HOME, rights).await?;
    apply(&cluster, HOME, objects).await?;
    let agents: Api<DaemonSet> = Api::namespaced(cluster.client(), HOME);
    let agents_ready = |set: &DaemonSet| set.status.as_ref().is_some_and(|s| s.number_ready == 1);
    cluster.wait_for(&agents, "groundcrew-agent", "an agent ready", PATIENCE, agents_ready).await?;
    let operators: Api<Deployment> = Api::namespaced(cluster.client(), HOME);
    let serves = |d: &Deployment| d.status.as_ref().is_some_and(|s| s.ready_replicas >= Some(1));
    cluster.wait_for(&operators, "groundcrew", "an operator ready", PATIENCE, serves).await?;
    cluster.webhook_answers().await?;
    let namespace = cluster.namespace("real").await?;
    let pods: Api<Pod> = namespace.api();
    admission_knows_the_agent(&pods).await?;

    let deployments: Api<Deployment> = namespace.api();
    let apply_web = async |object: Value| -> anyhow::Result<()> {
        let patch = Patch::Apply(object);
        deployments.patch("web", &PatchParams::apply("kubectl").force(), &patch).await.map(drop).context("web")
    };
    apply_web(web(server.name(), "1", "4", "3s")).await?;
    let complete = |d: &Deployment| {
        let counts = d.status.as_ref().map(|s| (s.updated_replicas, s.available_replicas, s.replicas));
        counts == Some((Some(2), Some(2), Some(2)))
            && d.status.as_ref().and_then(|s| s.observed_generation) == d.metadata.generation
    };
    cluster.wait_for(&deployments, "web", "rolled out", PATIENCE, complete).await?;
    for pod in pods.list(&ListParams::default().labels("app=web")).await? {
        assert_eq!(reason(&pod), "WarmupComplete", "{}", pod.name_any());
        assert!(is_gated(&pod) && since(&pod, "Ready") >= since(&pod, GATE), "{:?}", pod.status);
    }

    // A container dies, the pod stays: warmed again before it is Ready again.
    let first = pods.list(&ListParams::default().labels("app=web")).await?.items.remove(0);
    let (name, old) = (first.name_any(), container_id(&first).context("no container")?.to_owned());
    let opened = since(&first, GATE);
    kill_container(&old)?;
    let again = |p: &Pod| container_id(p) != Some(&old) && since(p, GATE) > opened && since(p, "Ready").is_some();
    let warm = cluster.wait_for(&pods, &name, "warm and ready again", PATIENCE, again).await?;
    assert_eq!((reason(&warm), warm.uid()), ("WarmupComplete", first.uid()));
    assert!(since(&warm, "Ready") >= since(&warm, GATE));

    // The agents vanish in the middle of a rollout: it completes all the same.
    apply_web(web(server.name(), "2", "60", "2m")).await?;
    let new = |p: &Pod| p.annotations().get("revision").is_some_and(|r| r == "2") && reason(p) == "WarmupRunning";
    let under_way = |pods: &[&Pod]| pods.iter().any(|p| new(p));
    cluster.wait_for_list(&pods, Default::default(), "a warm-up under way", PATIENCE, under_way).await?;
    agents.delete("groundcrew-agent", &DeleteParams::default()).await?;
    cluster.wait_for(&deployments, "web", "rolled out without agents", PATIENCE, complete).await?;
    let left: Vec<Pod> = pods.list(&ListParams::default().labels("app=web")).await?.items;
    let by_leader = |p: &&Pod| condition(p).is_some() && reason(p) == "AgentUnavailable";
    assert!(left.iter().filter(by_leader).count() >= 1, "{left:?}");

    let refused: Vec<_> = cluster
        .audit_events()
        .await?
        .into_iter()
        .filter(|e| e.user.username.starts_with("system:serviceaccount:groundcrew-system:") && e.code() == 403)
        .map(|e| (e.user.username, e.verb, e.request_uri))
        .collect();
    assert!(refused.is_empty(), "{refused:?}");
    Ok(())
}

/// Admission hears of agents through its watch; a dry run tells when it has.
async fn admission_knows_the_agent(pods: &Api<Pod>) -> anyhow::Result<()> {
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let probe =
        pod("probe").annotated("kube-booster.io/warmup", "enabled").annotated("kube-booster.io/warmup-port", "80");
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !is_gated(&pods.create(&dry, &probe).await?) {
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "admission never adds the gate");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Ok(())
}
