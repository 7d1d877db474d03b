//! The testbed proves itself: what the other tests stand on works, and nothing stays behind.
#![expect(clippy::unwrap_used, reason = "a test ends where its assumption fails")]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use groundcrew_testbed::{Cluster, Image, KwokNode, Layer, Part, Proxy, client_for, fetch};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::PostParams;
use kube::runtime::watcher;
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(60);

fn object<K: serde::de::DeserializeOwned>(value: serde_json::Value) -> K {
    serde_json::from_value(value).unwrap()
}

fn pod(name: &str) -> Pod {
    object(json!({
        "metadata": {"name": name, "annotations": {"who": "me"}},
        "spec": {"containers": [{"name": "main", "image": "groundcrew.test/none:1"}]},
    }))
}

/// Names and process ids of everything a cluster runs.
fn processes(cluster: &Cluster) -> BTreeMap<Part, u32> {
    cluster.info().pids.clone()
}

fn assert_gone(pids: &BTreeMap<Part, u32>) {
    for (part, pid) in pids {
        assert!(!is_running(*pid), "{part} ({pid}) still runs");
    }
}

fn is_running(pid: u32) -> bool {
    // A killed orphan stays as a zombie for a moment, or for long where the machine's first process reaps nobody.
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    !status.is_empty() && !status.contains("State:\tZ")
}

#[tokio::test]
async fn api_layer_records_history_and_leaves_nothing_behind() {
    let cluster = Cluster::start(Layer::Api).await.unwrap();
    let namespace = cluster.namespace("history").await.unwrap();
    let pods = namespace.api::<Pod>();
    pods.create(&PostParams::default(), &pod("one")).await.unwrap();
    cluster.wait_for(&pods, "one", "the pod exists", PATIENCE, |_| true).await.unwrap();

    let events = cluster.audit_events().await.unwrap();
    let created: Vec<_> =
        events.iter().filter(|event| event.is_about("pods", "") && event.is_committed_write()).collect();
    assert_eq!(created.len(), 1, "{created:?}");
    assert_eq!(created[0].object_key(), Some(format!("{}/one", namespace.name())));
    assert_eq!(created[0].response_annotation("who"), Some("me"));
    assert_eq!(created[0].user.username, "testbed-admin");

    let pids = processes(&cluster);
    let dir = cluster.info().dir.clone();
    assert_eq!(pids.len(), 2);
    drop(cluster);
    assert_gone(&pids);
    assert!(!dir.exists());
}

#[tokio::test]
async fn killed_supervisor_takes_its_processes_along() {
    let cluster = Cluster::start(Layer::Api).await.unwrap();
    let pids = processes(&cluster);
    let supervisor = parent_of(pids[&Part::Apiserver]);
    rustix::process::kill_process(rustix::process::Pid::from_raw(supervisor).unwrap(), rustix::process::Signal::KILL)
        .unwrap();
    let began = Instant::now();
    while pids.values().any(|pid| is_running(*pid)) {
        assert!(began.elapsed() < Duration::from_secs(10), "still running after ten seconds: {pids:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // Nobody was left to remove it. The last thread of a process may still write when its first is gone.
    while let Err(error) = std::fs::remove_dir_all(&cluster.info().dir) {
        assert!(began.elapsed() < PATIENCE, "{error}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn parent_of(pid: u32) -> i32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap();
    parent.trim().parse().unwrap()
}

#[tokio::test]
async fn overdue_wait_shows_the_object_as_last_seen() {
    let cluster = Cluster::start(Layer::Api).await.unwrap();
    let namespace = cluster.namespace("overdue").await.unwrap();
    let pods = namespace.api::<Pod>();
    pods.create(&PostParams::default(), &pod("one")).await.unwrap();
    let (mut one, mut list) = (String::new(), String::new());
    // A busy machine may show nothing in so short a time.
    for soon in [300, 3_000, 30_000].map(Duration::from_millis) {
        one = cluster.wait_for(&pods, "one", "pigs fly", soon, |_| false).await.unwrap_err().to_string();
        let two = |pods: &[&Pod]| pods.len() == 2;
        let waited = cluster.wait_for_list(&pods, watcher::Config::default(), "there are two", soon, two).await;
        list = waited.unwrap_err().to_string();
        if one.contains("groundcrew.test/none:1") && list.contains("1 of 1 objects") {
            break;
        }
    }
    assert!(one.contains("pigs fly") && one.contains("groundcrew.test/none:1"), "{one}");
    assert!(list.contains("1 of 1 objects"), "{list}");
}

#[tokio::test]
async fn users_have_the_rights_of_their_own() {
    let cluster = Cluster::start(Layer::Api).await.unwrap();
    let nobody = client_for(&cluster.kubeconfig_for("nobody", &[]).unwrap()).await.unwrap();
    let refused = Api::<Pod>::default_namespaced(nobody).list(&Default::default()).await.unwrap_err();
    assert!(refused.to_string().contains("User \"nobody\" cannot list"), "{refused}");

    let account = object(json!({"metadata": {"name": "worker"}}));
    let accounts = Api::<k8s_openapi::api::core::v1::ServiceAccount>::default_namespaced(cluster.client());
    accounts.create(&PostParams::default(), &account).await.unwrap();
    let worker = cluster.kubeconfig_for_service_account("default", "worker").await.unwrap();
    let worker = client_for(&worker).await.unwrap();
    let refused = Api::<Pod>::default_namespaced(worker).list(&Default::default()).await.unwrap_err();
    assert!(refused.to_string().contains("system:serviceaccount:default:worker"), "{refused}");
}

#[tokio::test]
async fn faults_of_network_and_servers_are_felt_and_pass() {
    let cluster = Cluster::start(Layer::Api).await.unwrap();
    let proxy = Proxy::to(cluster.api_addr()).await.unwrap();
    let client = client_for(&proxy.kubeconfig(&cluster).unwrap()).await.unwrap();
    let version = || tokio::time::timeout(Duration::from_millis(500), client.apiserver_version());
    assert_eq!(client.apiserver_version().await.unwrap().minor, "36");

    proxy.freeze();
    assert!(version().await.is_err(), "no answer while frozen");
    proxy.thaw();
    proxy.cut();
    assert!(client.apiserver_version().await.is_ok(), "a new connection after the cut");

    cluster.pause(Part::Etcd).await.unwrap();
    let pods = Api::<Pod>::default_namespaced(cluster.client());
    let write =
        tokio::time::timeout(Duration::from_millis(500), pods.create(&PostParams::default(), &pod("slow"))).await;
    assert!(write.is_err(), "no write without the store");
    cluster.resume(Part::Etcd).await.unwrap();

    cluster.stop_apiserver().await.unwrap();
    assert!(version().await.map_or(true, |answer| answer.is_err()), "nobody answers");
    cluster.start_apiserver().await.unwrap();
    assert!(cluster.connect().await.unwrap().apiserver_version().await.is_ok());
}

#[tokio::test]
async fn controllers_run_a_deployment_on_fake_nodes() {
    let cluster = Cluster::start(Layer::Controllers).await.unwrap();
    let namespace = cluster.namespace("fake").await.unwrap();
    cluster.add_kwok_node(KwokNode::new("fake-0").label("zone", "a").allocatable("pods", "5")).await.unwrap();
    let deployment: Deployment = object(json!({
        "metadata": {"name": "web"},
        "spec": {
            "replicas": 3,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {"nodeSelector": {"zone": "a"}, "containers": [{"name": "main", "image": "groundcrew.test/none:1"}]},
            },
        },
    }));
    let deployments = namespace.api::<Deployment>();
    deployments.create(&PostParams::default(), &deployment).await.unwrap();
    let available = |it: &Deployment| it.status.as_ref().and_then(|status| status.available_replicas) == Some(3);
    cluster.wait_for(&deployments, "web", "three replicas are available", PATIENCE, available).await.unwrap();
    let pids = processes(&cluster);
    let began = Instant::now();
    drop(cluster);
    assert_gone(&pids);
    // Processes that have to be waited for take a minute.
    assert!(began.elapsed() < Duration::from_secs(30));
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

#[tokio::test]
async fn real_node_runs_a_container_that_answers_and_reaches_the_api() {
    if !Layer::Nodes.available_or_skip().unwrap() {
        return;
    }
    let cluster = Cluster::start(Layer::Nodes).await.unwrap();
    let dir = cluster.info().dir.clone();
    let web = Image::busybox("groundcrew.test/web:1").unwrap().text("/www/index.html", "hello from a pod");
    cluster.load_image(&web).await.unwrap();
    let namespace = cluster.namespace("real").await.unwrap();
    let pods = namespace.api::<Pod>();
    let pod = object(json!({
        "metadata": {"name": "web"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "web",
                "image": web.name(),
                "imagePullPolicy": "Never",
                "args": ["httpd", "-f", "-p", "8080", "-h", "/www"],
                "readinessProbe": {"httpGet": {"port": 8080, "path": "/"}, "periodSeconds": 1},
            }, {
                // Ready when the API server answers at its Service's address, which only kube-proxy makes reachable.
                "name": "caller",
                "image": web.name(),
                "imagePullPolicy": "Never",
                "args": ["sleep", "1000"],
                "readinessProbe": {
                    "exec": {"command": ["sh", "-c", "busybox nc -w 2 10.96.0.1 443 </dev/null"]}, "periodSeconds": 1,
                },
            }],
        },
    }));
    pods.create(&PostParams::default(), &pod).await.unwrap();
    let pod = cluster.wait_for(&pods, "web", "the pod is ready", PATIENCE, is_ready).await.unwrap();
    let address = pod.status.unwrap().pod_ip.unwrap();
    let answer = fetch::get(format!("{address}:8080").parse().unwrap(), "/index.html").await.unwrap();
    assert_eq!(answer, (200, "hello from a pod".to_owned()));

    let pids = processes(&cluster);
    drop(cluster);
    assert_gone(&pids);
    assert_nothing_of_a_node_remains(&dir);
}

fn assert_nothing_of_a_node_remains(dir: &std::path::Path) {
    let name = dir.file_name().unwrap().to_str().unwrap();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(name), "mounts remain: {mounts}");
    assert!(!std::path::Path::new("/sys/class/net/gc-testbed0").exists(), "the bridge remains");
    for process in std::fs::read_dir("/proc").unwrap().flatten() {
        let command = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command);
        assert!(!command.contains(name), "a process remains: {command}");
    }
    assert!(!dir.exists(), "the directory remains");
}
