//! What a real node leaves on the machine besides processes, and how it goes away again.
//!
//! A node needs things that exist once per machine: a bridge, iptables chains, the `kubepods` cgroup. So at most one runs
//! at a time, under a lock whose file names the directory in use; whoever gets the lock after a run that was killed
//! cleans up there first.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal};
use tokio::time::{Instant, sleep, timeout};

use super::node_parts;
use super::plan::containerd_socket;
use crate::assets::{Assets, Program};
use crate::{Layer, host};

/// For the whole machine, and gone after a reboot like everything that it guards.
const STATE: &str = "/run/groundcrew-testbed";
const LOCK: &str = "/run/groundcrew-testbed/node.lock";

/// containerd wants a path so short that no temporary directory can promise it.
pub(crate) const SHIM_SOCKETS: &str = "/run/groundcrew-testbed/shims";

/// Killed processes vanish at once unless the kernel is stuck.
const KILL_DEADLINE: Duration = Duration::from_secs(10);

/// The temporary directories that the supervisor makes, and may therefore remove.
pub(crate) const TEMPORARY_PREFIX: &str = "groundcrew-testbed-";

/// The right to run a real node; other layers need none.
#[derive(Debug)]
pub(crate) struct Machine {
    lock: Option<File>,
}

impl Machine {
    /// Waits for the right to run `layer` in `dir`, and cleans up after a predecessor that could not.
    pub(crate) async fn claim(layer: Layer, dir: &Path, assets: &Assets) -> anyhow::Result<Self> {
        if layer != Layer::Nodes {
            return Ok(Self { lock: None });
        }
        host::can_run_nodes().map_err(|reason| anyhow::anyhow!("layer 4 needs {reason}"))?;
        let mut lock = tokio::task::spawn_blocking(take_lock).await??;
        let mut left = String::new();
        lock.read_to_string(&mut left)?;
        if !left.is_empty() {
            let left = PathBuf::from(left);
            sweep(layer, &left, assets).await?;
            remove_temporary(&left)?;
        }
        write_lock(&mut lock, dir.to_str().context("the directory's name is not UTF-8")?)?;
        Ok(Self { lock: Some(lock) })
    }

    /// Says that nothing is left, and lets the next one in.
    pub(crate) fn release(self) -> anyhow::Result<()> {
        match self.lock {
            Some(mut lock) => write_lock(&mut lock, ""),
            None => Ok(()),
        }
    }
}

fn take_lock() -> anyhow::Result<File> {
    fs::create_dir_all(STATE).with_context(|| format!("cannot create {STATE}"))?;
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(LOCK);
    let file = file.with_context(|| format!("cannot open {LOCK}"))?;
    file.lock().with_context(|| format!("cannot lock {LOCK}"))?;
    Ok(file)
}

fn write_lock(lock: &mut File, text: &str) -> anyhow::Result<()> {
    lock.set_len(0)?;
    lock.rewind()?;
    lock.write_all(text.as_bytes())?;
    Ok(())
}

fn remove_temporary(dir: &Path) -> anyhow::Result<()> {
    let ours = dir.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(TEMPORARY_PREFIX));
    if ours && dir.exists() {
        fs::remove_dir_all(dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    }
    Ok(())
}

/// Removes everything that a node in `dir` left; its own processes have ended.
pub(crate) async fn sweep(layer: Layer, dir: &Path, assets: &Assets) -> anyhow::Result<()> {
    if layer != Layer::Nodes {
        return Ok(());
    }
    kill_containers(dir).await?;
    unmount_below(dir)?;
    remove_rules(assets).await?;
    remove_bridge().await?;
    remove_files_elsewhere(dir);
    remove_cgroups();
    Ok(())
}

/// Kills the containers of the containerd in `dir`, and the shims that hold them, each by its pid.
pub(crate) async fn kill_containers(dir: &Path) -> anyhow::Result<()> {
    let socket = containerd_socket(dir);
    let began = Instant::now();
    loop {
        let family = shims_and_descendants(&socket)?;
        if family.is_empty() {
            return Ok(());
        }
        anyhow::ensure!(began.elapsed() < KILL_DEADLINE, "processes {family:?} do not end");
        for pid in family {
            // It may have ended in the meantime.
            let _ = Pid::from_raw(pid).map(|pid| rustix::process::kill_process(pid, Signal::KILL));
        }
        sleep(Duration::from_millis(20)).await;
    }
}

/// Containers are children of their shim, and every shim names its containerd on its command line.
fn shims_and_descendants(socket: &Path) -> anyhow::Result<BTreeSet<i32>> {
    let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
    let mut pending = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // Unreadable means that it has just ended.
        let Ok(status) = fs::read_to_string(entry.path().join("status")) else { continue };
        if field(&status, "State:").is_some_and(|state| state.starts_with('Z')) {
            continue;
        }
        if let Some(parent) = field(&status, "PPid:").and_then(|parent| parent.parse().ok()) {
            children.entry(parent).or_default().push(pid);
        }
        if is_shim_of(&fs::read(entry.path().join("cmdline")).unwrap_or_default(), socket) {
            pending.push(pid);
        }
    }
    let mut family = BTreeSet::new();
    while let Some(pid) = pending.pop() {
        if family.insert(pid) {
            pending.extend(children.get(&pid).into_iter().flatten());
        }
    }
    Ok(family)
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

fn is_shim_of(command_line: &[u8], socket: &Path) -> bool {
    let mut words = command_line.split(|byte| *byte == 0);
    let is_shim = words.next().is_some_and(|program| program.ends_with(Program::ContainerdShim.name().as_bytes()));
    is_shim && words.any(|word| word == socket.as_os_str().as_encoded_bytes())
}

/// Detached at once: whoever still looks into a mount must not keep it.
fn unmount_below(dir: &Path) -> anyhow::Result<()> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    // Later mounts may lie on earlier ones.
    for point in points.filter(|point| point.starts_with(dir)).collect::<Vec<_>>().into_iter().rev() {
        rustix::mount::unmount(&point, UnmountFlags::DETACH)
            .with_context(|| format!("cannot unmount {}", point.display()))?;
    }
    Ok(())
}

async fn remove_rules(assets: &Assets) -> anyhow::Result<()> {
    let launch = node_parts::kube_proxy_program(assets.path(Program::KubeProxy)?)?.flag("cleanup", "true");
    let mut cleanup = tokio::process::Command::new(&launch.program);
    cleanup.args(&launch.arguments).envs(launch.environment).kill_on_drop(true);
    cleanup.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let status = timeout(KILL_DEADLINE, cleanup.status()).await.context("kube-proxy --cleanup hangs")??;
    anyhow::ensure!(status.success(), "kube-proxy --cleanup failed: {status}");
    remove_firewall_chain().await
}

/// kube-proxy makes this chain but leaves it to a kubelet, which ours does not use.
async fn remove_firewall_chain() -> anyhow::Result<()> {
    let iptables = host::find_program("iptables").context("no iptables here; see `testbed host-packages`")?;
    for rule in ["-D INPUT -j KUBE-FIREWALL", "-D OUTPUT -j KUBE-FIREWALL", "-F KUBE-FIREWALL", "-X KUBE-FIREWALL"] {
        let mut command = tokio::process::Command::new(&iptables);
        command.arg("--wait").args(rule.split(' ')).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // Fails where there is nothing to remove.
        let _ = command.status().await?;
    }
    Ok(())
}

async fn remove_bridge() -> anyhow::Result<()> {
    if !Path::new("/sys/class/net").join(host::BRIDGE).exists() {
        return Ok(());
    }
    let ip = host::find_program("ip").context("no `ip` here; see `testbed host-packages`")?;
    let status = tokio::process::Command::new(ip).args(["link", "delete", host::BRIDGE]).status().await?;
    anyhow::ensure!(status.success(), "cannot delete the bridge {}", host::BRIDGE);
    Ok(())
}

/// Best effort: small files in places that kubelet and CNI do not let us choose.
fn remove_files_elsewhere(dir: &Path) {
    let _ = fs::remove_dir_all(SHIM_SOCKETS);
    remove_matching(Path::new("/var/log/containers"), |entry| fs::read_link(entry).is_ok_and(|to| to.starts_with(dir)));
    let results = format!("{}-", node_parts::NETWORK);
    remove_matching(Path::new("/var/lib/cni/results"), |entry| {
        entry.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(results.as_bytes()))
    });
}

fn remove_matching(dir: &Path, ours: impl Fn(&Path) -> bool) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten().filter(|entry| ours(&entry.path())) {
        let _ = fs::remove_file(entry.path());
    }
}

/// Best effort: a cgroup that still has a process in it cannot be removed, and that is right.
fn remove_cgroups() {
    let root = Path::new("/sys/fs/cgroup");
    let per_controller = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    for group in per_controller.chain([root.to_owned()]) {
        remove_empty_groups(&group.join("kubepods"));
    }
}

fn remove_empty_groups(group: &Path) {
    let inner = fs::read_dir(group).into_iter().flatten().flatten();
    for entry in inner.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        remove_empty_groups(&entry.path());
    }
    let _ = fs::remove_dir(group);
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::is_shim_of;

    #[test]
    fn shim_is_known_by_the_socket_of_its_containerd() {
        let line = b"/cache/containerd-shim-runc-v2\0-namespace\0k8s.io\0-address\0/d/containerd/containerd.sock\0";
        assert!(is_shim_of(line, Path::new("/d/containerd/containerd.sock")));
        assert!(!is_shim_of(line, Path::new("/run/containerd/containerd.sock")), "somebody else's");
        assert!(!is_shim_of(b"vi\0/d/containerd/containerd.sock\0", Path::new("/d/containerd/containerd.sock")));
    }
}
