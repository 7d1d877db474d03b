//! Which taints this installation has set, so that a later configuration lets go of those it does not name.
//!
//! ```text
//! leader ─► read ─┬─ ours are missing ──► written; tainting does not wait for it
//!                 └─ others are there ──► rules of the past: released, forgotten when nobody has them any more
//! ```
//!
//! Whether a node is held is still read from the node alone; the record only says which taints are ours to remove.
//! Without it a changed `taintKey` would hold nodes for ever, and a feature that is off could not tell its own taint
//! from that of another tool with the same contract.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use groundcrew_core::feature::Feature;
use groundcrew_core::node_startup::report::Tally;
use groundcrew_core::node_startup::rule::orphaned;
use groundcrew_core::node_startup::{Rule, TaintSpec};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Client;
use kube::api::Api;
use serde_json::json;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use super::{Shared, rules};
use crate::manifests::NODE_STARTUP_RECORD;
use crate::run::Context;
use crate::runtime::apply::{Outcome, Target, Write, Writer};

const CALL: Duration = Duration::from_secs(5);
/// Replicas of the earlier configuration may go on tainting until a rollout is over.
pub(super) const FORGET_AFTER: Duration = Duration::from_secs(600);
const FIELD: &str = "taints";

/// What this process knows of it.
#[derive(Debug, Default)]
pub struct Record(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// An answer was waited for once; tainting does not depend on it any longer.
    asked: bool,
    /// Since when, and what.
    known: Option<(Instant, Vec<TaintSpec>)>,
}

impl Record {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn asked(&self) -> bool {
        self.lock().asked
    }

    /// The taints on record that none of these rules knows.
    pub(super) fn orphans(&self, rules: &[Rule]) -> Vec<TaintSpec> {
        self.lock().known.as_ref().map(|(_, taints)| orphaned(rules, taints)).unwrap_or_default()
    }
}

/// By the leader, every few seconds; writes only when the configuration has changed.
pub(super) async fn maintain(shared: &Shared, context: &Context, tallies: &[(String, Tally)]) {
    let known = shared.record.lock().known.clone();
    let kept = match known {
        None => learn(shared, context).await,
        Some((since, taints)) if since.elapsed() > FORGET_AFTER => forget(shared, context, &taints, tallies).await,
        Some(_) => Ok(()),
    };
    let first = !std::mem::replace(&mut shared.record.lock().asked, true);
    if let Err(why) = kept {
        warn!(why, "the record of startup taints could not be kept, trying again");
    }
    if first {
        shared.news();
    }
}

fn configured(context: &Context) -> Vec<Rule> {
    context.config.node_startup.rules().rules
}

async fn learn(shared: &Shared, context: &Context) -> Result<(), String> {
    let before = read(&context.clients.read, &context.namespace).await?;
    let own = configured(context);
    let mut taints = orphaned(&own, &before);
    taints.extend(own.into_iter().map(|rule| rule.taint));
    if taints.iter().any(|taint| !before.contains(taint)) {
        write(&context.writer, &context.namespace, &taints).await?;
    }
    shared.record.lock().known = Some((Instant::now(), taints));
    rules::recompile(shared, context);
    Ok(())
}

async fn forget(
    shared: &Shared,
    context: &Context,
    taints: &[TaintSpec],
    tallies: &[(String, Tally)],
) -> Result<(), String> {
    let own = configured(context);
    let past: Vec<Rule> = orphaned(&own, taints).into_iter().map(Rule::of_the_past).collect();
    let held = |rule: &Rule| tallies.iter().any(|(name, tally)| *name == rule.name && tally.held > 0);
    if past.is_empty() || past.iter().any(held) {
        return Ok(());
    }
    let kept: Vec<TaintSpec> = own.into_iter().map(|rule| rule.taint).collect();
    write(&context.writer, &context.namespace, &kept).await?;
    info!(taints = past.len(), "nobody carries the startup taints of an earlier configuration any more");
    shared.record.lock().known = Some((Instant::now(), kept));
    rules::recompile(shared, context);
    Ok(())
}

/// What is on record; nothing where the feature has never been on.
pub(super) async fn read(client: &Client, namespace: &str) -> Result<Vec<TaintSpec>, String> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let map = match timeout(CALL, maps.get_opt(NODE_STARTUP_RECORD)).await {
        Ok(Ok(map)) => map,
        Ok(Err(error)) => return Err(error.to_string()),
        Err(_) => return Err("no answer in time".to_owned()),
    };
    let text = map.and_then(|map| map.data).and_then(|mut data| data.remove(FIELD));
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(Vec::new()) };
    Ok(serde_json::from_str(&text).unwrap_or_else(|error| {
        warn!(%error, "the record of startup taints cannot be read and is made anew");
        Vec::new()
    }))
}

pub(super) async fn write(writer: &Writer, namespace: &str, taints: &[TaintSpec]) -> Result<(), String> {
    let text = serde_json::to_string(taints).map_err(|e| e.to_string())?;
    let object = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NODE_STARTUP_RECORD}, "data": {FIELD: text},
    });
    let target = Target::of::<ConfigMap>(Some(namespace), NODE_STARTUP_RECORD, "");
    match writer.write(Feature::NodeStartup, &target, &Write::Apply(object)).await {
        Ok(Outcome::Done(_)) => Ok(()),
        Ok(other) => Err(format!("{other:?}")),
        Err(error) => Err(error.to_string()),
    }
}
