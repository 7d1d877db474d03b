//! Waiting for what only an attempt can tell: no watch shows when an API server uses a new webhook.

use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, PostParams};
use tokio::time::{Instant, sleep};

use crate::cluster::Cluster;
use crate::groundcrew::Groundcrew;
use crate::objects::{PodExt, pod};

const PROBE_EVERY: Duration = Duration::from_millis(100);
/// A leader may have to wait a lease out before it registers.
const PROBE_DEADLINE: Duration = Duration::from_secs(60);

impl Cluster {
    /// Waits until the API server sends created pods through groundcrew's webhook, by dry runs.
    ///
    /// # Errors
    /// After a minute, with the last answer.
    pub async fn webhook_answers(&self) -> anyhow::Result<()> {
        let pods: Api<Pod> = Api::namespaced(self.client(), "default");
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        let began = Instant::now();
        loop {
            let answer = pods.create(&dry_run, &pod("webhook-probe").annotated("addtime", "")).await;
            match answer {
                Ok(pod) if pod.annotations().contains_key("timestamp") => return Ok(()),
                _ if began.elapsed() < PROBE_DEADLINE => sleep(PROBE_EVERY).await,
                Ok(_) => anyhow::bail!("the webhook is not called within {PROBE_DEADLINE:?}"),
                Err(error) => return Err(error).context("pods cannot be created"),
            }
        }
    }
}

impl Groundcrew {
    /// Waits until the metrics contain this line.
    ///
    /// # Errors
    /// After `deadline`, with the metrics as last read.
    pub async fn wait_metric(&self, line: &str, deadline: Duration) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            let metrics = self.metrics().await?;
            if metrics.lines().any(|found| found == line) {
                return Ok(());
            }
            anyhow::ensure!(began.elapsed() < deadline, "no metric {line:?} within {deadline:?}:\n{metrics}");
            sleep(PROBE_EVERY).await;
        }
    }
}
