//! The next version and back, while pods are created all the time; then a cold boot.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use groundcrew_testbed::objects::{PodExt, pod};
use groundcrew_testbed::{AuditEvent, Cluster, Layer, Part, TestNamespace};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Client, ResourceExt};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::cluster::{GATE, Installation, PATIENCE, condition, create_sample, real_node, sample, wait_ready};
use crate::install::admission_knows_the_agent;
use crate::support::HOME;

#[tokio::test(flavor = "multi_thread")]
async fn versions_change_in_either_order_without_a_failed_create_and_a_cold_boot_ends_well() -> anyhow::Result<()> {
    if !Layer::Nodes.available_or_skip()? {
        return Ok(());
    }
    let cluster = Cluster::start(Layer::Nodes).await?;
    let installation = Installation::prepare(&cluster).await?;
    let result = async {
        installation.load_next_version().await?;
        let namespace = cluster.namespace("user").await?;
        installation.apply("1", &values()).await?;
        wait_ready(&installation).await?;
        cluster.webhook_answers().await?;
        up_and_back(&installation, &namespace).await?;
        cold_boot(&installation, &namespace).await
    };
    let result = result.await;
    installation.explain(result).await
}

/// The one webhook of ours that does not fail open, so that a cold boot meets it.
fn values() -> Value {
    json!({"config": {"nodeStartup": {"enabled": true, "engine": "webhook"}}})
}

async fn up_and_back(installation: &Installation<'_>, namespace: &TestNamespace) -> anyhow::Result<()> {
    let cluster = installation.cluster;
    admission_knows_the_agent(namespace).await?;
    let mut web = sample("warmup/http.yaml")?;
    let template = &mut web[0]["spec"]["template"];
    template["metadata"]["annotations"]["kube-booster.io/warmup-duration"] = json!("2s");
    template["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": real_node(cluster)?});
    create_sample(cluster, namespace, web).await?;
    let load = Load::start(cluster.connect().await?, namespace.name());

    // Agents first, then the operator.
    installation.set_agent_image("2").await?;
    roll(cluster, namespace, "new agents, old operator").await?;
    settled(installation, namespace, "1", "2").await?;
    installation.apply("2", &values()).await?;
    roll(cluster, namespace, "all new").await?;
    settled(installation, namespace, "2", "2").await?;

    // Back: the operator first, then the agents.
    let mut waiting = values();
    waiting["agent"] = json!({"updateStrategy": {"type": "OnDelete", "rollingUpdate": null}});
    installation.apply("1", &waiting).await?;
    roll(cluster, namespace, "old operator, new agents").await?;
    settled(installation, namespace, "1", "2").await?;
    let own: Api<Pod> = installation.api();
    let agents = ListParams::default().labels("app.kubernetes.io/component=agent");
    for agent in own.list(&agents).await? {
        own.delete(&agent.name_any(), &DeleteParams::default()).await?;
    }
    roll(cluster, namespace, "all old").await?;
    settled(installation, namespace, "1", "1").await?;

    let created = load.stop().await?;
    assert!(created.pods > 100, "too little load to mean anything: {created:?}");
    // On a busy machine an answer may take longer than the second that the API server waits.
    assert!(created.unanswered.len() * 100 <= created.pods, "pods went past the webhook: {created:?}");
    let stamped = |pods: &[&Pod]| pods.iter().all(|pod| pod.annotations().contains_key("timestamp"));
    let asked = watcher::Config::default().labels("load=true");
    cluster.wait_for_list(&namespace.api(), asked, "every pod has its stamp", PATIENCE, stamped).await?;
    Ok(())
}

/// Everybody runs these versions, and pods are gated again: agents that admission does not know would be no agents.
async fn settled(
    installation: &Installation<'_>,
    namespace: &TestNamespace,
    operator: &str,
    agent: &str,
) -> anyhow::Result<()> {
    installation.wait_images(operator, agent).await?;
    admission_knows_the_agent(namespace).await
}

/// New pods of the Deployment become ready behind their gates, whoever is in charge.
async fn roll(cluster: &Cluster, namespace: &TestNamespace, revision: &str) -> anyhow::Result<()> {
    let deployments: Api<Deployment> = namespace.api();
    let patch = json!({"spec": {"template": {"metadata": {"annotations": {"revision": revision}}}}});
    deployments.patch("web", &PatchParams::default(), &Patch::Merge(patch)).await?;
    let done = |pods: &[&Pod]| {
        let open = |pod: &&&Pod| {
            // A pod that was created while no replica served has no gate, and needs none.
            let gated = pod.spec.as_ref().is_some_and(|spec| spec.readiness_gates.is_some());
            pod.annotations().get("revision").is_some_and(|found| found == revision)
                && condition(pod, "Ready") == Some("True")
                && (!gated || condition(pod, GATE) == Some("True"))
        };
        pods.len() == 2 && pods.iter().filter(open).count() == 2
    };
    let replicas = watcher::Config::default().labels("app=web");
    cluster.wait_for_list(&namespace.api(), replicas, &format!("rolled: {revision}"), PATIENCE, done).await.map(drop)
}

#[derive(Debug, Default)]
struct Created {
    pods: usize,
    /// The API server asked no replica, or got no answer: the webhook fails open, so nothing else would show it.
    unanswered: Vec<String>,
}

/// Creates pods until it is told to stop; nobody schedules them.
struct Load {
    stop: Arc<AtomicBool>,
    task: JoinHandle<anyhow::Result<Created>>,
}

impl Load {
    fn start(client: Client, namespace: &str) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let pods: Api<Pod> = Api::namespaced(client, namespace);
        let stopped = Arc::clone(&stop);
        let task = tokio::spawn(async move {
            let mut done = Created::default();
            while !stopped.load(Ordering::Relaxed) {
                let name = format!("load-{}", done.pods);
                let mut asking = pod(&name).annotated("addtime", "");
                asking.metadata.labels = Some([("load".to_owned(), "true".to_owned())].into());
                asking.spec.get_or_insert_default().scheduler_name = Some("nobody".to_owned());
                let created = pods.create(&PostParams::default(), &asking).await;
                let created = created.with_context(|| format!("create of {name} failed"))?;
                done.pods += 1;
                if !created.annotations().contains_key("timestamp") {
                    done.unanswered.push(format!("{name} at {}", Timestamp::now()));
                }
                sleep(Duration::from_millis(100)).await;
            }
            Ok(done)
        });
        Self { stop, task }
    }

    /// What was created, if no create failed.
    async fn stop(self) -> anyhow::Result<Created> {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await?
    }
}

/// Everything goes, our webhook stays registered; the API server must come up without us, and we after it.
async fn cold_boot(installation: &Installation<'_>, namespace: &TestNamespace) -> anyhow::Result<()> {
    let cluster = installation.cluster;
    let before = containers(installation).await?;
    assert!(before.len() >= 3, "{before:?}");
    let parts = [Part::Kubelet, Part::Scheduler, Part::ControllerManager, Part::Apiserver, Part::Etcd];
    for part in parts {
        cluster.stop(part).await?;
    }
    for (_, container) in &before {
        kill_container(container)?;
    }
    let dark = Timestamp::now();
    cluster.restart(Part::Etcd).await?;
    cluster.start_apiserver().await?;
    // Nobody serves the webhook, and nobody is kept waiting for long.
    let pods: Api<Pod> = namespace.api();
    let began = Instant::now();
    let mut alone = pod("alone").annotated("addtime", "").annotated("kube-booster.io/warmup", "enabled");
    alone.spec.get_or_insert_default().scheduler_name = Some("nobody".to_owned());
    let created = pods.create(&PostParams::default(), &alone).await.context("a pod cannot be created without us")?;
    assert!(!created.annotations().contains_key("timestamp"), "somebody answered");
    assert!(began.elapsed() < Duration::from_secs(30), "it took {:?}", began.elapsed());
    for part in [Part::ControllerManager, Part::Scheduler, Part::Kubelet] {
        cluster.restart(part).await?;
    }
    let again = |pods: &[&Pod]| {
        let up = |pod: &&&Pod| condition(pod, "Ready") == Some("True") && !before.contains(&container_of(pod));
        pods.iter().filter(up).count() == before.len()
    };
    let everybody = watcher::Config::default().labels("app.kubernetes.io/name=groundcrew");
    cluster.wait_for_list(&installation.api(), everybody, "everybody is back", PATIENCE, again).await?;
    cluster.webhook_answers().await?;
    cluster
        .wait_for(&pods, "alone", "the pod from before has its stamp", PATIENCE, |pod: &Pod| {
            pod.annotations().contains_key("timestamp")
        })
        .await?;
    the_kubelet_registers(cluster, dark).await
}

/// Not at first: nobody answers for its node. It runs our pods all the same, and then it is answered that the node is
/// known.
async fn the_kubelet_registers(cluster: &Cluster, since: Timestamp) -> anyhow::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let events = cluster.audit_events().await?;
        let asked = events.iter().filter(|event| {
            event.verb == "create" && event.is_about("nodes", "") && event.user_agent.starts_with("kubelet/")
        });
        let answers: Vec<u16> =
            asked.filter(|event| event.request_received_timestamp > since).map(AuditEvent::code).collect();
        if let [refused, .., known] = answers.as_slice()
            && [201, 409].contains(known)
        {
            assert_eq!(*refused, 500, "{answers:?}");
            return Ok(());
        }
        anyhow::ensure!(Instant::now() < deadline, "the kubelet cannot register: {answers:?}");
        sleep(Duration::from_secs(1)).await;
    }
}

fn container_of(pod: &Pod) -> (String, String) {
    let first =
        pod.status.as_ref().and_then(|status| status.container_statuses.as_ref()?.first()?.container_id.clone());
    (pod.name_any(), first.unwrap_or_default().rsplit('/').next().unwrap_or_default().to_owned())
}

/// Pods of ours and the containers they run.
async fn containers(installation: &Installation<'_>) -> anyhow::Result<Vec<(String, String)>> {
    let own: Api<Pod> = Api::namespaced(installation.cluster.client(), HOME);
    let all = own.list(&ListParams::default().labels("app.kubernetes.io/name=groundcrew")).await?;
    Ok(all.iter().map(container_of).collect())
}

/// Ends a container's processes from the node, as a power cut would.
fn kill_container(id: &str) -> anyhow::Result<()> {
    for process in std::fs::read_dir("/proc")?.flatten() {
        let groups = std::fs::read_to_string(process.path().join("cgroup")).unwrap_or_default();
        let pid = process.file_name().to_string_lossy().parse().ok().and_then(Pid::from_raw);
        if let (true, Some(pid)) = (groups.contains(id), pid) {
            match kill_process(pid, Signal::KILL) {
                // It has ended since it was looked at.
                Err(Errno::SRCH) => {}
                killed => killed?,
            }
        }
    }
    Ok(())
}
