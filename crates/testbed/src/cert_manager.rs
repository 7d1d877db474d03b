//! cert-manager as a process next to the cluster, for tests of certificates that it keeps.

use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use serde_json::Value;
use tokio::process::Child;

use crate::assets::cache_dir;
use crate::cluster::Cluster;
use crate::objects::{apply, documents, is_established};
use crate::{gobuild, supervisor};

/// Definitions are established within moments.
const PATIENCE: Duration = Duration::from_secs(30);

/// Its controllers for self-signed and CA issuers and its CA injector, with all rights; killed when dropped.
#[derive(Debug)]
pub struct CertManager {
    _process: Child,
}

impl CertManager {
    /// Finds it, or builds it.
    ///
    /// # Errors
    /// The Go toolchain is missing or the build failed.
    pub fn ensure() -> anyhow::Result<()> {
        gobuild::build_cert_manager(&cache_dir()?).map(drop)
    }

    /// Puts its definitions into the cluster and starts it.
    ///
    /// # Caveats
    /// The process is killed with the thread that calls this: call it on the test's own task.
    ///
    /// # Errors
    /// It cannot be built or started, or the API server refused.
    pub async fn start(cluster: &Cluster) -> anyhow::Result<Self> {
        let cache = cache_dir()?;
        let built = tokio::task::spawn_blocking(move || gobuild::build_cert_manager(&cache)).await?;
        let (program, definitions) = built?;
        let definitions = documents(&std::fs::read_to_string(definitions)?)?;
        apply(&cluster.client(), "default", definitions.clone()).await?;
        let api: Api<CustomResourceDefinition> = Api::all(cluster.client());
        for definition in definitions {
            let name = definition.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
            cluster.wait_for(&api, name, "established", PATIENCE, is_established).await?;
        }
        let log = cluster.info().dir.join("logs").join("cert-manager.log");
        let output = std::fs::File::create(&log)?;
        let mut command = supervisor::leashed(&program)?;
        command.arg(cluster.kubeconfig()).env_remove("KUBECONFIG");
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output).process_group(0);
        let process = tokio::process::Command::from(command).kill_on_drop(true).spawn()?;
        cluster.show_on_failure(&log);
        Ok(Self { _process: process })
    }
}
