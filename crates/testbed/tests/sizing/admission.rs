use groundcrew_testbed::objects::reviewed;
use groundcrew_testbed::{KwokNode, Layer, TestNamespace};

use super::*;

/// A pod as the DaemonSet controller would create it for a node.
fn pod_of(set: &DaemonSet, node: &str, spec: &Value) -> Pod {
    let mut object = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "generateName": format!("{}-", set.name_any()),
            "ownerReferences": [{
                "apiVersion": "apps/v1", "kind": "DaemonSet", "name": set.name_any(), "uid": set.uid(),
                "controller": true, "blockOwnerDeletion": true,
            }],
        },
        "spec": {
            "containers": [{"name": "agent", "image": "none"}],
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]},
            ]}}},
        },
    });
    for (field, value) in spec.as_object().expect("fields") {
        object["spec"][field] = value.clone();
    }
    serde_json::from_value(object).expect("a pod")
}

struct World {
    cluster: Cluster,
    _groundcrew: Groundcrew,
    namespace: TestNamespace,
    set: DaemonSet,
}

/// The contract's template, and a node `n` of 4 cpus, 16Gi and 100Gi.
async fn world() -> anyhow::Result<World> {
    let cluster = Cluster::start(Layer::Api).await?;
    let (templates, groundcrew) = start(&cluster).await?;
    let mut spec = percent(10, 15, 5);
    for (field, text) in [("minCPU", "100m"), ("minMemory", "128Mi"), ("minStorage", "1Gi")] {
        spec[field] = json!(text);
    }
    templates.create(&PostParams::default(), &template("t", spec)).await?;
    let node = KwokNode::new("n").allocatable("cpu", "4").allocatable("memory", "16Gi");
    cluster.add_kwok_node(node.allocatable("ephemeral-storage", "100Gi")).await?;
    let namespace = cluster.namespace("sized").await?;
    let set = namespace.api::<DaemonSet>().create(&PostParams::default(), &daemon_set("agent", Some("t"))).await?;
    let world = World { cluster, _groundcrew: groundcrew, namespace, set };
    world.until_sized().await?;
    Ok(world)
}

impl World {
    /// Waits until the caches have seen what was just created.
    async fn until_sized(&self) -> anyhow::Result<()> {
        let dry = PostParams { dry_run: true, ..PostParams::default() };
        let pods: Api<Pod> = self.namespace.api();
        for _ in 0..600 {
            let pod = pods.create(&dry, &pod_of(&self.set, "n", &json!({}))).await?;
            if !sizes(&pod, 0).is_empty() {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        anyhow::bail!("no pod is ever sized")
    }

    /// What whoever creates this pod is told.
    async fn warnings(&self, pod: &Pod) -> anyhow::Result<Vec<String>> {
        let path = format!("/api/v1/namespaces/{}/pods?dryRun=All", self.namespace.name());
        let request = http::Request::post(path).header("content-type", "application/json");
        let response = self.cluster.client().send(request.body(serde_json::to_vec(pod)?.into())?).await?;
        anyhow::ensure!(response.status().is_success(), "{}", response.status());
        let warnings = response.headers().get_all("warning").iter();
        Ok(warnings.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned()).collect())
    }

    async fn create(&self, pod: &Pod) -> anyhow::Result<Pod> {
        reviewed(&self.namespace.api(), &PostParams::default(), pod).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_sets_pod_is_born_with_its_share_of_the_node() -> anyhow::Result<()> {
    let world = world().await?;
    let right = expected("400m", "2576980377", "5Gi");
    let pod = world.create(&pod_of(&world.set, "n", &json!({}))).await?;
    assert_eq!(sizes(&pod, 0), right);
    assert_eq!(pod.status.and_then(|status| status.qos_class).as_deref(), Some("Guaranteed"));

    // System agents are the main users: nothing is exempt.
    let system: Api<DaemonSet> = Api::namespaced(world.cluster.client(), "kube-system");
    let set = system.create(&PostParams::default(), &daemon_set("system", Some("t"))).await?;
    let pods: Api<Pod> = Api::namespaced(world.cluster.client(), "kube-system");
    let mut annotated = pod_of(&set, "n", &json!({}));
    annotated.metadata.annotations = Some([("flexdaemonsets.xai/resource-template".to_owned(), "t".to_owned())].into());
    let pod = reviewed(&pods, &PostParams::default(), &annotated).await?;
    assert_eq!(sizes(&pod, 0), right, "the pod template's word is enough, even for a DaemonSet just created");

    let bound = json!({"nodeName": "n", "affinity": null});
    assert_eq!(sizes(&world.create(&pod_of(&world.set, "n", &bound)).await?, 0), right);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_share_and_what_is_not_ours_is_kept() -> anyhow::Result<()> {
    let world = world().await?;
    let request = |cpu: &str, memory: &str| json!({"requests": {"cpu": cpu, "memory": memory}});
    let spec = json!({
        "containers": [
            {"name": "a", "image": "none", "resources": request("300m", "64Mi")},
            {"name": "b", "image": "none", "resources": {
                "requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"example.com/gpu": "1"},
            }},
        ],
        "initContainers": [
            {"name": "setup", "image": "none"},
            {"name": "proxy", "image": "none", "restartPolicy": "Always", "resources": request("400m", "128Mi")},
        ],
    });
    let pod = world.create(&pod_of(&world.set, "n", &spec)).await?;
    // 400m as 3:1:4; memory as 1:1:2, storage in three.
    assert_eq!(sizes(&pod, 0), expected("150m", "644245095", "1789569708"));
    let mut second = expected("50m", "644245094", "1789569706");
    second.insert("example.com/gpu".to_owned(), "1".to_owned());
    assert_eq!(sizes(&pod, 1), second);
    let init = |at: usize| -> BTreeMap<String, String> {
        let container = &pod.spec.as_ref().expect("spec").init_containers.as_ref().expect("init")[at];
        let resources = container.resources.clone().expect("resources");
        assert_eq!(resources.requests, resources.limits);
        resources.requests.expect("requests").into_iter().map(|(name, quantity)| (name, quantity.0)).collect()
    };
    assert_eq!(init(0), expected("400m", "2576980377", "5Gi"));
    assert_eq!(init(1), expected("200m", "1288490188", "1789569706"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_sized_is_created_as_it_is() -> anyhow::Result<()> {
    let world = world().await?;
    let whole = json!({"resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "1"}}});
    let pod = world.create(&pod_of(&world.set, "n", &whole)).await?;
    assert!(sizes(&pod, 0).is_empty(), "the user sizes the pod as a whole");
    let pod = world.create(&pod_of(&world.set, "nowhere", &json!({}))).await?;
    assert!(sizes(&pod, 0).is_empty(), "there is no such node");
    let mut orphan = pod_of(&world.set, "n", &json!({}));
    orphan.metadata.owner_references = None;
    assert!(sizes(&world.create(&orphan).await?, 0).is_empty());

    let sets = world.namespace.api::<DaemonSet>();
    let lost = sets.create(&PostParams::default(), &daemon_set("lost", Some("missing"))).await?;
    let pod = world.create(&pod_of(&lost, "n", &json!({}))).await?;
    assert!(sizes(&pod, 0).is_empty(), "there is no such template");
    let told = "flexdaemonsets.xai/resource-template: pod not sized: there is no FlexDaemonsetTemplate";
    let began = Instant::now();
    loop {
        let warnings = world.warnings(&pod_of(&lost, "n", &json!({}))).await?;
        if warnings.iter().any(|warning| warning.contains(told)) {
            break;
        }
        // The DaemonSet may be newer than the caches.
        anyhow::ensure!(began.elapsed() < SOON, "{warnings:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(world.warnings(&pod_of(&world.set, "n", &json!({}))).await?, [""; 0]);

    let event = wait_event(&world.cluster, world.namespace.name(), "SizingFailed", "lost").await?;
    assert_eq!(event.message.as_deref(), Some("there is no FlexDaemonsetTemplate \"missing\""));
    assert_eq!(event.type_.as_deref(), Some("Warning"));
    Ok(())
}
