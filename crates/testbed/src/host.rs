//! What layer 4 takes from the machine itself: root, runc, CNI plugins, iptables, a static busybox and openssl.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

/// Where distributions put CNI plugins: Debian first, then the place upstream documents.
const CNI_DIRS: [&str; 2] = ["/usr/lib/cni", "/opt/cni/bin"];

/// Of the node's pod network, which the testbed owns alone on a machine.
pub(crate) const BRIDGE: &str = "gc-testbed0";
pub(crate) const BRIDGE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 1);

/// A program and the Debian package that holds it.
const PROGRAMS: [(&str, &str); 6] = [
    ("runc", "runc"),
    ("iptables", "iptables"),
    ("busybox", "busybox-static"),
    ("ip", "iproute2"),
    ("mount", "mount"),
    // For `make generate-certs`.
    ("openssl", "openssl"),
];

/// Root's tools are often outside of a user's PATH.
pub(crate) const SYSTEM_DIRS: [&str; 4] = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Finds `program` on PATH or where the system keeps its own tools.
pub(crate) fn find_program(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(SYSTEM_DIRS.iter().map(PathBuf::from))
        .map(|dir| dir.join(program))
        .find(|candidate| candidate.is_file())
}

/// The directory with the `bridge` plugin.
pub(crate) fn cni_plugins() -> Option<&'static Path> {
    CNI_DIRS.iter().map(Path::new).find(|dir| dir.join("bridge").is_file() && dir.join("host-local").is_file())
}

/// Debian packages that layer 4 needs and this machine lacks.
#[must_use]
pub fn missing_packages() -> Vec<&'static str> {
    let mut missing: Vec<_> = PROGRAMS
        .iter()
        .filter(|(program, _)| find_program(program).is_none())
        .map(|(_, package)| *package)
        .chain(cni_plugins().is_none().then_some("containernetworking-plugins"))
        .collect();
    missing.dedup();
    missing
}

/// One line on why no real node can run here.
pub(crate) fn can_run_nodes() -> Result<(), String> {
    if !cfg!(target_os = "linux") {
        return Err("Linux".to_owned());
    }
    if !is_root() {
        return Err("root: containers, mounts and iptables".to_owned());
    }
    let missing = missing_packages();
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!("these host packages: {} (run `testbed host-packages --install`)", missing.join(" ")))
}

/// Installs what [`missing_packages`] names, by apt; does nothing when all are there.
///
/// # Errors
/// Not root, no apt-get, or apt-get failed.
pub fn install_packages() -> anyhow::Result<()> {
    let missing = missing_packages();
    if missing.is_empty() {
        return Ok(());
    }
    anyhow::ensure!(is_root(), "root is needed to install {}", missing.join(" "));
    let apt = find_program("apt-get")
        .with_context(|| format!("no apt-get here; install by other means: {}", missing.join(" ")))?;
    // A fresh machine has no package lists, and stale lists name packages that are gone.
    for arguments in [vec!["update"], [vec!["install", "--yes", "--no-install-recommends"], missing].concat()] {
        let status = Command::new(&apt).args(&arguments).env("DEBIAN_FRONTEND", "noninteractive").status()?;
        anyhow::ensure!(status.success(), "apt-get {} failed: {status}", arguments.join(" "));
    }
    Ok(())
}
