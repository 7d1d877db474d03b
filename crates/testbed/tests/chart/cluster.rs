//! A cluster with a real node, and the chart in it.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use groundcrew_testbed::objects::{self, create};
use groundcrew_testbed::{Cluster, Helm, Image, TestNamespace, repository};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};

use crate::support::{HOME, RELEASE, chart};

pub const PATIENCE: Duration = Duration::from_secs(180);
pub const GATE: &str = "kube-booster.io/warmup-ready";
const REPOSITORY: &str = "groundcrew.test/groundcrew";
const WEB: &str = "groundcrew.test/web:1";

pub struct Installation<'a> {
    pub cluster: &'a Cluster,
    helm: Helm,
}

impl<'a> Installation<'a> {
    /// Images on the node and a namespace that admits nothing but restricted pods; nothing is installed yet.
    pub async fn prepare(cluster: &'a Cluster) -> anyhow::Result<Self> {
        let web = Image::busybox(WEB)?.text("/www/index.html", "hello");
        cluster.load_image(&Image::groundcrew(&format!("{REPOSITORY}:1"))?).await?;
        cluster.load_image(&web).await?;
        let labels = json!({"pod-security.kubernetes.io/enforce": "restricted"});
        let home = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": HOME, "labels": labels}});
        create(&cluster.client(), home).await?;
        Ok(Self { cluster, helm: Helm::ensure()?.against(cluster) })
    }

    /// `helm upgrade --install` with the image of this tag and these values; does not wait for pods.
    pub async fn apply(&self, tag: &str, values: &Value) -> anyhow::Result<()> {
        let mut values = values.clone();
        values["image"] = json!({"repository": REPOSITORY, "tag": tag, "pullPolicy": "Never"});
        // On a fake node nothing runs but the pod's status.
        values["operator"] = json!({"nodeSelector": {"kubernetes.io/hostname": real_node(self.cluster)?}});
        let file = tempfile::Builder::new().suffix(".yaml").tempfile()?;
        std::fs::write(file.path(), serde_json::to_vec(&values)?)?;
        let chart = chart();
        // An admin's own change of a field we set is taken back.
        let arguments: [&Path; 9] = [
            "upgrade".as_ref(),
            "--install".as_ref(),
            RELEASE.as_ref(),
            &chart,
            "--namespace".as_ref(),
            HOME.as_ref(),
            "--values".as_ref(),
            file.path(),
            "--force-conflicts".as_ref(),
        ];
        self.helm.run(arguments).await.map(drop)
    }

    /// A target of the Makefile, as somebody with this cluster's kubeconfig would call it.
    pub async fn make(&self, arguments: &[&str]) -> anyhow::Result<()> {
        let helm = self.helm.program().parent().context("helm lies nowhere")?;
        let kubectl = self.cluster.info().kubectl.parent().context("kubectl lies nowhere")?;
        let path = std::env::var_os("PATH").unwrap_or_default();
        let places = [helm.to_owned(), kubectl.to_owned()].into_iter().chain(std::env::split_paths(&path));
        let mut make = tokio::process::Command::new("make");
        make.arg("-C").arg(repository()).args(arguments).env("PATH", std::env::join_paths(places)?);
        make.env("KUBECONFIG", self.cluster.kubeconfig()).stdin(Stdio::null()).kill_on_drop(true);
        let output = make.output().await.context("cannot run make")?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        output.status.success().then_some(()).with_context(|| format!("make {arguments:?}: {said}"))
    }

    /// Shows what our pods said when a test fails; the cluster's own state comes with it.
    pub async fn explain<T>(&self, result: anyhow::Result<T>) -> anyhow::Result<T> {
        if result.is_err() {
            let mut kubectl = tokio::process::Command::new(&self.cluster.info().kubectl);
            kubectl.arg("--kubeconfig").arg(self.cluster.kubeconfig()).args([
                "-n",
                HOME,
                "logs",
                "--prefix",
                "--tail=60",
            ]);
            kubectl.args(["--selector", "app.kubernetes.io/name=groundcrew", "--max-log-requests=20"]);
            if let Ok(output) = kubectl.output().await {
                eprintln!("{}", String::from_utf8_lossy(&output.stdout));
            }
        }
        self.cluster.explain(result)
    }

    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.cluster.client(), HOME)
    }

    /// The image that the operator's Deployment and the agents' DaemonSet name, and their pods run.
    pub async fn wait_images(&self, operator: &str, agent: &str) -> anyhow::Result<()> {
        for (component, tag) in [("operator", operator), ("agent", agent)] {
            let image = format!("{REPOSITORY}:{tag}");
            let selected =
                kube::runtime::watcher::Config::default().labels(&format!("app.kubernetes.io/component={component}"));
            let all_run = |pods: &[&Pod]| {
                let runs = |pod: &&&Pod| {
                    let ready = condition(pod, "Ready") == Some("True");
                    ready && pod.spec.iter().flat_map(|s| &s.containers).all(|c| c.image.as_ref() == Some(&image))
                };
                !pods.is_empty() && pods.iter().filter(runs).count() == pods.len()
            };
            let what = format!("every {component} runs {image}");
            self.cluster.wait_for_list(&self.api::<Pod>(), selected, &what, PATIENCE, all_run).await?;
        }
        Ok(())
    }

    /// Changes the agents alone, as an admin in a hurry would.
    pub async fn set_agent_image(&self, tag: &str) -> anyhow::Result<()> {
        let image = format!("{REPOSITORY}:{tag}");
        let patch = json!({"spec": {"template": {"spec": {"containers": [{"name": "agent", "image": image}]}}}});
        let agents: Api<DaemonSet> = self.api();
        agents.patch("groundcrew-agent", &PatchParams::default(), &Patch::Strategic(patch)).await?;
        Ok(())
    }

    /// Image `:2` is the same program under the next version.
    pub async fn load_next_version(&self) -> anyhow::Result<()> {
        let (own, next) = (env!("CARGO_PKG_VERSION"), next_version());
        let mut program = std::fs::read(groundcrew_testbed::groundcrew_program()?)?;
        let (from, to) = (format!("{own} (commit "), format!("{next} (commit "));
        let at = program.windows(from.len()).position(|window| window == from.as_bytes());
        let at = at.context("the program does not tell its version")?;
        program[at..at + to.len()].copy_from_slice(to.as_bytes());
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), program)?;
        self.cluster.load_image(&Image::of_program(&format!("{REPOSITORY}:2"), file.path())?).await
    }
}

/// As long as the version is: the program is changed in place.
fn next_version() -> String {
    let own = env!("CARGO_PKG_VERSION");
    let (kept, last) = own.split_at(own.len() - 1);
    format!("{kept}{}", if last == "9" { "8" } else { "9" })
}

pub fn real_node(cluster: &Cluster) -> anyhow::Result<String> {
    Ok(cluster.info().node.as_ref().context("no real node")?.name.clone())
}

/// A sample of the repository, with an image that is on the node instead of its own.
pub fn sample(path: &str) -> anyhow::Result<Vec<Value>> {
    let mut all = objects::sample(path)?;
    for object in &mut all {
        for container in object["spec"]["template"]["spec"]["containers"].as_array_mut().into_iter().flatten() {
            container["image"] = json!(WEB);
            container["imagePullPolicy"] = json!("Never");
            if container.get("command").is_none() {
                let port = container["ports"][0]["containerPort"].as_u64().unwrap_or(8080).to_string();
                container["args"] = json!(["httpd", "-f", "-p", port, "-h", "/www"]);
            }
        }
        if object["spec"]["template"]["spec"].is_object() {
            object["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = json!(0);
        }
    }
    Ok(all)
}

/// Puts a sample into a namespace, or where it says itself.
pub async fn create_sample(cluster: &Cluster, namespace: &TestNamespace, objects: Vec<Value>) -> anyhow::Result<()> {
    for mut object in objects {
        if object["metadata"].get("namespace").is_none() && object["kind"] != "FlexDaemonsetTemplate" {
            object["metadata"]["namespace"] = json!(namespace.name());
        }
        let shown = object.to_string();
        create(&cluster.client(), object).await.with_context(|| shown)?;
    }
    Ok(())
}

pub fn condition<'p>(pod: &'p Pod, kind: &str) -> Option<&'p str> {
    let mut all = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    all.find(|condition| condition.type_ == kind).map(|condition| condition.status.as_str())
}

/// Both replicas and the agent are ready.
pub async fn wait_ready(installation: &Installation<'_>) -> anyhow::Result<()> {
    let ready = |d: &Deployment| d.status.as_ref().and_then(|s| s.ready_replicas) == Some(2);
    let cluster = installation.cluster;
    cluster.wait_for(&installation.api::<Deployment>(), "groundcrew", "two replicas ready", PATIENCE, ready).await?;
    let ready = |set: &DaemonSet| set.status.as_ref().is_some_and(|s| s.number_ready >= 1);
    cluster.wait_for(&installation.api::<DaemonSet>(), "groundcrew-agent", "an agent ready", PATIENCE, ready).await?;
    Ok(())
}

/// Every pod that stays is of the newest configuration.
pub async fn rolled_out(installation: &Installation<'_>) -> anyhow::Result<()> {
    let cluster = installation.cluster;
    let done = |d: &Deployment| {
        let status = d.status.clone().unwrap_or_default();
        let counts = [status.replicas, status.updated_replicas, status.available_replicas];
        status.observed_generation == d.meta().generation && counts == [Some(2); 3]
    };
    cluster.wait_for(&installation.api::<Deployment>(), "groundcrew", "rolled out", PATIENCE, done).await?;
    let done = |set: &DaemonSet| {
        let status = set.status.clone().unwrap_or_default();
        let wanted = Some(status.desired_number_scheduled);
        status.observed_generation == set.meta().generation
            && [status.updated_number_scheduled, status.number_available] == [wanted; 2]
    };
    cluster.wait_for(&installation.api::<DaemonSet>(), "groundcrew-agent", "rolled out", PATIENCE, done).await?;
    Ok(())
}

/// None of our pods was restarted or refused by the API server. A pod on its way out does not count: when a feature
/// is switched off, its rights go before the pods that had it.
pub async fn assert_calm(installation: &Installation<'_>) -> anyhow::Result<()> {
    rolled_out(installation).await?;
    let mut staying = BTreeSet::new();
    for pod in installation.api::<Pod>().list(&ListParams::default()).await? {
        if pod.meta().deletion_timestamp.is_none() {
            let statuses = pod.status.iter().flat_map(|s| s.container_statuses.iter().flatten());
            assert_eq!(statuses.map(|c| c.restart_count).sum::<i32>(), 0, "{} restarted", pod.name_any());
            staying.insert(pod.name_any());
        }
    }
    let events = installation.cluster.audit_events().await?;
    let ours: Vec<_> = events.iter().filter(|e| e.user.pod().is_some_and(|pod| staying.contains(pod))).collect();
    assert!(!ours.is_empty(), "requests of {staying:?} are not told from others'");
    let refused = ours.iter().filter(|e| e.code() == 403);
    let refused: Vec<_> = refused.map(|e| (e.user.pod(), &e.verb, &e.request_uri)).collect();
    assert!(refused.is_empty(), "{refused:?}");
    Ok(())
}

/// Gone with everything in it.
pub async fn remove_namespace(cluster: &Cluster, name: &str) -> anyhow::Result<()> {
    let namespaces: Api<Namespace> = Api::all(cluster.client());
    namespaces.delete(name, &Default::default()).await?;
    cluster.wait_gone(&namespaces, name, PATIENCE).await
}
