//! The one writer against a real API server: the traps of evictions, conditions and taints, kept as tests.
#![expect(clippy::unwrap_used, reason = "a test ends where its assumption fails")]

use std::time::{Duration, Instant};

use groundcrew::runtime::apply::{self, Metrics, Outcome, Target, Write, WriteError, Writer};
use groundcrew::runtime::client::{self, Clients};
use groundcrew_core::feature::Feature;
use groundcrew_testbed::objects::pod;
use groundcrew_testbed::{Cluster, Layer, Part, TestNamespace};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};

/// A write ends after five seconds. Later than this it was not stopped by that: a server would take ten, or for ever.
const LATE: Duration = Duration::from_secs(9);
const NOBODY: &str = "00000000-0000-0000-0000-000000000000";

/// A cluster, a namespace in it and the writer as the operator builds it.
struct Ground {
    cluster: Cluster,
    namespace: TestNamespace,
    writer: Writer,
}

impl Ground {
    async fn new(prefix: &str) -> Self {
        let cluster = Cluster::start(Layer::Api).await.unwrap();
        let namespace = cluster.namespace(prefix).await.unwrap();
        let config = client::load(Some(cluster.kubeconfig())).await.unwrap();
        let clients = Clients::new(&config, Duration::from_secs(25)).unwrap();
        let writer = Writer::for_any_replica(clients.write, Metrics::default());
        Self { cluster, namespace, writer }
    }

    async fn write(&self, target: &Target, write: Write) -> Result<Outcome, WriteError> {
        self.writer.write(Feature::Timestamp, target, &write).await
    }

    fn pods(&self) -> Api<Pod> {
        self.namespace.api()
    }

    fn target(&self, pod: &Pod) -> Target {
        apply::pod(self.namespace.name(), &pod.name_any(), &pod.uid().unwrap())
    }

    fn stranger(&self, name: &str) -> Target {
        apply::pod(self.namespace.name(), name, NOBODY)
    }

    /// A pod that runs and is ready, as far as the API server can tell: only such a pod is protected by a budget.
    async fn running(&self, name: &str) -> Pod {
        let mut new = pod(name);
        new.labels_mut().insert("app".into(), "web".into());
        self.pods().create(&PostParams::default(), &new).await.unwrap();
        let status = json!({"status": {"phase": "Running", "conditions": [
            {"type": "Ready", "status": "True"}, {"type": "ContainersReady", "status": "True"}]}});
        self.pods().patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap()
    }

    /// A budget over all running pods, in the state its controller would have put it in.
    async fn budget(&self, allowed: Option<u32>) {
        let budgets = self.namespace.api::<PodDisruptionBudget>();
        let spec = json!({"metadata": {"name": "budget"}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}}});
        let budget: PodDisruptionBudget = serde_json::from_value(spec).unwrap();
        budgets.create(&PostParams::default(), &budget).await.unwrap();
        if let Some(allowed) = allowed {
            self.allow(allowed).await;
        }
    }

    async fn allow(&self, allowed: u32) {
        let budgets = self.namespace.api::<PodDisruptionBudget>();
        let status = json!({"status": {"observedGeneration": 1, "disruptionsAllowed": allowed, "currentHealthy": 1 + allowed,
            "desiredHealthy": 1, "expectedPods": 1 + allowed, "disruptedPods": null}});
        budgets.patch_status("budget", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    }

    async fn allowed(&self) -> Option<i32> {
        let budget = self.namespace.api::<PodDisruptionBudget>().get("budget").await.unwrap();
        budget.status.and_then(|status| status.disruptions_allowed)
    }

    async fn is_untouched(&self, pod: &Pod) -> bool {
        let now = self.pods().get(&pod.name_any()).await.unwrap();
        now.resource_version() == pod.resource_version() && now.metadata.deletion_timestamp.is_none()
    }
}

fn evict(version: Option<String>) -> Write {
    Write::Evict { version, dry_run: false, within: apply::DEADLINE }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_eviction_meant_for_another_pod_evicts_nothing() {
    let ground = Ground::new("evict").await;
    let pod = ground.running("web-0").await;
    assert_eq!(ground.write(&ground.stranger("web-0"), evict(None)).await.unwrap(), Outcome::Gone);
    assert_eq!(ground.write(&ground.target(&pod), evict(Some("1".into()))).await.unwrap(), Outcome::Conflict);
    assert!(ground.is_untouched(&pod).await);
    assert_eq!(ground.write(&ground.stranger("nobody"), evict(None)).await.unwrap(), Outcome::Gone);

    let outcome = ground.write(&ground.target(&pod), evict(pod.resource_version())).await.unwrap();
    assert!(matches!(outcome, Outcome::Done(_)), "{outcome:?}");
    ground.cluster.wait_gone(&ground.pods(), "web-0", Duration::from_secs(60)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_evicts_nothing_and_takes_nothing_from_the_budget() {
    let ground = Ground::new("dry").await;
    let pod = ground.running("web-0").await;
    ground.budget(Some(1)).await;
    let dry = |version| Write::Evict { version, dry_run: true, within: apply::DEADLINE };
    let outcome = ground.write(&ground.target(&pod), dry(pod.resource_version())).await.unwrap();
    assert!(matches!(outcome, Outcome::Done(_)), "{outcome:?}");
    assert!(ground.is_untouched(&pod).await);
    assert_eq!(ground.write(&ground.target(&pod), dry(Some("1".into()))).await.unwrap(), Outcome::Conflict);
    assert_eq!(ground.allowed().await, Some(1));
    // Why it is worth asking: in earnest the same refusal has taken its share.
    assert_eq!(ground.write(&ground.target(&pod), evict(Some("1".into()))).await.unwrap(), Outcome::Conflict);
    assert_eq!(ground.allowed().await, Some(0));
    assert!(ground.is_untouched(&pod).await);
}

/// The default client would repeat the refused request for minutes, and it would land when the budget opens.
#[tokio::test(flavor = "multi_thread")]
async fn an_eviction_refused_by_a_budget_is_blocked_at_once_and_never_lands_later() {
    let ground = Ground::new("blocked").await;
    let pod = ground.running("web-0").await;
    ground.budget(Some(0)).await;
    let began = Instant::now();
    let outcome = ground.write(&ground.target(&pod), evict(None)).await.unwrap();
    assert_eq!(outcome, Outcome::Blocked { retry_after: None });
    // Nobody waited for the budget; that nobody asked again is in the log below.
    assert!(began.elapsed() < apply::DEADLINE, "{:?}", began.elapsed());

    ground.allow(1).await;
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(ground.is_untouched(&pod).await);
    let events = ground.cluster.audit_events().await.unwrap();
    let evictions: Vec<_> = events.iter().filter(|event| event.is_about("pods", "eviction")).collect();
    assert_eq!(evictions.len(), 1, "{evictions:?}");
    assert_eq!(evictions[0].code(), 429);
    assert!(evictions[0].user_agent.starts_with("groundcrew/"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_budget_nobody_has_looked_at_yet_says_when_to_come_back() {
    let ground = Ground::new("fresh").await;
    let pod = ground.running("web-0").await;
    ground.budget(None).await;
    let outcome = ground.write(&ground.target(&pod), evict(None)).await.unwrap();
    assert_eq!(outcome, Outcome::Blocked { retry_after: Some(Duration::from_secs(10)) });

    let budgets = ground.namespace.api::<PodDisruptionBudget>();
    let mut second = budgets.get("budget").await.unwrap();
    second.metadata = kube::api::ObjectMeta { name: Some("second".into()), ..Default::default() };
    budgets.create(&PostParams::default(), &second).await.unwrap();
    let error = ground.write(&ground.target(&pod), evict(None)).await.unwrap_err();
    assert_eq!((error.category(), error.is_retryable()), ("refused", false), "two budgets on one pod: {error}");
}

/// The API server itself repeats an eviction that meets a conflict, for ten seconds.
#[tokio::test(flavor = "multi_thread")]
async fn the_server_gives_up_an_eviction_when_we_do() {
    let ground = Ground::new("late").await;
    let pending = ground.pods().create(&PostParams::default(), &pod("pending")).await.unwrap();
    let began = Instant::now();
    let error = ground.write(&ground.stranger("pending"), evict(None)).await.unwrap_err();
    assert!(matches!(error, WriteError::Timeout), "{error}");
    assert!(began.elapsed() < LATE, "{:?}", began.elapsed());
    assert!(ground.is_untouched(&pending).await);
}

fn condition_types(pod: &Pod) -> Vec<&str> {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let mut types: Vec<_> = conditions.map(|condition| condition.type_.as_str()).collect();
    types.sort_unstable();
    types
}

#[tokio::test(flavor = "multi_thread")]
async fn our_condition_is_added_and_the_kubelets_stay() {
    let ground = Ground::new("conditions").await;
    let pod = ground.running("web-0").await;
    let ours =
        json!({"conditions": [{"type": "kube-booster.io/warmup-ready", "status": "True", "reason": "WarmupComplete"}]});
    let outcome = ground.write(&ground.target(&pod), Write::Status(ours.clone())).await.unwrap();
    let after = ground.pods().get("web-0").await.unwrap();
    assert_eq!(outcome, Outcome::Done(after.resource_version()));
    assert_eq!(condition_types(&after), ["ContainersReady", "Ready", "kube-booster.io/warmup-ready"]);
    assert_eq!(ground.write(&ground.stranger("web-0"), Write::Status(ours.clone())).await.unwrap(), Outcome::Gone);

    // Why it is not a JSON merge patch:
    let merge = Patch::Merge(json!({"status": ours}));
    let erased = ground.pods().patch_status("web-0", &PatchParams::default(), &merge).await.unwrap();
    assert_eq!(condition_types(&erased), ["kube-booster.io/warmup-ready"]);
}

fn taint(key: &str) -> Value {
    json!({"key": key, "value": "v", "effect": "NoSchedule"})
}

#[tokio::test(flavor = "multi_thread")]
async fn one_taint_goes_and_those_of_others_keep_their_place() {
    let ground = Ground::new("taints").await;
    let nodes: Api<Node> = Api::all(ground.cluster.client());
    let (a, ours, z) = (taint("a.example/x"), taint("startup.k8s.io/initializing"), taint("z.example/x"));
    let node = json!({"metadata": {"name": "node-a"}, "spec": {"taints": [a, ours, z]}});
    nodes.create(&PostParams::default(), &serde_json::from_value(node).unwrap()).await.unwrap();
    let node = nodes.get("node-a").await.unwrap();
    let keys = |node: &Node| -> Vec<String> {
        node.spec.iter().flat_map(|spec| spec.taints.iter().flatten()).map(|taint| taint.key.clone()).collect()
    };
    let before = serde_json::to_value(&node.spec).unwrap()["taints"].clone();
    let index = keys(&node).iter().position(|key| key == "startup.k8s.io/initializing").unwrap();
    let removal = json!([
        {"op": "test", "path": "/metadata/uid", "value": node.uid()},
        {"op": "test", "path": "/spec/taints", "value": before},
        {"op": "remove", "path": format!("/spec/taints/{index}")},
    ]);
    let removal = Write::Json(serde_json::from_value(removal).unwrap());
    let target = Target::of::<Node>(None, "node-a", &node.uid().unwrap());
    let expected: Vec<_> = keys(&node).into_iter().filter(|key| key != "startup.k8s.io/initializing").collect();

    assert!(matches!(ground.write(&target, removal.clone()).await.unwrap(), Outcome::Done(_)));
    let after = nodes.get("node-a").await.unwrap();
    assert_eq!(keys(&after), expected);

    assert_eq!(ground.write(&target, removal).await.unwrap(), Outcome::Conflict, "decided on taints that changed");
    assert_eq!(nodes.get("node-a").await.unwrap().resource_version(), after.resource_version());

    let nonsense = json!([{"op": "add", "path": "/spec/taints/-", "value": {"key": "x", "effect": "Never"}}]);
    let error = ground.write(&target, Write::Json(serde_json::from_value(nonsense).unwrap())).await.unwrap_err();
    assert_eq!((error.category(), error.is_retryable()), ("refused", false), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_merge_patch_lands_only_on_the_version_it_was_decided_on() {
    let ground = Ground::new("merge").await;
    let seen = ground.pods().create(&PostParams::default(), &pod("a")).await.unwrap();
    let stamp = |version: Option<String>| Write::Merge {
        version: version.unwrap(),
        patch: json!({"metadata": {"annotations": {"stamp": "1"}}}),
    };
    let outcome = ground.write(&ground.target(&seen), stamp(seen.resource_version())).await.unwrap();
    let after = ground.pods().get("a").await.unwrap();
    assert_eq!(outcome, Outcome::Done(after.resource_version()));
    assert_eq!(ground.write(&ground.target(&seen), stamp(seen.resource_version())).await.unwrap(), Outcome::Conflict);
    assert_eq!(ground.write(&ground.stranger("a"), stamp(after.resource_version())).await.unwrap(), Outcome::Gone);
    assert!(ground.is_untouched(&after).await);

    assert_eq!(ground.write(&ground.stranger("a"), Write::Delete { version: None }).await.unwrap(), Outcome::Gone);
    let old = Write::Delete { version: seen.resource_version() };
    assert_eq!(ground.write(&ground.target(&after), old).await.unwrap(), Outcome::Conflict);
    assert!(ground.is_untouched(&after).await);

    // Made again under the same name: what was decided for the first does not reach the second.
    ground.pods().delete("a", &DeleteParams::default().grace_period(0)).await.unwrap();
    assert_eq!(ground.write(&ground.target(&seen), stamp(after.resource_version())).await.unwrap(), Outcome::Gone);
    let second = ground.pods().create(&PostParams::default(), &pod("a")).await.unwrap();
    let outcome = ground.write(&ground.target(&seen), stamp(second.resource_version())).await.unwrap();
    assert_eq!(outcome, Outcome::Gone);
    assert!(ground.is_untouched(&second).await && second.meta().annotations.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_api_server_costs_five_seconds() {
    let ground = Ground::new("silent").await;
    let seen = ground.pods().create(&PostParams::default(), &pod("a")).await.unwrap();
    let stamp = |stamp: &str| Write::Merge {
        version: seen.resource_version().unwrap(),
        patch: json!({"metadata": {"annotations": {"stamp": stamp}}}),
    };
    // On a connection that is open, and on one that has to be made.
    assert_eq!(ground.write(&ground.stranger("a"), stamp("0")).await.unwrap(), Outcome::Gone);
    ground.cluster.pause(Part::Apiserver).await.unwrap();
    for stamp in [stamp("1"), stamp("2")] {
        let began = Instant::now();
        let error = ground.write(&ground.target(&seen), stamp).await.unwrap_err();
        assert!(error.is_retryable(), "{error}");
        assert!(began.elapsed() < LATE, "{:?}", began.elapsed());
    }
    ground.cluster.resume(Part::Apiserver).await.unwrap();
}
