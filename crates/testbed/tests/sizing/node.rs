use std::path::{Path, PathBuf};

use anyhow::Context;
use groundcrew_core::sizing::{Amounts, Resource};
use groundcrew_testbed::{Image, Layer};
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;

use super::*;

/// The container's directory under a cgroup controller, wherever the node keeps its pods.
fn find(dir: &Path, name: &str) -> Option<PathBuf> {
    let below: Vec<PathBuf> = std::fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path()).collect();
    let below = || below.iter().filter(|path| path.is_dir());
    let here = below().find(|path| path.file_name().is_some_and(|file| file.to_string_lossy().contains(name)));
    here.cloned().or_else(|| below().find_map(|path| find(path, name)))
}

fn read(controller: &str, container: &str, file: &str) -> Option<String> {
    let text = std::fs::read_to_string(find(&Path::new("/sys/fs/cgroup").join(controller), container)?.join(file));
    text.ok().map(|text| text.trim().to_owned())
}

/// Millicores and bytes as the kernel enforces them, in either version of cgroups.
fn enforced(container: &str) -> Option<(u64, u64)> {
    if let Some(quota) = read("cpu", container, "cpu.cfs_quota_us") {
        let period: u64 = read("cpu", container, "cpu.cfs_period_us")?.parse().ok()?;
        let memory = read("memory", container, "memory.limit_in_bytes")?.parse().ok()?;
        return Some((quota.parse::<u64>().ok()? * 1000 / period, memory));
    }
    let max = read("", container, "cpu.max")?;
    let (quota, period) = max.split_once(' ')?;
    let memory = read("", container, "memory.max")?.parse().ok()?;
    Some((quota.parse::<u64>().ok()? * 1000 / period.parse::<u64>().ok()?, memory))
}

fn container_id(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?.container_statuses.as_ref()?.first()?;
    let ready = status.ready.then_some(status.container_id.as_ref()?)?;
    ready.rsplit('/').next().map(str::to_owned)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_kernel_enforces_the_share_and_follows_it_without_a_restart() -> anyhow::Result<()> {
    if !Layer::Nodes.available_or_skip()? {
        return Ok(());
    }
    let cluster = Cluster::start(Layer::Nodes).await?;
    let result = follow_one_pod(&cluster).await;
    cluster.explain(result)
}

async fn follow_one_pod(cluster: &Cluster) -> anyhow::Result<()> {
    let (templates, _groundcrew) = start(cluster).await?;
    let image = Image::busybox("groundcrew.test/agent:1")?;
    cluster.load_image(&image).await?;
    let namespace = cluster.namespace("real").await?;
    templates.create(&PostParams::default(), &template("t", percent(10, 2, 5))).await?;
    let mut set = daemon_set("agent", Some("t"));
    if let Some(spec) = set.spec.as_mut().and_then(|spec| spec.template.spec.as_mut()) {
        spec.termination_grace_period_seconds = Some(0);
        for container in &mut spec.containers {
            container.image = Some(image.name().to_owned());
            container.image_pull_policy = Some("Never".to_owned());
            container.args = Some(["sleep", "1000"].map(str::to_owned).to_vec());
        }
    }
    create_known(cluster, &templates, &namespace.api(), set).await?;
    let pods: Api<Pod> = namespace.api();
    let up = |pods: &[&Pod]| pods.len() == 1 && pods.iter().all(|pod| container_id(pod).is_some());
    let born = wait_reviewed(cluster, &pods, watcher::Config::default(), "the agent runs", up).await?;
    let born = born.first().context("one pod")?;
    let id = container_id(born).context("a container")?;

    let node = Api::<Node>::all(cluster.client()).list(&ListParams::default()).await?;
    let allocatable = node.items.first().and_then(|node| node.status.as_ref()?.allocatable.clone());
    let allocatable = Amounts::allocatable(&allocatable)?;
    let share = |resource, percent: u64| allocatable.of(resource).map(|all| all * percent / 100);
    let cpu = share(Resource::Cpu, 10).context("cpu")?;
    let memory = share(Resource::Memory, 2).context("memory")?;
    // The kernel counts memory in pages.
    assert_eq!(enforced(&id), Some((cpu, memory / 4096 * 4096)));

    let patch = Patch::Merge(json!({"spec": {"cpuPercentage": 15, "memoryPercentage": 3}}));
    templates.patch("t", &PatchParams::default(), &patch).await?;
    let wanted =
        Some((share(Resource::Cpu, 15).context("cpu")?, share(Resource::Memory, 3).context("memory")? / 4096 * 4096));
    let began = std::time::Instant::now();
    while enforced(&id) != wanted {
        anyhow::ensure!(began.elapsed() < LONG, "{:?} and not {wanted:?}", enforced(&id));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let settled = |pod: &Pod| {
        let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        !conditions.into_iter().any(|condition| condition.type_.starts_with("PodResize"))
    };
    let after = cluster.wait_for(&pods, &born.name_any(), "the resize is over", SOON, settled).await?;
    assert_eq!((after.uid(), container_id(&after)), (born.uid(), Some(id)), "the same pod and the same container");
    let restarts = after.status.iter().flat_map(|s| s.container_statuses.iter().flatten()).map(|c| c.restart_count);
    assert_eq!(restarts.sum::<i32>(), 0);
    let done = |t: &FlexDaemonsetTemplate| t.status.as_ref().is_some_and(|s| s.pods == 1 && s.pods_resizing == 0);
    cluster.wait_for(&templates, "t", "the status says so", SOON, done).await?;
    Ok(())
}
