//! What is left when groundcrew goes.

use std::collections::BTreeSet;
use std::time::Duration;

use groundcrew::node_startup::crd::NodeStartupRule;
use groundcrew_testbed::objects::{PodExt, create, pod};
use groundcrew_testbed::{Cluster, Groundcrew, Layer};
use k8s_openapi::api::admissionregistration::v1::{MutatingAdmissionPolicy, MutatingWebhookConfiguration};
use k8s_openapi::api::core::v1::{Node, Pod, Service};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, PostParams};
use serde_json::json;

const SOON: Duration = Duration::from_secs(60);
const HOME: &str = "groundcrew-system";
const STUCK: &str = "groundcrew-agent-stuck";
const TAINT: &str = "startup.k8s.io/initializing";

/// The replicas' lease lies apart from the rest, as it may.
const CONFIG: &str = "{nodeStartup: {enabled: true}, controller: {leaderElection: {namespace: groundcrew-election}}}";

/// Everything, once the API server, which goes on making things of its own after it is ready, has made them.
async fn everything_settled(cluster: &Cluster) -> anyhow::Result<BTreeSet<String>> {
    let services: Api<Service> = Api::namespaced(cluster.client(), "default");
    cluster.wait_for(&services, "kubernetes", "the API server's own", SOON, |_| true).await?;
    let deadline = tokio::time::Instant::now() + SOON;
    let mut before = cluster.everything(&[]).await?;
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let now = cluster.everything(&[]).await?;
        if now == before {
            return Ok(now);
        }
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "never settled: {:?}", now.difference(&before));
        before = now;
    }
}

async fn cleanup(cluster: &Cluster, config: &str) -> anyhow::Result<(bool, String)> {
    let builder = Groundcrew::builder(cluster).name("cleanup").command("cleanup").config_yaml(config);
    let mut command = builder.spawn().await?;
    let status = command.wait_exit(2 * SOON).await?;
    Ok((status.success(), command.log()?))
}

/// An agent's pod on a node that is gone: it is on its way out for as long as nobody speaks for its node.
async fn stuck_agent(cluster: &Cluster) -> anyhow::Result<Api<Pod>> {
    let pods: Api<Pod> = Api::namespaced(cluster.client(), HOME);
    let labels = [("app.kubernetes.io/name", "groundcrew"), ("app.kubernetes.io/component", "agent")];
    let mut agent = pod(STUCK);
    agent.metadata.labels = Some(labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into());
    let spec = agent.spec.get_or_insert_default();
    spec.node_name = Some("gone".to_owned());
    spec.termination_grace_period_seconds = Some(1);
    pods.create(&PostParams::default(), &agent).await?;
    pods.delete(STUCK, &DeleteParams::default()).await?;
    assert!(pods.get(STUCK).await?.metadata.deletion_timestamp.is_some());
    Ok(pods)
}

/// As an installation in another namespace registers itself.
async fn registered_elsewhere(cluster: &Cluster) -> anyhow::Result<()> {
    let service = json!({"name": "groundcrew-webhook", "namespace": "ops"});
    let webhook = json!({"name": "timestamp.groundcrew.io", "clientConfig": {"service": service}, "sideEffects": "None",
        "admissionReviewVersions": ["v1"], "failurePolicy": "Ignore"});
    let registered = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "groundcrew"}, "webhooks": [webhook]});
    create(&cluster.client(), registered).await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn only_custom_resources_and_what_users_made_are_left() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let namespace = cluster.namespace("user").await?;
    let pods: Api<Pod> = namespace.api();
    let mine = pods.create(&PostParams::default(), &pod("mine").annotated("kube-booster.io/warmup", "enabled")).await?;
    let before = everything_settled(&cluster).await?;

    let mut groundcrew = Groundcrew::builder(&cluster).config_yaml(CONFIG).start().await?;
    let policies: Api<MutatingAdmissionPolicy> = Api::all(cluster.client());
    cluster.wait_for_list(&policies, Default::default(), "policies", SOON, |all| !all.is_empty()).await?;
    let webhooks: Api<MutatingWebhookConfiguration> = Api::all(cluster.client());
    cluster.wait_for(&webhooks, "groundcrew", "registered", SOON, |_| true).await?;
    let rule = json!({"apiVersion": "groundcrew.io/v1alpha1", "kind": "NodeStartupRule", "metadata": {"name": "kept"},
        "spec": {"taint": {"key": "example.com/not-ready"}, "evidence": {"daemonSets": [{"name": "a", "namespace": "b"}]}}});
    // The leader has applied the definition; when it is served is up to the API server.
    let deadline = tokio::time::Instant::now() + SOON;
    while let Err(error) = create(&cluster.client(), rule.clone()).await {
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "rules are never served: {error:#}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    let rules: Api<NodeStartupRule> = Api::all(cluster.client());
    cluster.wait_for(&rules, "kept", "known to the operator", SOON, |rule| !rule.finalizers().is_empty()).await?;

    // Whoever still runs would put everything back, so that is said and nothing is half done.
    let (done, said) = cleanup(&cluster, CONFIG).await?;
    assert!(!done && said.contains("still runs"), "{said}");
    cluster.wait_for(&webhooks, "groundcrew", "still registered", SOON, |_| true).await?;

    groundcrew.terminate().await?;
    // Held for good: nobody is there to release it.
    let nodes: Api<Node> = Api::all(cluster.client());
    let fresh = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "fresh"}});
    let fresh: Node = serde_json::from_value(fresh)?;
    let held = |node: &Node| {
        let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
        taints.into_iter().any(|taint| taint.key.contains(TAINT))
    };
    // A policy comes into force in its own time.
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let deadline = tokio::time::Instant::now() + SOON;
    while !held(&nodes.create(&dry, &fresh).await?) {
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "no new node is held");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let node = nodes.create(&PostParams::default(), &fresh).await?;
    assert!(held(&node), "{:?}", node.spec);

    let agents = stuck_agent(&cluster).await?;
    let (done, said) = cleanup(&cluster, CONFIG).await?;
    assert!(done && said.contains(STUCK), "{said}");
    agents.delete(STUCK, &DeleteParams::default().grace_period(0)).await?;
    assert!(!held(&nodes.get("fresh").await?));
    let mut left: BTreeSet<String> = cluster.everything(&[]).await?.difference(&before).cloned().collect();
    left.retain(|object| !object.starts_with("CustomResourceDefinition.") && !object.starts_with("APIService."));
    // What installed groundcrew removes its own: the namespace, roles, their bindings and policies.
    let mut installed = vec!["Namespace.", "ClusterRole.", "ClusterRoleBinding.", "Role.", "RoleBinding."];
    installed.extend(["ValidatingAdmissionPolicy.", "ValidatingAdmissionPolicyBinding."]);
    left.retain(|object| !(installed.iter().any(|kind| object.starts_with(kind)) && object.contains("groundcrew")));
    assert_eq!(left, BTreeSet::from(["Node. /fresh".to_owned(), "NodeStartupRule.groundcrew.io /kept".to_owned()]));
    assert!(rules.get("kept").await?.finalizers().is_empty(), "nobody is left to let the rule go");
    assert_eq!(pods.get("mine").await?.uid(), mine.uid());

    let (again, said) = cleanup(&cluster, "{}").await?;
    assert!(again, "a second run finds nothing to do: {said}");

    registered_elsewhere(&cluster).await?;
    let (done, said) = cleanup(&cluster, "{}").await?;
    assert!(!done && said.contains("--namespace ops"), "{said}");
    webhooks.get("groundcrew").await?;
    Ok(())
}
