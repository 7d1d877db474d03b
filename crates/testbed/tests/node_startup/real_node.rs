//! A real kubelet registers its node while nobody of us lives, and everything that must start there does.

use std::time::Duration;

use anyhow::Context;
use groundcrew_core::config as settings;
use groundcrew_testbed::objects::{PodExt, apply, pod};
use groundcrew_testbed::{Cluster, Image, Layer, Part};
use k8s_openapi::api::admissionregistration::v1::MutatingAdmissionPolicyBinding;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::runtime::watcher;
use serde_json::{Value, json};

use crate::births::births_carry;
use crate::judge;
use crate::support::*;

const HOME: &str = "groundcrew-system";
const PATIENCE: Duration = Duration::from_secs(150);

fn is_ready(pod: &Pod) -> bool {
    let mut conditions = pod.status.iter().flat_map(|s| s.conditions.iter().flatten());
    conditions.any(|c| c.type_ == "Ready" && c.status == "True")
}

fn is_running(pod: &Pod) -> bool {
    pod.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running")
}

fn is_bound(pod: &Pod) -> bool {
    pod.spec.as_ref().is_some_and(|s| s.node_name.is_some())
}

/// Everything `groundcrew manifests` prints, with the feature on.
async fn install(cluster: &Cluster, image: &str) -> anyhow::Result<()> {
    let on = json!({"nodeStartup": {"enabled": true}, "warmup": {"enabled": false}});
    let mut objects = groundcrew::manifests::objects(&settings::load(on, vec![])?, HOME, image);
    for object in objects.iter_mut().filter(|object| object["kind"] == "Deployment") {
        let container = &mut object["spec"]["template"]["spec"]["containers"][0];
        container["imagePullPolicy"] = json!("Never");
        if let Some(env) = container["env"].as_array_mut() {
            env.push(json!({"name": "GROUNDCREW_NODE_STARTUP__ENABLED", "value": "true"}));
            env.push(json!({"name": "GROUNDCREW_WARMUP__ENABLED", "value": "false"}));
        }
    }
    apply(&cluster.client(), HOME, objects).await
}

/// An init DaemonSet whose container is ready once the file `go` is in `dir`.
fn init_daemon_set(image: &str, dir: &std::path::Path) -> Value {
    json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "node-init", "namespace": "kube-system"}, "spec": {
        "selector": {"matchLabels": {"app": "node-init"}},
        "template": {"metadata": {"labels": {"app": "node-init", "startup.k8s.io/component": "init"}}, "spec": {
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"key": KEY, "operator": "Exists"}],
            "volumes": [{"name": "dir", "hostPath": {"path": dir}}],
            "containers": [{
                "name": "init", "image": image, "imagePullPolicy": "Never", "args": ["sleep", "1000"],
                "volumeMounts": [{"name": "dir", "mountPath": "/dir"}],
                "readinessProbe": {"exec": {"command": ["/bin/busybox", "test", "-e", "/dir/go"]}, "periodSeconds": 1},
            }],
        }},
    }})
}

/// The machine is replaced by a new one: its pods and its Node are gone, and it registers itself again.
async fn replace_the_node(cluster: &Cluster, name: &str) -> anyhow::Result<()> {
    cluster.stop(Part::KubeProxy).await?;
    cluster.stop(Part::Kubelet).await?;
    nodes(cluster).delete(name, &DeleteParams::default()).await?;
    let all: Api<Pod> = Api::all(cluster.client());
    for pod in all.list(&ListParams::default().fields(&format!("spec.nodeName={name}"))).await? {
        let pods: Api<Pod> = Api::namespaced(cluster.client(), &pod.namespace().unwrap_or_default());
        pods.delete(&pod.name_any(), &DeleteParams::default().grace_period(0)).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_operator_starts_on_the_only_node_it_holds_and_releases_it_when_its_init_container_is_ready()
-> anyhow::Result<()> {
    if !Layer::Nodes.available_or_skip()? {
        return Ok(());
    }
    let cluster = Cluster::start(Layer::Nodes).await?;
    let result = follow_the_node(&cluster).await;
    cluster.explain(result)
}

async fn follow_the_node(cluster: &Cluster) -> anyhow::Result<()> {
    let node = cluster.info().node.as_ref().context("a real node")?.name.clone();
    let image = Image::groundcrew("groundcrew.test/groundcrew:1")?;
    let agent = Image::busybox("groundcrew.test/agent:1")?;
    cluster.load_image(&image).await?;
    cluster.load_image(&agent).await?;
    install(cluster, image.name()).await?;
    let deployments: Api<Deployment> = Api::namespaced(cluster.client(), HOME);
    let both = |d: &Deployment| d.status.as_ref().and_then(|s| s.ready_replicas) == Some(2);
    cluster.wait_for(&deployments, "groundcrew", "two replicas ready", PATIENCE, both).await?;
    let bindings: Api<MutatingAdmissionPolicyBinding> = Api::all(cluster.client());
    let bound = |all: &[&MutatingAdmissionPolicyBinding]| all.iter().any(|b| b.name_any().contains("node-startup"));
    cluster.wait_for_list(&bindings, watcher::Config::default(), "the policy is bound", PATIENCE, bound).await?;
    // Bound is not yet in force.
    births_carry(cluster, KEY).await?;
    let dir = cluster.info().dir.join("init");
    std::fs::create_dir_all(&dir)?;
    let sets: Api<DaemonSet> = Api::namespaced(cluster.client(), "kube-system");
    sets.create(&PostParams::default(), &parse(init_daemon_set(agent.name(), &dir))).await?;

    replace_the_node(cluster, &node).await?;
    let namespace = cluster.namespace("users").await?;
    let users: Api<Pod> = namespace.api();
    let web = pod("web").with_image(agent.name(), &["/bin/busybox", "sleep", "1000"]);
    users.create(&PostParams::default(), &web).await?;
    cluster.restart(Part::Kubelet).await?;
    let born = cluster.wait_for(&nodes(cluster), &node, "registered", PATIENCE, |_: &Node| true).await?;
    assert!(held(&born), "born as {:?}", keys(&born));
    cluster.restart(Part::KubeProxy).await?;

    let own: Api<Pod> = Api::namespaced(cluster.client(), HOME);
    let up = |pods: &[&Pod]| pods.iter().filter(|p| is_ready(p)).count() == 2;
    cluster
        .wait_for_list(&own, watcher::Config::default(), "the operator is up on the held node", PATIENCE, up)
        .await?;
    let starting = |pods: &[&Pod]| pods.iter().any(|p| is_running(p) && !is_ready(p));
    let labels = watcher::Config::default().labels("app=node-init");
    cluster.wait_for_list(&system_pods(cluster), labels, "the init container runs", PATIENCE, starting).await?;
    assert!(event(cluster, &node, "StartupHeld").await?.contains("kube-system/node-init"));
    assert!(held(&nodes(cluster).get(&node).await?) && !is_bound(&users.get("web").await?));

    std::fs::write(dir.join("go"), "")?;
    let free = cluster.wait_for(&nodes(cluster), &node, "released", PATIENCE, |n| !held(n) && completed(n)).await?;
    assert_eq!(free.uid(), born.uid());
    cluster.wait_for(&users, "web", "runs", PATIENCE, is_running).await?;

    let events = cluster.audit_events().await?;
    let releases = judge::releases(&events)?;
    judge::released_only_when_ready(&events, &releases)?;
    assert_eq!(judge::let_go(&events, &releases).len(), 1);
    let ours = format!("system:serviceaccount:{HOME}:groundcrew");
    let refused: Vec<_> = events
        .iter()
        .filter(|e| e.user.username == ours && e.code() == 403)
        .map(|e| (&e.verb, &e.request_uri))
        .collect();
    assert!(refused.is_empty(), "{refused:?}");
    Ok(())
}
