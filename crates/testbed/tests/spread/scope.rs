//! Which workloads are split, and how many at once.

use groundcrew_testbed::{Proxy, free_ports};
use k8s_openapi::api::core::v1::Namespace;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn the_samples_are_split_as_their_comments_say() -> anyhow::Result<()> {
    let scene = scene("").await?;
    for file in ["deployment.yaml", "statefulset.yaml"] {
        let path = format!("{}/../../deploy/samples/spread/{file}", env!("CARGO_MANIFEST_DIR"));
        let documents: Vec<Value> = serde_saphyr::from_multiple(&std::fs::read_to_string(path)?)?;
        for document in documents {
            match document["kind"].as_str() {
                Some("Deployment") => drop(scene.create(&serde_json::from_value::<Deployment>(document)?).await?),
                Some("StatefulSet") => drop(scene.create(&serde_json::from_value::<StatefulSet>(document)?).await?),
                _ => drop(scene.create(&serde_json::from_value::<PodDisruptionBudget>(document)?).await?),
            }
        }
    }
    scene.settles("web", (6, 4)).await?;
    scene.settles("db", (2, 2)).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn only_selected_namespaces_and_readable_rules_are_managed() -> anyhow::Result<()> {
    let config =
        "controller:\n  namespaceSelector:\n    matchExpressions: [{key: tier, operator: In, values: [a, b]}]\n";
    let scene = scene(config).await?;
    let percentage = [("spot-percentage", "100")];
    let unplaced = |pods: &[&Pod]| {
        pods.len() == 2
            && pods.iter().all(|p| is_ready(p) && p.spec.as_ref().is_some_and(|s| s.node_selector.is_none()))
    };
    scene.create(&workload::<Deployment>("Deployment", "outside", 2, &percentage)).await?;
    let of = |app: &str| watcher::Config::default().labels(&format!("app={app}"));
    let pods: Api<Pod> = scene.namespace.api();
    scene.cluster.wait_for_list(&pods, of("outside"), "left alone", SOON, unplaced).await?;

    let label = Patch::Merge(json!({"metadata": {"labels": {"tier": "b"}}}));
    let namespaces: Api<Namespace> = Api::all(scene.cluster.client());
    namespaces.patch(scene.namespace.name(), &PatchParams::default(), &label).await?;
    // The running pods are moved, which shows that the label was heard.
    scene.settles_within("outside", (2, 0), 2 * SOON).await?;
    scene.create(&workload::<Deployment>("Deployment", "wrong", 2, &[("spot-percentage", "150")])).await?;
    scene.cluster.wait_for_list(&pods, of("wrong"), "left alone", SOON, unplaced).await?;
    let events: Api<Event> = scene.namespace.api();
    let told = |events: &[&Event]| {
        events.iter().any(|e| {
            e.reason.as_deref() == Some("ConfigurationError")
                && e.message.as_deref().is_some_and(|m| m.contains("\"150\""))
        })
    };
    scene.cluster.wait_for_list(&events, watcher::Config::default(), "an event", SOON, told).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_pods_at_once_are_split_by_three_replicas() -> anyhow::Result<()> {
    const WORKLOADS: usize = 10;
    let cluster = Cluster::start(Layer::Controllers).await?;
    for (prefix, class) in [("spot", "spot"), ("od", "on-demand")] {
        for i in 0..4 {
            let node = KwokNode::new(&format!("{prefix}-{i}"))
                .label("karpenter.sh/capacity-type", class)
                .allocatable("pods", "1000");
            cluster.add_kwok_node(node).await?;
        }
    }
    let ports = free_ports(3)?;
    let proxy = Proxy::balance(ports.iter().map(|port| ([127, 0, 0, 1], *port).into())).await?;
    let url = format!("https://{}", proxy.addr());
    let mut replicas = Vec::new();
    for (i, port) in ports.iter().enumerate() {
        let builder = Groundcrew::builder(&cluster).name(&format!("r{i}")).webhook_port(*port).webhook_url(&url);
        replicas.push(builder.config_yaml(QUICK).start().await?);
    }
    cluster.webhook_answers().await?;
    let namespace = cluster.namespace("burst").await?;
    let groundcrew = replicas.remove(0);
    let scene = Scene { cluster, groundcrew, namespace };
    let rule = [("spot-percentage", "70"), ("min-on-demand", "5")];
    for i in 0..WORKLOADS {
        scene.create(&workload::<Deployment>("Deployment", &format!("w{i}"), 100, &rule)).await?;
    }
    for i in 0..WORKLOADS {
        scene.settles_within(&format!("w{i}"), (70, 30), 4 * SOON).await?;
    }
    let evictions = scene.committed_evictions().await?;
    // A machine that is busy enough makes the API server give up on us after its second and go on.
    let events = scene.cluster.audit_events().await?;
    let ours = |e: &&AuditEvent| e.object_ref.as_ref().is_some_and(|o| o.namespace == scene.namespace.name());
    let created = events.iter().filter(|e| e.verb == "create" && e.is_about("pods", "") && e.is_committed_write());
    let missed = created.filter(ours).filter(|e| e.response_annotation("groundcrew.io/spread-rank").is_none()).count();
    assert!(evictions <= missed + 2 * WORKLOADS, "{evictions} evictions, {missed} pods not admitted by us");
    drop(scene.groundcrew);
    Ok(())
}
