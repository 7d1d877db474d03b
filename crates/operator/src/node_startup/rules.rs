//! The cluster's own rules: read, compiled, kept from vanishing before what they hold is released.
//!
//! A rule taints nobody before it carries our finalizer: deleted without it, it would leave taints that no rule knows.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use groundcrew_core::feature::Feature;
use groundcrew_core::node_startup::report::Tally;
use groundcrew_core::node_startup::rule::{Invalid, refuse_doubles};
use groundcrew_core::node_startup::{Rule, Rules};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use kube::core::DeserializeGuard;
use serde_json::json;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use super::Shared;
use super::crd::{NodeStartupRule, NodeStartupRuleStatus};
use crate::run::Context;
use crate::runtime::apply::{Outcome, Target, Write};
use crate::runtime::cache;

/// Held by every rule that may have tainted nodes.
pub(super) const FINALIZER: &str = "groundcrew.io/node-startup";
/// How often to look whether the resource has been installed.
const LOOK: Duration = Duration::from_secs(10);
const CALL: Duration = Duration::from_secs(5);
/// Other replicas may go on tainting for this long after a rule was deleted.
const LINGER: i64 = 5;

pub(super) fn start(context: &Context, shared: &Arc<Shared>) {
    let rules: Api<NodeStartupRule> = Api::all(context.clients.read.clone());
    let watched: Api<DeserializeGuard<NodeStartupRule>> = Api::all(context.clients.watch.clone());
    let cache = Arc::clone(&shared.cluster_rules);
    let changes = cache.subscribe();
    let feed = context.feed();
    let follower = Arc::clone(shared);
    context.tasks.spawn(context.stopping.clone().run_until_cancelled_owned(async move {
        while !installed(&rules).await {
            // Nobody can have made rules of a kind that does not exist.
            if !follower.rules_known() {
                follower.news();
            }
            sleep(LOOK).await;
        }
        cache::fill(cache, watched, feed, Some).await;
    }));

    let (compiler, context_) = (Arc::clone(shared), context.clone());
    let mut synced = shared.cluster_rules.synced();
    context.tasks.spawn(context.stopping.clone().run_until_cancelled_owned(async move {
        if synced.wait_for(|synced| *synced).await.is_err() {
            return;
        }
        loop {
            recompile(&compiler, &context_);
            changes.next().await;
        }
    }));
}

/// An API server that cannot be asked is no sign that the kind is missing.
async fn installed(rules: &Api<NodeStartupRule>) -> bool {
    loop {
        match timeout(CALL, rules.list(&ListParams::default().limit(1))).await {
            Ok(Ok(_)) => return true,
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => return false,
            Ok(Err(error)) => warn!(%error, "cannot ask for NodeStartupRules, trying again"),
            Err(_) => warn!("cannot ask for NodeStartupRules in time, trying again"),
        }
        sleep(Duration::from_secs(1)).await;
    }
}

pub(super) fn recompile(shared: &Shared, context: &Context) {
    let mut own = Vec::new();
    shared.cluster_rules.for_each(|_, rule| own.push(Arc::clone(rule)));
    // The first to ask for a taint keeps it, whatever a later rule is called.
    own.sort_by_key(|rule| (rule.metadata.creation_timestamp.clone(), rule.name_any()));
    let built_in: Rules = context.config.node_startup.rules();
    let mut rules = built_in;
    let mut invalid: BTreeMap<String, Invalid> = BTreeMap::new();
    for rule in &own {
        let mut draft = rule.draft();
        draft.dry_run |= !rule.finalizers().iter().any(|f| f == FINALIZER);
        let (compiled, why) = draft.compile();
        invalid.extend(why.map(|why| (rule.name_any(), why)));
        rules.rules.push(compiled);
    }
    rules.refused = refuse_doubles(&mut rules.rules);
    rules.refused.extend(invalid);
    let orphans = shared.record.orphans(&rules.rules);
    info!(rules = own.len(), orphans = orphans.len(), "rules of the cluster read");
    rules.rules.extend(orphans.into_iter().map(Rule::of_the_past));
    shared.rules.rcu(|before| Rules { stopped: before.stopped.clone(), ..rules.clone() });
    shared.news();
    shared.mark_all();
}

/// What is wrong with a rule, if anything is: to us, or to the API server that should taint for it.
fn problem(shared: &Shared, name: &str) -> Option<String> {
    let rules = shared.rules();
    let refused = rules.refused.get(name).map(ToString::to_string);
    refused.or_else(|| shared.kept.refusal(rules.rules.iter().find(|r| !r.is_built_in() && r.name == name)?))
}

/// Finalizers and status, by the leader, every few seconds and only where something differs. The counts are of `seen`.
pub(super) async fn maintain(shared: &Shared, context: &Context, seen: &Rules, tallies: &[(String, Tally)]) {
    let mut rules = Vec::new();
    shared.cluster_rules.for_each(|_, rule| rules.push(Arc::clone(rule)));
    for rule in rules {
        let name = rule.name_any();
        // A name of ours: the counts under it are not this rule's, which holds nobody.
        let ours = context.config.node_startup.phases.iter().any(|phase| phase.name == name);
        let tally = tallies.iter().find(|(of, _)| *of == name && !ours).map(|(_, tally)| *tally).unwrap_or_default();
        let over = tally.held == 0 && seen.over().any(|over| *over == name) && shared.kept.is_over(&name);
        let done = match finalizer(&rule, over, (context.clock)()) {
            Some(finalizers) => {
                let version = rule.resource_version().unwrap_or_default();
                let patch = json!({"metadata": {"finalizers": finalizers}});
                write(context, &rule, Write::Merge { version, patch }).await
            }
            None => match status(shared, context, &rule, &tally) {
                Some(status) => write(context, &rule, Write::MergeStatus(json!(status))).await,
                None => Ok(()),
            },
        };
        if let Err(why) = done {
            warn!(rule = name, why, "the rule could not be written, trying again");
        }
    }
}

async fn write(context: &Context, rule: &NodeStartupRule, write: Write) -> Result<(), String> {
    let target = Target::of::<NodeStartupRule>(None, &rule.name_any(), &rule.uid().unwrap_or_default());
    match context.writer.write(Feature::NodeStartup, &target, &write).await {
        // A conflict shows in the cache soon, and is looked at again then.
        Ok(Outcome::Done(_) | Outcome::Gone | Outcome::NotLeader | Outcome::Conflict) => Ok(()),
        Ok(other) => Err(format!("{other:?}")),
        Err(error) => Err(error.to_string()),
    }
}

/// The list of finalizers the rule should have, if it has another. `over`: nobody carries its taint, nor will.
fn finalizer(rule: &NodeStartupRule, over: bool, now: jiff::Timestamp) -> Option<Vec<String>> {
    let has = rule.finalizers().iter().any(|f| f == FINALIZER);
    match (&rule.metadata.deletion_timestamp, has) {
        (None, false) => Some(rule.finalizers().iter().cloned().chain([FINALIZER.to_owned()]).collect()),
        (Some(deleted), true) => {
            let free = over && now.duration_since(deleted.0).as_secs() >= LINGER;
            free.then(|| rule.finalizers().iter().filter(|f| *f != FINALIZER).cloned().collect())
        }
        _ => None,
    }
}

/// The status the rule should have, if it has another.
fn status(shared: &Shared, context: &Context, rule: &NodeStartupRule, tally: &Tally) -> Option<NodeStartupRuleStatus> {
    let before = rule.status.clone().unwrap_or_default();
    let condition = |type_: &str, (good, bad): (&str, &str), problem: Option<String>| {
        let status = if problem.is_none() { "True" } else { "False" };
        let known = before.conditions.iter().find(|c| c.type_ == type_ && c.status == status);
        Condition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: if problem.is_none() { good } else { bad }.to_owned(),
            message: problem.unwrap_or_default(),
            last_transition_time: known.map_or(Time((context.clock)()), |c| c.last_transition_time.clone()),
            observed_generation: rule.metadata.generation,
        }
    };
    let wanted = NodeStartupRuleStatus {
        observed_generation: rule.metadata.generation,
        taint: Some(rule.draft().taint().to_string()),
        held: tally.held,
        timed_out: tally.timed_out,
        cannot_run: tally.cannot_run,
        would_hold: tally.would_hold,
        conditions: vec![
            condition("Accepted", ("Compiled", "Invalid"), problem(shared, &rule.name_any())),
            condition("OperatorTolerates", ("Listed", "NotListed"), locks_us_out(context, rule)),
        ],
    };
    (wanted != before).then_some(wanted)
}

/// Whether a cluster of nodes that this rule holds could not start the operator, which alone releases them.
fn locks_us_out(context: &Context, rule: &NodeStartupRule) -> Option<String> {
    let key = rule.draft().taint().key;
    let told = context.config.node_startup.tolerated_keys().any(|told| told == key);
    let why = || {
        format!(
            "the operator's pods do not tolerate {key}: where this rule may hold every node at once, add the key to \
             nodeStartup.operatorTolerates"
        )
    };
    (!told).then(why)
}
