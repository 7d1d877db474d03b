//! `groundcrew agent`: the work that must happen on each node.

use groundcrew_core::config::Config;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use crate::cli::Settings;
use crate::run::{Process, block_on};
use crate::warmup::agent;

/// One thread: a node's warm-ups wait far more than they compute, and each further thread costs every node memory.
fn runtime() -> Result<tokio::runtime::Runtime, String> {
    let built = tokio::runtime::Builder::new_current_thread().enable_all().build();
    built.map_err(|e| format!("cannot start the runtime: {e}"))
}

/// Runs until told to stop. Without a feature that has node-local work it answers probes and waits.
pub fn main(settings: &Settings, config: Config) -> Result<(), String> {
    let node = settings.node_name.clone().filter(|name| !name.is_empty());
    let node = node.ok_or("the agent needs the name of its node: set --node-name or NODE_NAME")?;
    if config.warmup.enabled {
        agent::check_node_name(&node)?;
    }
    block_on(runtime()?, async {
        let (warmup, lease) = (config.warmup.enabled, config.clone());
        let process = Process::start(settings, config).await?;
        let mut registry = Registry::default();
        let bound = process.readiness().check("metrics bound");
        if warmup {
            let lease = agent::lease(&lease, process.namespace(), &node);
            agent::prepare_lease(process.clients().write.clone(), &lease).await;
            let (context, elector) = process.context(&mut registry, Some(lease));
            context.leadership.register_for_agent(&mut registry);
            let give_back = CancellationToken::new();
            agent::start(&context, &node, &mut registry, give_back.clone());
            if let Some(elector) = elector {
                context.tasks.spawn(elector.run(give_back));
            }
        }
        process.serve_metrics(registry).await?;
        bound.pass();
        tracing::info!(node, "agent ready");
        process.until_stopped().await;
        Ok(())
    })
}
