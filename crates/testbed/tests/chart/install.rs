//! The chart as a user installs it: all features at work, no more rights than needed, and nothing left behind.

use std::collections::BTreeSet;
use std::time::Duration;

use groundcrew_testbed::objects::{PodExt, create, is_established, pod, stamped_as};
use groundcrew_testbed::{Cluster, KwokNode, Layer, TestNamespace, client_for};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use k8s_openapi::api::core::v1::{Node, Pod, Secret, Service};
use k8s_openapi::api::rbac::v1::ClusterRole;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::runtime::watcher;
use kube::{Client, ResourceExt};
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::cluster::{
    GATE, Installation, PATIENCE, assert_calm, condition, create_sample, real_node, remove_namespace, rolled_out,
    sample, wait_ready,
};
use crate::support::{HOME, permissions, read};

const TAINT: &str = "startup.k8s.io/initializing";

#[tokio::test(flavor = "multi_thread")]
async fn all_features_work_through_the_chart_and_nothing_is_left_when_it_goes() -> anyhow::Result<()> {
    if !Layer::Nodes.available_or_skip()? {
        return Ok(());
    }
    let cluster = Cluster::start(Layer::Nodes).await?;
    let installation = Installation::prepare(&cluster).await?;
    let result = lifetime(&installation).await;
    installation.explain(result).await
}

async fn lifetime(installation: &Installation<'_>) -> anyhow::Result<()> {
    let cluster = installation.cluster;
    let namespace = cluster.namespace("user").await?;
    // The last of what the API server makes for itself, after it is ready.
    let services: Api<Service> = Api::namespaced(cluster.client(), "default");
    cluster.wait_for(&services, "kubernetes", "the API server's own", PATIENCE, |_| true).await?;
    let before = cluster.everything(&[namespace.name()]).await?;

    let image = "IMG=groundcrew.test/groundcrew:1";
    installation.make(&["deploy", image, "HELM_ARGS=--set image.pullPolicy=Never"]).await?;
    wait_ready(installation).await?;
    cluster.webhook_answers().await?;
    stamps(&namespace).await?;
    samples_come_and_go(installation, &namespace).await?;
    sizes(cluster, &namespace).await?;
    spreads(cluster, &namespace).await?;
    warms(cluster, &namespace).await?;
    assert_calm(installation).await?;

    // One feature on, one off, and a certificate made by hand: rights and trust follow.
    own_certificate(installation).await?;
    let values = json!({
        "certificates": {"secretName": "own-tls"},
        "config": {"nodeStartup": {"enabled": true}, "spread": {"enabled": false}},
    });
    installation.apply("1", &values).await?;
    let roles: Api<ClusterRole> = Api::all(cluster.client());
    let rules = json!(roles.get("groundcrew").await?.rules);
    let has = |wanted: &str| permissions(&rules).iter().any(|[_, resource, ..]| resource == wanted);
    assert!(has("nodestartuprules") && !has("pods/eviction"), "{rules}");
    rolled_out(installation).await?;
    cluster.webhook_answers().await?;
    holds_new_nodes(cluster, &namespace).await?;
    assert_calm(installation).await?;
    a_stolen_token_is_worth_little(cluster).await?;
    a_stolen_token_changes_nothing_that_runs(cluster, &namespace).await?;

    // A shut gate and a held node at the time it goes.
    let held = hold_a_node(cluster, &namespace).await?;
    let gated = shut_a_gate(cluster, &namespace).await?;
    let nodes: Api<Node> = Api::all(cluster.client());
    let count = i32::try_from(nodes.list(&ListParams::default()).await?.items.len())?;
    for (set, pods) in [("node-agent", count), ("never", 1)] {
        let all = |set: &DaemonSet| set.status.as_ref().is_some_and(|s| s.current_number_scheduled == pods);
        cluster.wait_for(&namespace.api(), set, "all its pods are made", PATIENCE, all).await?;
    }
    let users = user_pods(&namespace).await?;
    assert!(is_held(&nodes.get(&held).await?), "released before its time");
    installation.make(&["undeploy"]).await?;
    installation.api::<Secret>().delete("own-tls", &Default::default()).await?;
    let after = residue_free(cluster, &namespace, &before).await?;
    let lost: Vec<_> = before.difference(&after).filter(|object| !object.starts_with("CSINode.")).collect();
    assert!(lost.is_empty(), "taken away: {lost:#?}");
    let kept = after.iter().filter(|object| object.contains("FlexDaemonsetTemplate.")).count();
    assert_eq!(kept, 1, "users' custom resources stay");
    let node = nodes.get(&held).await?;
    assert!(!is_held(&node), "{:?}", node.spec);
    let pods: Api<Pod> = namespace.api();
    let open = |pod: &Pod| condition(pod, GATE) == Some("True");
    cluster.wait_for(&pods, &gated, "the gate is open", PATIENCE, open).await?;
    assert_eq!(user_pods(&namespace).await?, users, "users' pods are not disturbed");
    remove_namespace(cluster, namespace.name()).await
}

/// By the Makefile's target, put where the chart looks for it.
async fn own_certificate(installation: &Installation<'_>) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    installation.make(&["generate-certs", &format!("CERTS={}", directory.path().display())]).await?;
    let mut data = serde_json::Map::new();
    for name in ["ca.crt", "tls.crt", "tls.key"] {
        data.insert(name.to_owned(), json!(read(&directory.path().join(name))?));
    }
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "own-tls", "namespace": HOME}, "stringData": data});
    create(&installation.cluster.client(), secret).await.map(drop)
}

/// Everything there is, once nothing is left that was not there before: pods of a hook take a moment to go.
async fn residue_free(
    cluster: &Cluster,
    namespace: &TestNamespace,
    before: &BTreeSet<String>,
) -> anyhow::Result<BTreeSet<String>> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let after = cluster.everything(&[namespace.name()]).await?;
        let left: Vec<_> = after.difference(before).filter(|object| !is_kept(object)).cloned().collect();
        if left.is_empty() {
            return Ok(after);
        }
        anyhow::ensure!(Instant::now() < deadline, "left behind: {left:#?}");
        sleep(Duration::from_secs(1)).await;
    }
}

/// Definitions stay with their objects, and so do the nodes and objects of this test.
fn is_kept(object: &str) -> bool {
    let ours = ["flexdaemonsets.xai", "groundcrew.io", "kube-booster.io"];
    let kinds = ["CustomResourceDefinition.", "APIService.", "FlexDaemonsetTemplate."];
    let definition =
        kinds.iter().any(|kind| object.starts_with(kind)) && ours.iter().any(|group| object.contains(group));
    // Of the cluster itself: what every namespace gets.
    let of_namespace =
        object.ends_with("/kube-root-ca.crt") || object.starts_with("ServiceAccount. ") && object.ends_with("/default");
    definition || of_namespace || object.contains("/kwok-") || object.contains("kube-system/node-init")
}

/// uid and restarts of each.
async fn user_pods(namespace: &TestNamespace) -> anyhow::Result<Vec<(String, Option<String>, i32)>> {
    let pods = namespace.api::<Pod>().list(&ListParams::default()).await?;
    let restarts = |pod: &Pod| {
        pod.status.iter().flat_map(|s| s.container_statuses.iter().flatten()).map(|c| c.restart_count).sum::<i32>()
    };
    Ok(pods.iter().map(|pod| (pod.name_any(), pod.uid(), restarts(pod))).collect())
}

async fn stamps(namespace: &TestNamespace) -> anyhow::Result<()> {
    let asking = pod("stamped").annotated("addtime", "");
    assert!(stamped_as(&namespace.api(), &asking).await?, "not stamped by admission");
    Ok(())
}

/// By the Makefile's targets, as they are. Nobody has their images, but admission sees their pods.
async fn samples_come_and_go(installation: &Installation<'_>, namespace: &TestNamespace) -> anyhow::Result<()> {
    admission_knows_the_agent(namespace).await?;
    let definitions: Api<CustomResourceDefinition> = Api::all(installation.cluster.client());
    let templates = "flexdaemonsettemplates.flexdaemonsets.xai";
    installation.cluster.wait_for(&definitions, templates, "established", PATIENCE, is_established).await?;
    installation.make(&["deploy-samples"]).await?;
    let pods: Api<Pod> = Api::namespaced(installation.cluster.client(), "default");
    wait_admitted(&pods, "app=web", 1, is_gated).await?;
    wait_admitted(&pods, "app=node-agent", 1, is_sized).await?;
    installation.make(&["undeploy-samples"]).await?;
    let none = |pods: &[&Pod]| pods.is_empty();
    let all = watcher::Config::default();
    installation.cluster.wait_for_list(&pods, all, "the samples are gone", PATIENCE, none).await.map(drop)
}

async fn sizes(cluster: &Cluster, namespace: &TestNamespace) -> anyhow::Result<()> {
    create_sample(cluster, namespace, sample("sizing/template.yaml")?).await?;
    create_sample(cluster, namespace, sample("sizing/daemonset.yaml")?).await?;
    wait_admitted(&namespace.api(), "app=node-agent", 1, is_sized).await
}

fn is_gated(pod: &Pod) -> bool {
    pod.spec.as_ref().is_some_and(|spec| spec.readiness_gates.is_some())
}

fn is_sized(pod: &Pod) -> bool {
    let first = pod.spec.as_ref().and_then(|spec| spec.containers.first());
    let requests = first.and_then(|container| container.resources.as_ref()?.requests.as_ref());
    requests.is_some_and(|requests| requests.contains_key("cpu"))
}

/// There are so many pods with these labels, and admission did this to all of them. Replicas hear of a definition that
/// is just made within seconds; a pod from before has to be made again, and one that a busy machine let past.
async fn wait_admitted(
    pods: &Api<Pod>,
    labels: &str,
    least: usize,
    is_right: impl Fn(&Pod) -> bool,
) -> anyhow::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = pods.list(&ListParams::default().labels(labels)).await?.items;
        let wrong: Vec<_> = found.iter().filter(|pod| !is_right(pod)).collect();
        if found.len() >= least && wrong.is_empty() {
            return Ok(());
        }
        anyhow::ensure!(Instant::now() < deadline, "{labels}: too few, or not as they should be: {wrong:?}");
        for pod in wrong {
            match pods.delete(&pod.name_any(), &Default::default()).await {
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                deleted => drop(deleted?),
            }
        }
        sleep(Duration::from_secs(1)).await;
    }
}

async fn spreads(cluster: &Cluster, namespace: &TestNamespace) -> anyhow::Result<()> {
    for class in ["spot", "on-demand"] {
        let node = KwokNode::new(&format!("kwok-{class}")).label("karpenter.sh/capacity-type", class);
        cluster.add_kwok_node(node).await?;
    }
    let mut objects = sample("spread/deployment.yaml")?;
    for object in &mut objects {
        object["metadata"]["name"] = json!("split");
    }
    create_sample(cluster, namespace, objects).await?;
    let on = |pods: &[&Pod], node: &str| {
        let bound = |pod: &&&Pod| pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(node);
        pods.iter().filter(bound).count()
    };
    let split = |pods: &[&Pod]| on(pods, "kwok-spot") == 6 && on(pods, "kwok-on-demand") == 4;
    let replicas = watcher::Config::default().labels("app=web");
    cluster.wait_for_list(&namespace.api(), replicas, "spread: six on spot", PATIENCE, split).await?;
    // Its label is that of the next sample.
    let deployments: Api<Deployment> = namespace.api();
    deployments.delete("split", &Default::default()).await?;
    cluster
        .wait_for_list(
            &namespace.api(),
            watcher::Config::default().labels("app=web"),
            "the split pods are gone",
            PATIENCE,
            |pods: &[&Pod]| pods.is_empty(),
        )
        .await
        .map(drop)
}

async fn warms(cluster: &Cluster, namespace: &TestNamespace) -> anyhow::Result<()> {
    admission_knows_the_agent(namespace).await?;
    let mut objects = sample("warmup/http.yaml")?;
    let template = &mut objects[0]["spec"]["template"];
    template["metadata"]["annotations"]["kube-booster.io/warmup-duration"] = json!("3s");
    // Fake nodes have fake servers.
    template["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": real_node(cluster)?});
    create_sample(cluster, namespace, objects).await?;
    wait_admitted(&namespace.api(), "app=web", 2, is_gated).await?;
    let warm = |pods: &[&Pod]| {
        pods.len() == 2
            && pods.iter().all(|pod| condition(pod, GATE) == Some("True") && condition(pod, "Ready") == Some("True"))
    };
    let replicas = watcher::Config::default().labels("app=web");
    cluster.wait_for_list(&namespace.api(), replicas, "warmup: warm and ready", PATIENCE, warm).await.map(drop)
}

/// Admission hears of agents through its watch; a dry run tells when it has.
pub async fn admission_knows_the_agent(namespace: &TestNamespace) -> anyhow::Result<()> {
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let probe =
        pod("probe").annotated("kube-booster.io/warmup", "enabled").annotated("kube-booster.io/warmup-port", "80");
    let deadline = Instant::now() + PATIENCE;
    loop {
        let created = namespace.api::<Pod>().create(&dry, &probe).await?;
        if is_gated(&created) {
            return Ok(());
        }
        anyhow::ensure!(Instant::now() < deadline, "admission never adds the gate");
        sleep(Duration::from_millis(200)).await;
    }
}

fn is_held(node: &Node) -> bool {
    node.spec.iter().flat_map(|spec| spec.taints.iter().flatten()).any(|taint| taint.key == TAINT)
}

/// A new node is held until the sample's pod on it is ready.
async fn holds_new_nodes(cluster: &Cluster, namespace: &TestNamespace) -> anyhow::Result<()> {
    create_sample(cluster, namespace, sample("node_startup/init-daemonset.yaml")?).await?;
    let nodes: Api<Node> = Api::all(cluster.client());
    let deadline = Instant::now() + PATIENCE;
    // The policy comes into force in its own time.
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    while !is_held(&nodes.create(&dry, &KwokNode::new("kwok-new").into_node()).await?) {
        anyhow::ensure!(Instant::now() < deadline, "nodeStartup: no new node is held");
        sleep(Duration::from_millis(500)).await;
    }
    let node = cluster.add_kwok_node(KwokNode::new("kwok-new")).await?;
    assert!(is_held(&node), "{:?}", node.spec);
    cluster.wait_for(&nodes, "kwok-new", "released", PATIENCE, |node| !is_held(node)).await.map(drop)
}

/// Its init pod fits no node.
async fn hold_a_node(cluster: &Cluster, namespace: &TestNamespace) -> anyhow::Result<String> {
    let mut never = sample("node_startup/init-daemonset.yaml")?;
    never[0]["metadata"] = json!({"name": "never"});
    let template = &mut never[0]["spec"]["template"];
    template["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": "kwok-held"});
    template["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "1000"}});
    create_sample(cluster, namespace, never).await?;
    let node = cluster.add_kwok_node(KwokNode::new("kwok-held")).await?;
    assert!(is_held(&node), "{:?}", node.spec);
    Ok(node.name_any())
}

async fn shut_a_gate(cluster: &Cluster, namespace: &TestNamespace) -> anyhow::Result<String> {
    let asking = pod("gated")
        .annotated("kube-booster.io/warmup", "enabled")
        .annotated("kube-booster.io/warmup-port", "80")
        .annotated("kube-booster.io/warmup-requests", "100")
        .annotated("kube-booster.io/warmup-duration", "5m")
        .with_image("groundcrew.test/web:1", &["/bin/busybox", "httpd", "-f", "-p", "80", "-h", "/www"]);
    let mut asking = asking;
    let spec = asking.spec.get_or_insert_default();
    spec.node_selector = Some([("kubernetes.io/hostname".to_owned(), real_node(cluster)?)].into());
    spec.termination_grace_period_seconds = Some(0);
    let pods: Api<Pod> = namespace.api();
    admission_knows_the_agent(namespace).await?;
    let deadline = Instant::now() + PATIENCE;
    // On a busy machine it may go past the webhook.
    while !is_gated(&pods.create(&PostParams::default(), &asking).await?) {
        anyhow::ensure!(Instant::now() < deadline, "it never gets a gate");
        pods.delete("gated", &Default::default()).await?;
        cluster.wait_gone(&pods, "gated", PATIENCE).await?;
    }
    let shut = |pod: &Pod| condition(pod, GATE) == Some("False") && condition(pod, "ContainersReady") == Some("True");
    cluster.wait_for(&pods, "gated", "the gate is shut", PATIENCE, shut).await?;
    Ok("gated".to_owned())
}

async fn a_stolen_token_is_worth_little(cluster: &Cluster) -> anyhow::Result<()> {
    for account in ["groundcrew", "groundcrew-agent"] {
        let thief = client_for(&cluster.kubeconfig_for_service_account(HOME, account).await?).await?;
        let forbidden = [
            ("get", "", "secrets", "", "kube-system"),
            ("list", "", "secrets", "", "kube-system"),
            ("list", "", "secrets", "", HOME),
            ("create", "", "pods", "exec", "default"),
            ("get", "", "pods", "exec", "default"),
            ("create", "", "pods", "attach", "default"),
            ("create", "", "pods", "", "default"),
            ("delete", "", "pods", "", "default"),
            ("deletecollection", "", "pods", "", "default"),
            ("create", "", "serviceaccounts", "token", "kube-system"),
            ("create", "", "serviceaccounts", "token", HOME),
            ("impersonate", "", "users", "", ""),
            ("patch", "rbac.authorization.k8s.io", "clusterroles", "", ""),
            ("escalate", "rbac.authorization.k8s.io", "clusterroles", "", ""),
            ("create", "rbac.authorization.k8s.io", "clusterrolebindings", "", ""),
            ("bind", "rbac.authorization.k8s.io", "clusterroles", "", ""),
            ("create", "certificates.k8s.io", "certificatesigningrequests", "", ""),
            ("patch", "apps", "deployments", "", "default"),
            ("patch", "apps", "daemonsets", "", "kube-system"),
            ("get", "", "nodes", "proxy", ""),
            ("delete", "", "nodes", "", ""),
            ("delete", "", "namespaces", "", ""),
        ];
        for right in forbidden {
            assert!(!may(&thief, right).await?, "{account} may {right:?}");
        }
        // The question is answered at all.
        assert!(may(&thief, ("list", "", "pods", "", "default")).await?, "{account}");
        let refused = Api::<Secret>::namespaced(thief.clone(), "kube-system").list(&ListParams::default()).await;
        assert!(matches!(&refused, Err(kube::Error::Api(status)) if status.code == 403), "{refused:?}");
        let refused = Api::<Pod>::namespaced(thief.clone(), "default").delete("any", &Default::default()).await;
        assert!(matches!(&refused, Err(kube::Error::Api(status)) if status.code == 403), "{refused:?}");
        let bindings =
            ApiResource::from_gvk(&GroupVersionKind::gvk("rbac.authorization.k8s.io", "v1", "ClusterRoleBinding"));
        let mut admin = DynamicObject::new("thief", &bindings);
        admin.data = json!({
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": HOME}],
        });
        let refused = Api::<DynamicObject>::all_with(thief, &bindings).create(&PostParams::default(), &admin).await;
        assert!(matches!(&refused, Err(kube::Error::Api(status)) if status.code == 403), "{refused:?}");
    }
    Ok(())
}

/// Rights to patch pods and nodes are for a few fields of them.
async fn a_stolen_token_changes_nothing_that_runs(cluster: &Cluster, namespace: &TestNamespace) -> anyhow::Result<()> {
    let thief = client_for(&cluster.kubeconfig_for_service_account(HOME, "groundcrew").await?).await?;
    let (pods, nodes): (Api<Pod>, Api<Node>) = (Api::namespaced(thief.clone(), namespace.name()), Api::all(thief));
    let mut victim = pod("victim");
    victim.spec.get_or_insert_default().scheduler_name = Some("nobody".to_owned());
    namespace.api::<Pod>().create(&PostParams::default(), &victim).await?;
    let (node, how) = (real_node(cluster)?, PatchParams::default());
    let image = json!({"spec": {"containers": [{"name": "main", "image": "evil"}]}});
    for body in [
        image,
        json!({"spec": {"activeDeadlineSeconds": 1}}),
        json!({"metadata": {"labels": {"app": "other"}}}),
        json!({"metadata": {"annotations": {"other": "x"}}}),
        json!({"metadata": {"finalizers": ["example.com/forever"]}}),
    ] {
        let refused = pods.patch("victim", &how, &Patch::Strategic(&body)).await;
        assert!(refused.as_ref().is_err_and(|e| e.to_string().contains("groundcrew may")), "{body}: {refused:?}");
    }
    let forged = json!({"status": {"podIP": "192.0.2.1", "podIPs": [{"ip": "192.0.2.1"}]}});
    for body in [forged, json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}})] {
        let refused = pods.patch_status("victim", &how, &Patch::Strategic(&body)).await;
        assert!(refused.as_ref().is_err_and(|e| e.to_string().contains("groundcrew may")), "{body}: {refused:?}");
    }
    let cordon = json!({"spec": {"unschedulable": true}});
    let refused = nodes.patch(&node, &how, &Patch::Strategic(&cordon)).await;
    assert!(refused.as_ref().is_err_and(|e| e.to_string().contains("groundcrew may")), "{refused:?}");
    // What it is there for.
    let rank = json!({"metadata": {"annotations": {"groundcrew.io/spread-rank": "1"}}});
    pods.patch("victim", &how, &Patch::Strategic(&rank)).await?;
    Ok(())
}

async fn may(client: &Client, right: (&str, &str, &str, &str, &str)) -> anyhow::Result<bool> {
    let (verb, group, resource, subresource, namespace) = right;
    let text = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    let attributes = ResourceAttributes {
        verb: text(verb),
        group: text(group),
        resource: text(resource),
        subresource: text(subresource),
        namespace: text(namespace),
        ..Default::default()
    };
    let spec = SelfSubjectAccessReviewSpec { resource_attributes: Some(attributes), ..Default::default() };
    let review = SelfSubjectAccessReview { spec, ..Default::default() };
    let answer = Api::<SelfSubjectAccessReview>::all(client.clone()).create(&PostParams::default(), &review).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}
