use anyhow::Context;
use futures::{StreamExt, TryStreamExt, stream};
use groundcrew_core::sizing::{Amounts, PerResource, Raw, Resource, Template};
use groundcrew_testbed::{KwokNode, Layer, TestNamespace, our_writes};
use k8s_openapi::api::core::v1::{ContainerStatus, Node};
use kube::api::ListParams;

use super::*;

const NODES: usize = 300;
/// Name, cpu, memory and ephemeral storage; what nodes of clouds report is rarely round.
const KINDS: [[&str; 4]; 6] = [
    ["edge", "940m", "512Mi", "20Gi"],
    ["small", "1930m", "7484420Ki", "18242267924"],
    ["medium", "4", "16Gi", "100Gi"],
    ["large", "15890m", "60Gi", "200Gi"],
    ["huge", "63770m", "248Gi", "400Gi"],
    ["metal", "95690m", "740Gi", "1788Gi"],
];
/// So long is a fleet at rest watched.
const QUIET: Duration = Duration::from_secs(6);

struct Fleet {
    cluster: Cluster,
    templates: Templates,
    groundcrew: Groundcrew,
    namespace: TestNamespace,
}

async fn fleet(nodes: usize) -> anyhow::Result<Fleet> {
    let cluster = Cluster::start(Layer::Controllers).await?;
    let (templates, groundcrew) = start(&cluster).await?;
    let add = |at: usize| {
        let [kind, cpu, memory, storage] = KINDS[at % KINDS.len()];
        let node = KwokNode::new(&format!("{kind}-{at}")).allocatable("cpu", cpu).allocatable("memory", memory);
        cluster.add_kwok_node(node.allocatable("ephemeral-storage", storage))
    };
    stream::iter(0..nodes).map(add).buffer_unordered(8).try_for_each(async |_| Ok(())).await?;
    let namespace = cluster.namespace("fleet").await?;
    Ok(Fleet { cluster, templates, groundcrew, namespace })
}

/// What a template gives on a node, by the rule itself: share, then minimum.
fn right(node: &Node, cpu: u8, memory: u8, storage: u8) -> Amounts {
    let percent = PerResource { cpu: cpu.into(), memory: memory.into(), storage: storage.into() };
    let min = PerResource { cpu: Some("100m"), memory: Some("128Mi"), storage: Some("1Gi") };
    let template = Template::read(&Raw { percent, min, ..Raw::default() }).expect("a template");
    let allocatable = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
    template.totals(&Amounts::allocatable(&allocatable).expect("readable"))
}

fn spec(cpu: u8, memory: u8, storage: u8) -> Value {
    let mut spec = percent(cpu, memory, storage);
    for (field, text) in [("minCPU", "100m"), ("minMemory", "128Mi"), ("minStorage", "1Gi")] {
        spec[field] = json!(text);
    }
    spec
}

fn has(pod: &Pod) -> Amounts {
    let requirements = resources(pod, 0);
    assert_eq!(requirements.requests, requirements.limits, "{}", pod.name_any());
    Amounts::declared(&requirements.requests.as_ref())
}

fn node_of(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

fn running(pods: &[&Pod], count: usize) -> bool {
    let runs = |pod: &&&Pod| pod.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running");
    pods.iter().filter(runs).count() == count
}

impl Fleet {
    async fn nodes(&self) -> anyhow::Result<BTreeMap<String, Node>> {
        let nodes = Api::<Node>::all(self.cluster.client()).list(&ListParams::default()).await?;
        Ok(nodes.into_iter().map(|node| (node.name_any(), node)).collect())
    }

    async fn create_set(&self, name: &str) -> anyhow::Result<()> {
        create_known(&self.cluster, &self.templates, &self.namespace.api(), daemon_set(name, Some("t"))).await
    }

    async fn pods(&self, set: &str, count: usize) -> anyhow::Result<Vec<Pod>> {
        let pods: Api<Pod> = self.namespace.api();
        let config = watcher::Config::default().labels(&format!("app={set}"));
        wait_reviewed(&self.cluster, &pods, config, "all pods run", |pods| running(pods, count)).await
    }

    async fn wait_sizes(&self, set: &str, what: &str, right: impl Fn(&Pod) -> bool) -> anyhow::Result<Vec<Pod>> {
        let pods: Api<Pod> = self.namespace.api();
        let config = watcher::Config::default().labels(&format!("app={set}"));
        self.cluster.wait_for_list(&pods, config, what, LONG, |pods| pods.iter().all(|pod| right(pod))).await
    }

    /// A kubelet that can resize says so by reporting what runs; kwok does not, and is helped out.
    async fn play_kubelet(&self, pods: &[Pod]) -> anyhow::Result<()> {
        let api: Api<Pod> = self.namespace.api();
        let report = |pod: Pod| {
            let api = api.clone();
            async move {
                let reported = |mut status: ContainerStatus| {
                    status.resources = Some(resources(&pod, 0));
                    status.allocated_resources = resources(&pod, 0).requests;
                    status
                };
                let statuses = pod.status.clone().and_then(|status| status.container_statuses).unwrap_or_default();
                let statuses: Vec<_> = statuses.into_iter().map(reported).collect();
                let body = json!({"status": {"containerStatuses": statuses}});
                api.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Strategic(body)).await
            }
        };
        stream::iter(pods.to_vec()).map(report).buffer_unordered(8).try_for_each(async |_| Ok(())).await?;
        Ok(())
    }

    async fn our_resizes(&self) -> anyhow::Result<usize> {
        let events = self.cluster.audit_events().await?;
        let ours = |e: &&AuditEvent| e.user_agent.starts_with("groundcrew/");
        Ok(events.iter().filter(ours).filter(|e| e.is_about("pods", "resize") && e.is_committed_write()).count())
    }

    /// A write is seen by others a moment before it is in the log.
    async fn expect_resizes(&self, expected: usize, why: &str) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            let made = self.our_resizes().await?;
            if made >= expected || began.elapsed() > SOON {
                assert_eq!(made, expected, "{why}");
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    async fn wait_status(&self, name: &str, what: &str, holds: impl Fn(&Value) -> bool) -> anyhow::Result<Value> {
        let holds = |template: &FlexDaemonsetTemplate| holds(&json!(template.status));
        let template = self.cluster.wait_for(&self.templates, name, what, LONG, holds).await?;
        Ok(json!(template.status))
    }
}

fn condition<'a>(status: &'a Value, kind: &str) -> &'a Value {
    let conditions = status["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
    conditions.iter().find(|condition| condition["type"] == kind).unwrap_or(&Value::Null)
}

fn uids(pods: &[Pod]) -> BTreeSet<String> {
    pods.iter().filter_map(ResourceExt::uid).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn three_hundred_nodes_of_six_sizes_get_exact_pods_which_follow_in_place() -> anyhow::Result<()> {
    let fleet = fleet(NODES).await?;
    let nodes = fleet.nodes().await?;
    fleet.templates.create(&PostParams::default(), &template("t", spec(10, 15, 5))).await?;
    fleet.create_set("agent").await?;
    let born = fleet.pods("agent", NODES).await?;
    let on = |pod: &Pod| nodes.get(node_of(pod)).cloned().unwrap_or_default();
    for pod in &born {
        assert_eq!(has(pod), right(&on(pod), 10, 15, 5), "{} at birth", node_of(pod));
    }
    assert_eq!(fleet.our_resizes().await?, 0, "right from the start");
    fleet.play_kubelet(&born).await?;
    let used = |status: &Value| status["pods"] == NODES && status["podsResizing"] == 0;
    let status = fleet.wait_status("t", "every pod is counted", used).await?;
    assert_eq!(status["daemonSets"], 1);
    assert_eq!(condition(&status, "Ready")["status"], "True");
    assert_eq!(condition(&status, "ResizePending")["status"], "False");

    // 10 to 12 percent: every pod follows, none is replaced.
    let patch = Patch::Merge(json!({"spec": {"cpuPercentage": 12}}));
    fleet.templates.patch("t", &PatchParams::default(), &patch).await?;
    let cpu = |pod: &Pod| has(pod).of(Resource::Cpu) == right(&on(pod), 12, 15, 5).of(Resource::Cpu);
    let resized = fleet.wait_sizes("agent", "12 % of every node", cpu).await?;
    assert_eq!(uids(&resized), uids(&born), "the same pods");
    for pod in &resized {
        let restarts = pod.status.iter().flat_map(|s| s.container_statuses.iter().flatten()).map(|c| c.restart_count);
        assert_eq!(restarts.sum::<i32>(), 0);
        assert_eq!(has(pod), Amounts { cpu: right(&on(pod), 12, 15, 5).cpu, ..has(pod) });
    }
    fleet.wait_status("t", "nothing is left to do", |s| condition(s, "ResizePending")["status"] == "False").await?;
    // Nodes held at their minimum have nothing to change.
    let changed = born.iter().zip(&resized).filter(|(a, b)| has(a) != has(b)).count();
    fleet.expect_resizes(changed, "one write for each pod that changed").await?;

    // One node grows: its pod follows, the others stay.
    let node = node_of(&resized[0]).to_owned();
    let grown = json!({"status": {"allocatable": {"cpu": "100"}, "capacity": {"cpu": "100"}}});
    Api::<Node>::all(fleet.cluster.client()).patch_status(&node, &PatchParams::default(), &Patch::Merge(grown)).await?;
    let twelve = |pod: &Pod| node_of(pod) != node || has(pod).of(Resource::Cpu) == Some(12_000);
    fleet.wait_sizes("agent", "12 of its 100 cpus", twelve).await?;
    fleet.wait_status("t", "settled", |s| condition(s, "ResizePending")["status"] == "False").await?;
    fleet.expect_resizes(changed + 1, "one more").await?;

    // The template goes: nothing breaks, and the next pod runs unsized.
    fleet.templates.delete("t", &DeleteParams::default()).await?;
    wait_event(&fleet.cluster, fleet.namespace.name(), "SizingFailed", "agent").await?;
    let pods: Api<Pod> = fleet.namespace.api();
    let gone = resized[1].name_any();
    pods.delete(&gone, &DeleteParams::default().grace_period(0)).await?;
    fleet.cluster.wait_gone(&pods, &gone, LONG).await?;
    let after = fleet.pods("agent", NODES).await?;
    let fresh = after.iter().find(|pod| node_of(pod) == node_of(&resized[1])).context("replaced")?;
    assert!(has(fresh).is_empty());
    let kept = after.iter().filter(|pod| uids(&resized).contains(&pod.uid().unwrap_or_default())).count();
    assert_eq!(kept, NODES - 1, "nobody else was touched");
    assert_eq!(fleet.our_resizes().await?, changed + 1);
    assert!(fleet.groundcrew.metrics().await?.contains("groundcrew_sizing_pods"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_change_in_place_is_counted_and_never_forced() -> anyhow::Result<()> {
    const FEW: usize = 12;
    let fleet = fleet(FEW).await?;
    fleet.templates.create(&PostParams::default(), &template("t", spec(10, 15, 5))).await?;
    let sets = fleet.namespace.api::<DaemonSet>();
    sets.create(&PostParams::default(), &daemon_set("agent", None)).await?;
    let born = fleet.pods("agent", FEW).await?;
    assert!(born.iter().all(|pod| has(pod).is_empty()));
    fleet.play_kubelet(&born).await?;

    // The pods are BestEffort and would become Guaranteed: they wait for their next start.
    let annotation = json!({"metadata": {"annotations": {"flexdaemonsets.xai/resource-template": "t"}}});
    sets.patch("agent", &PatchParams::default(), &Patch::Merge(annotation)).await?;
    let status = fleet.wait_status("t", "all need a restart", |s| s["podsNeedingRestart"] == FEW).await?;
    assert_eq!(status["restartReasons"]["QoSClass"], FEW);
    let pending = condition(&status, "ResizePending");
    assert_eq!((&pending["status"], &pending["reason"]), (&json!("True"), &json!("RestartNeeded")));
    assert_eq!(fleet.our_resizes().await?, 0);
    let still = fleet.pods("agent", FEW).await?;
    assert_eq!(uids(&still), uids(&born), "no pod was killed");

    // Restarted when its owner likes, a pod has its size; and its storage then waits for the next time.
    let pods: Api<Pod> = fleet.namespace.api();
    for pod in &born {
        pods.delete(&pod.name_any(), &DeleteParams::default().grace_period(0)).await?;
        fleet.cluster.wait_gone(&pods, &pod.name_any(), LONG).await?;
    }
    let reborn = fleet.pods("agent", FEW).await?;
    assert!(reborn.iter().all(|pod| !has(pod).is_empty()), "all sized");
    fleet.play_kubelet(&reborn).await?;
    fleet.wait_status("t", "up to date", |s| s["podsNeedingRestart"] == 0 && s["pods"] == FEW).await?;
    let patch = Patch::Merge(json!({"spec": {"storagePercentage": 20}}));
    fleet.templates.patch("t", &PatchParams::default(), &patch).await?;
    let status = fleet.wait_status("t", "storage waits", |s| s["restartReasons"]["EphemeralStorage"] == FEW).await?;
    assert_eq!(status["podsResizing"], 0);
    assert_eq!(fleet.our_resizes().await?, 0);

    // A crowd is pointed out, and a converged fleet is left in peace.
    let greedy = Patch::Merge(json!({"spec": {"memoryPercentage": 90}}));
    fleet.templates.patch("t", &PatchParams::default(), &greedy).await?;
    let event = wait_event(&fleet.cluster, "default", "SizingShareHigh", "t").await?;
    // Of how many is said once, by the first look that shows any of them resized.
    assert!(event.message.as_deref().is_some_and(|note| note.contains("more than 50 % of ")), "{event:?}");
    fleet.wait_status("t", "resized", |s| s["podsResizing"] == 0).await?;
    let before = fleet.cluster.rest().await?;
    tokio::time::sleep(QUIET).await;
    assert_eq!(our_writes(&fleet.cluster.audit_events().await?, before), Vec::<String>::new());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_infeasible_resize_is_taken_back_and_a_deferred_one_is_waited_for() -> anyhow::Result<()> {
    let fleet = fleet(1).await?;
    fleet.templates.create(&PostParams::default(), &template("t", percent(10, 15, 5))).await?;
    fleet.create_set("agent").await?;
    let born = fleet.pods("agent", 1).await?;
    fleet.play_kubelet(&born).await?;
    let change = |cpu: u8| Patch::Merge(json!({"spec": {"cpuPercentage": cpu}}));
    fleet.templates.patch("t", &PatchParams::default(), &change(20)).await?;
    let cpu = |amount: u64| move |pod: &Pod| has(pod).cpu == Some(amount);
    fleet.wait_sizes("agent", "20 % of 940m", cpu(188)).await?;

    let pods: Api<Pod> = fleet.namespace.api();
    let name = born[0].name_any();
    let say = |reason: &str| {
        let pending = json!({"type": "PodResizePending", "status": "True", "reason": reason, "message": "no room"});
        Patch::Strategic(json!({"status": {"conditions": [pending]}}))
    };
    pods.patch_status(&name, &PatchParams::default(), &say("Deferred")).await?;
    let deferred = |s: &Value| condition(s, "ResizePending")["message"].to_string().contains("1 pod deferred");
    fleet.wait_status("t", "deferred", deferred).await?;
    fleet.expect_resizes(1, "the kubelet tries again by itself").await?;

    pods.patch_status(&name, &PatchParams::default(), &say("Infeasible")).await?;
    let back = fleet.wait_sizes("agent", "back to what runs", cpu(94)).await?;
    assert_eq!(uids(&back), uids(&born));
    let heard = json!({"status": {"conditions": [{"type": "PodResizePending", "$patch": "delete"}]}});
    pods.patch_status(&name, &PatchParams::default(), &Patch::Strategic(heard)).await?;
    fleet.wait_status("t", "counted", |s| s["restartReasons"]["Infeasible"] == 1).await?;
    fleet.expect_resizes(2, "not asked again at once").await?;
    // Another wish is another matter.
    fleet.templates.patch("t", &PatchParams::default(), &change(15)).await?;
    fleet.wait_sizes("agent", "15 % of 940m", cpu(141)).await?;
    Ok(())
}
