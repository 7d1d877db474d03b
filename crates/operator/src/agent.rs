//! `groundcrew agent`: the work that must happen on each node.

use groundcrew_core::config::Config;

use crate::cli::Settings;
use crate::run::{Process, runtime};

/// Runs until told to stop. No feature has node-local work yet, so it answers probes and waits.
pub fn main(settings: &Settings, config: Config) -> Result<(), String> {
    let node = settings.node_name.clone().filter(|name| !name.is_empty());
    let node = node.ok_or("the agent needs the name of its node: set --node-name or NODE_NAME")?;
    runtime()?.block_on(async {
        let process = Process::start(settings, config).await?;
        tracing::info!(node, "agent ready");
        process.until_stopped().await;
        Ok(())
    })
}
