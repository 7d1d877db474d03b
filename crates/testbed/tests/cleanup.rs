//! What is left when groundcrew goes.

use std::collections::BTreeSet;
use std::time::Duration;

use groundcrew::node_startup::crd::NodeStartupRule;
use groundcrew_testbed::objects::{PodExt, create, pod};
use groundcrew_testbed::{Cluster, Groundcrew, Layer};
use k8s_openapi::api::admissionregistration::v1::{MutatingAdmissionPolicy, MutatingWebhookConfiguration};
use k8s_openapi::api::core::v1::{Node, Pod, Service};
use kube::api::{Api, DynamicObject, ListParams, PostParams};
use kube::discovery::{ApiGroup, Discovery, verbs};
use kube::{Client, ResourceExt};
use serde_json::json;

const SOON: Duration = Duration::from_secs(60);
const CONFIG: &str = "nodeStartup: {enabled: true}";
const TAINT: &str = "startup.k8s.io/initializing";

/// Every object of the cluster as `kind namespace/name`, without what Kubernetes itself writes all the time.
async fn everything(client: &Client) -> anyhow::Result<BTreeSet<String>> {
    let known = Discovery::new(client.clone()).run().await?;
    let mut found = BTreeSet::new();
    for (resource, capabilities) in known.groups().flat_map(ApiGroup::recommended_resources) {
        if !capabilities.supports_operation(verbs::LIST) || resource.kind == "Event" {
            continue;
        }
        let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
        for object in api.list(&ListParams::default()).await? {
            let namespace = object.namespace().unwrap_or_default();
            found.insert(format!("{} {namespace}/{}", resource.kind, object.name_any()));
        }
    }
    Ok(found)
}

/// The same once the API server, which goes on making things of its own after it is ready, has made them.
async fn everything_settled(cluster: &Cluster) -> anyhow::Result<BTreeSet<String>> {
    let services: Api<Service> = Api::namespaced(cluster.client(), "default");
    cluster.wait_for(&services, "kubernetes", "the API server's own", SOON, |_| true).await?;
    let deadline = tokio::time::Instant::now() + SOON;
    let mut before = everything(&cluster.client()).await?;
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let now = everything(&cluster.client()).await?;
        if now == before {
            return Ok(now);
        }
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "never settled: {:?}", now.difference(&before));
        before = now;
    }
}

async fn cleanup(cluster: &Cluster) -> anyhow::Result<(bool, String)> {
    let mut command = Groundcrew::builder(cluster).name("cleanup").command("cleanup").spawn().await?;
    let status = command.wait_exit(2 * SOON).await?;
    Ok((status.success(), command.log()?))
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
    let (done, said) = cleanup(&cluster).await?;
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

    let (done, said) = cleanup(&cluster).await?;
    assert!(done, "{said}");
    assert!(!held(&nodes.get("fresh").await?));
    let mut left: BTreeSet<String> = everything(&cluster.client()).await?.difference(&before).cloned().collect();
    left.retain(|object| !object.starts_with("CustomResourceDefinition ") && !object.starts_with("APIService "));
    // What installed groundcrew removes its own: the namespace, roles and bindings.
    let installed = ["Namespace ", "ClusterRole ", "ClusterRoleBinding ", "Role ", "RoleBinding "];
    left.retain(|object| !(installed.iter().any(|kind| object.starts_with(kind)) && object.contains("groundcrew")));
    assert_eq!(left, BTreeSet::from(["Node /fresh".to_owned(), "NodeStartupRule /kept".to_owned()]));
    assert!(rules.get("kept").await?.finalizers().is_empty(), "nobody is left to let the rule go");
    assert_eq!(pods.get("mine").await?.uid(), mine.uid());

    let (again, said) = cleanup(&cluster).await?;
    assert!(again, "a second run finds nothing to do: {said}");
    Ok(())
}
