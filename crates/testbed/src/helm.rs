//! helm as users have it, for tests of the chart.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::Context;
use tempfile::TempDir;

use crate::assets::cache_dir;
use crate::cluster::Cluster;
use crate::gobuild;

/// helm with a home of its own: what a person configured on this machine has no say.
#[derive(Debug)]
pub struct Helm {
    program: PathBuf,
    kubeconfig: Option<PathBuf>,
    home: TempDir,
}

/// What a run of helm said.
#[derive(Clone, Debug)]
pub struct Said {
    /// Whether it ended well.
    pub success: bool,
    /// Its result.
    pub stdout: String,
    /// Its complaints.
    pub stderr: String,
}

impl Helm {
    /// Finds helm, or builds it. Without a cluster it can lint and render.
    ///
    /// # Errors
    /// The Go toolchain is missing or the build failed.
    pub fn ensure() -> anyhow::Result<Self> {
        let program = gobuild::build_helm(&cache_dir()?)?;
        Ok(Self { program, kubeconfig: None, home: tempfile::tempdir()? })
    }

    /// As the cluster's admin.
    #[must_use]
    pub fn against(mut self, cluster: &Cluster) -> Self {
        self.kubeconfig = Some(cluster.kubeconfig().to_owned());
        self
    }

    /// Where it lies.
    #[must_use]
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Runs it, however it ends.
    ///
    /// # Errors
    /// It cannot be started.
    pub async fn say<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> anyhow::Result<Said> {
        let mut helm = tokio::process::Command::new(&self.program);
        helm.args(arguments).env("HELM_CACHE_HOME", self.home.path()).env("HELM_CONFIG_HOME", self.home.path());
        helm.env("HELM_DATA_HOME", self.home.path()).env("KUBECONFIG", self.kubeconfig());
        let output = helm.stdin(Stdio::null()).kill_on_drop(true).output().await.context("cannot run helm")?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(Said { success: output.status.success(), stdout: text(&output.stdout), stderr: text(&output.stderr) })
    }

    /// Runs it and hands back its result.
    ///
    /// # Errors
    /// It ended badly; with its complaints.
    pub async fn run<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> anyhow::Result<String> {
        let arguments: Vec<A> = arguments.into_iter().collect();
        let said = self.say(arguments.iter().map(AsRef::as_ref)).await?;
        let shown: Vec<_> = arguments.iter().map(|argument| argument.as_ref().to_string_lossy()).collect();
        anyhow::ensure!(said.success, "helm {}: {}", shown.join(" "), said.stderr);
        Ok(said.stdout)
    }

    /// A path that does not exist when there is no cluster, so that no other is reached by accident.
    fn kubeconfig(&self) -> PathBuf {
        self.kubeconfig.as_deref().map_or_else(|| self.home.path().join("no-cluster"), Path::to_owned)
    }
}
