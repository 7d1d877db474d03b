//! Which workloads are split, and how they say so.

use k8s_openapi::api::core::v1::{Affinity, Namespace, ServiceAccount};

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn the_samples_are_split_as_their_comments_say() -> anyhow::Result<()> {
    let scene = scene("").await?;
    for file in ["deployment.yaml", "statefulset.yaml"] {
        for document in groundcrew_testbed::objects::sample(&format!("spread/{file}"))? {
            match document["kind"].as_str() {
                Some("Deployment") => drop(scene.create(&serde_json::from_value::<Deployment>(document)?).await?),
                Some("StatefulSet") => drop(scene.create(&serde_json::from_value::<StatefulSet>(document)?).await?),
                _ => drop(scene.create(&serde_json::from_value::<PodDisruptionBudget>(document)?).await?),
            }
        }
    }
    scene.settles("web", (6, 4)).await?;
    scene.settles("db", (2, 2)).await?;
    let split = "spotalis_workload_replicas{namespace=\"NS\",workload=\"web\",workload_type=\"deployment\",replica_type=\"spot\"} 6";
    scene.groundcrew.wait_metric(&split.replace("NS", scene.namespace.name()), SOON).await?;

    // A replica that serves webhooks alone has its metrics, too.
    let builder = Groundcrew::builder(&scene.cluster).name("webhook").arg("--enable-controller=false");
    let metrics = builder.start().await?.metrics().await?;
    for name in ["spotalis_webhook_request_duration_seconds_count", "spotalis_leader_election_status"] {
        assert!(metrics.lines().any(|line| line.starts_with(name)), "{name} is missing");
    }
    Ok(())
}

/// Creates it as kubectl does, and returns what kubectl would print.
async fn warned_of(scene: &Scene, object: &Deployment) -> anyhow::Result<String> {
    let path = format!("/apis/apps/v1/namespaces/{}/deployments", scene.namespace.name());
    let request = http::Request::post(path).header("content-type", "application/json");
    let body = kube::client::Body::from(serde_json::to_vec(object)?);
    let response = scene.cluster.client().send(request.body(body)?).await?;
    anyhow::ensure!(response.status().is_success(), "a wrong rule was refused: {}", response.status());
    let warnings = response.headers().get_all("warning").iter().filter_map(|w| w.to_str().ok());
    Ok(warnings.collect::<Vec<_>>().join("\n"))
}

#[tokio::test(flavor = "multi_thread")]
async fn only_selected_namespaces_and_readable_rules_are_managed() -> anyhow::Result<()> {
    let config = "controller:\n  namespaceSelector:\n    matchExpressions: [{key: tier, operator: In, values: [a, b]}]\n\
                  webhook: {exemptNamespaces: [kube-system, exempt]}\n";
    let scene = scene(config).await?;
    let exempt = wrong_in_an_exempt_namespace(&scene.cluster).await?;
    let percentage = [("spot-percentage", "100")];
    let unplaced = |pods: &[&Pod]| {
        pods.len() == 2
            && pods.iter().all(|p| is_ready(p) && p.spec.as_ref().is_some_and(|s| s.node_selector.is_none()))
    };
    let mut outside: Deployment = workload("Deployment", "outside", 2, &percentage);
    let template = outside.spec.as_mut().and_then(|s| s.template.spec.as_mut()).expect("a template");
    template.affinity = Some(rather_on_demand()?);
    scene.create(&outside).await?;
    let of = |app: &str| watcher::Config::default().labels(&format!("app={app}"));
    let pods: Api<Pod> = scene.namespace.api();
    scene.cluster.wait_for_list(&pods, of("outside"), "left alone", SOON, unplaced).await?;

    let label = Patch::Merge(json!({"metadata": {"labels": {"tier": "b"}}}));
    let namespaces: Api<Namespace> = Api::all(scene.cluster.client());
    namespaces.patch(scene.namespace.name(), &PatchParams::default(), &label).await?;
    // The running pods are moved, which shows that the label was heard.
    scene.settles_within("outside", (2, 0), 2 * SOON).await?;
    let warning = warned_of(&scene, &workload("Deployment", "wrong", 2, &[("spot-percentage", "150")])).await?;
    assert!(warning.contains("spotalis.io/spot-percentage"), "whoever writes it hears of it: {warning:?}");
    scene.cluster.wait_for_list(&pods, of("wrong"), "left alone", SOON, unplaced).await?;
    let events: Api<Event> = scene.namespace.api();
    let told = |events: &[&Event]| {
        events.iter().any(|e| {
            e.reason.as_deref() == Some("ConfigurationError")
                && e.message.as_deref().is_some_and(|m| m.contains("\"150\""))
        })
    };
    scene.cluster.wait_for_list(&events, watcher::Config::default(), "an event", SOON, told).await?;
    // Wrong for longer than those that were moved: nobody would place what replaces it.
    let now = exempt.list(&ListParams::default()).await?;
    assert!(now.items.iter().all(|pod| pod.metadata.deletion_timestamp.is_none()), "a pod makes way");
    let evictions = scene.evictions().await?;
    let there = |e: &&AuditEvent| e.object_ref.as_ref().is_some_and(|o| o.namespace == "exempt");
    assert_eq!(evictions.iter().filter(there).count(), 0, "evicted for nothing");
    Ok(())
}

/// Where pods go as long as nobody places them.
fn rather_on_demand() -> anyhow::Result<Affinity> {
    let on_demand = json!({"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]});
    let term = json!({"weight": 100, "preference": {"matchExpressions": [on_demand]}});
    Ok(serde_json::from_value(json!({
        "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]},
    }))?)
}

/// A workload that opted in, on the wrong class, where the namespace selector matches and admission does not look.
async fn wrong_in_an_exempt_namespace(cluster: &Cluster) -> anyhow::Result<Api<Pod>> {
    let namespace: Namespace =
        serde_json::from_value(json!({"metadata": {"name": "exempt", "labels": {"tier": "a"}}}))?;
    Api::all(cluster.client()).create(&PostParams::default(), &namespace).await?;
    let accounts: Api<ServiceAccount> = Api::namespaced(cluster.client(), "exempt");
    cluster.wait_for(&accounts, "default", "the service account exists", SOON, |_: &ServiceAccount| true).await?;
    let mut object: Deployment = workload("Deployment", "web", 2, &[("spot-percentage", "100")]);
    let template = object.spec.as_mut().and_then(|s| s.template.spec.as_mut()).expect("a template");
    template.node_selector = Some([("karpenter.sh/capacity-type".to_owned(), "on-demand".to_owned())].into());
    Api::namespaced(cluster.client(), "exempt").create(&PostParams::default(), &object).await?;
    let pods: Api<Pod> = Api::namespaced(cluster.client(), "exempt");
    let ready = |pods: &[&Pod]| split(pods) == Some((0, 2));
    cluster.wait_for_list(&pods, watcher::Config::default(), "two on on-demand", SOON, ready).await?;
    Ok(pods)
}
