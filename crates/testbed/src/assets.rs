//! The programs of a cluster: where each comes from and where it lies.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::Layer;
use crate::gobuild;

/// A program that the testbed builds from source (or finds in `KUBEBUILDER_ASSETS`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Program {
    /// The key-value store under the API server.
    Etcd,
    /// The API server.
    Apiserver,
    /// The command line client, used for dumps on failure.
    Kubectl,
    /// ReplicaSets, Deployments, DaemonSets, service accounts, garbage collection.
    ControllerManager,
    /// Binds pods to nodes.
    Scheduler,
    /// Plays kubelet for fake nodes.
    Kwok,
    /// The node agent.
    Kubelet,
    /// Service addresses on the node.
    KubeProxy,
    /// The container runtime.
    Containerd,
    /// One per pod, started by containerd.
    ContainerdShim,
    /// containerd's command line client.
    Ctr,
}

impl Program {
    /// Every program, in the order of the layers.
    pub const ALL: [Self; 11] = [
        Self::Etcd,
        Self::Apiserver,
        Self::Kubectl,
        Self::ControllerManager,
        Self::Scheduler,
        Self::Kwok,
        Self::Kubelet,
        Self::KubeProxy,
        Self::Containerd,
        Self::ContainerdShim,
        Self::Ctr,
    ];

    /// The executable's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::Apiserver => "kube-apiserver",
            Self::Kubectl => "kubectl",
            Self::ControllerManager => "kube-controller-manager",
            Self::Scheduler => "kube-scheduler",
            Self::Kwok => "kwok",
            Self::Kubelet => "kubelet",
            Self::KubeProxy => "kube-proxy",
            Self::Containerd => "containerd",
            Self::ContainerdShim => "containerd-shim-runc-v2",
            Self::Ctr => "ctr",
        }
    }

    /// The first layer that runs it.
    #[must_use]
    pub fn layer(self) -> Layer {
        match self {
            Self::Etcd | Self::Apiserver | Self::Kubectl => Layer::Api,
            Self::ControllerManager | Self::Scheduler | Self::Kwok => Layer::Controllers,
            Self::Kubelet | Self::KubeProxy | Self::Containerd | Self::ContainerdShim | Self::Ctr => Layer::Nodes,
        }
    }
}

/// Executables of one layer, all present.
#[derive(Clone, Debug)]
pub struct Assets {
    paths: BTreeMap<Program, PathBuf>,
    /// Holds everything the testbed built itself, kwok's stage file included.
    dir: PathBuf,
}

impl Assets {
    /// Finds the programs of `layer`, building the ones that are neither in `KUBEBUILDER_ASSETS` nor in the cache.
    ///
    /// # Errors
    /// The Go toolchain is missing or a build failed.
    pub fn ensure(layer: Layer) -> anyhow::Result<Self> {
        let dir = cache_dir()?.join("bin").join(gobuild::cache_key());
        let given = std::env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from);
        let mut paths = BTreeMap::new();
        let mut to_build = Vec::new();
        for program in Program::ALL.into_iter().filter(|program| program.layer() <= layer) {
            if let Some(path) = given_asset(given.as_deref(), program) {
                paths.insert(program, path);
            } else {
                paths.insert(program, dir.join(program.name()));
                to_build.push(program);
            }
        }
        gobuild::build_missing(&dir, &to_build)?;
        Ok(Self { paths, dir })
    }

    /// Where `program` lies.
    ///
    /// # Errors
    /// The program belongs to a higher layer than these assets.
    pub fn path(&self, program: Program) -> anyhow::Result<&Path> {
        let path = self.paths.get(&program);
        path.map(PathBuf::as_path).with_context(|| format!("{} is not part of this layer", program.name()))
    }

    /// kwok's rules of how fake nodes and pods come alive.
    #[must_use]
    pub fn kwok_stages(&self) -> PathBuf {
        self.dir.join(gobuild::KWOK_STAGES)
    }

    /// The directory of everything built here: containerd looks for its shim on PATH.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

/// Only the control plane of layer 2 is taken from elsewhere: that is what such directories hold.
fn given_asset(given: Option<&Path>, program: Program) -> Option<PathBuf> {
    given.filter(|_| program.layer() == Layer::Api).map(|dir| dir.join(program.name())).filter(|path| path.is_file())
}

/// `GROUNDCREW_CACHE`, or `~/.cache/groundcrew`: outside of the checkout, so that tests, CI and benchmarks share it.
///
/// # Errors
/// Neither `GROUNDCREW_CACHE` nor `HOME` is set.
pub fn cache_dir() -> anyhow::Result<PathBuf> {
    if let Some(dir) = std::env::var_os("GROUNDCREW_CACHE").filter(|dir| !dir.is_empty()) {
        return Ok(PathBuf::from(dir));
    }
    let home = std::env::var_os("HOME").context("set GROUNDCREW_CACHE or HOME: the built Kubernetes is kept there")?;
    Ok(Path::new(&home).join(".cache").join("groundcrew"))
}

#[cfg(test)]
mod tests {
    use super::{Program, given_asset};

    #[test]
    fn given_assets_serve_the_api_layer_only() {
        let dir = tempfile::tempdir().unwrap();
        for program in [Program::Apiserver, Program::Kubelet] {
            std::fs::write(dir.path().join(program.name()), "").unwrap();
        }
        assert!(given_asset(Some(dir.path()), Program::Apiserver).is_some());
        assert!(given_asset(Some(dir.path()), Program::Etcd).is_none(), "not in the directory");
        assert!(given_asset(Some(dir.path()), Program::Kubelet).is_none(), "not of the API layer");
        assert!(given_asset(None, Program::Apiserver).is_none());
    }
}
