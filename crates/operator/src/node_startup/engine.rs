//! Who taints new nodes: policies inside the API server, or our webhook. Never both, and no gap when it changes.
//!
//! ```text
//! auto ──► are MutatingAdmissionPolicies served? ──yes──► apply policies, then drop the webhook entry
//!                                                 ──no───► register the webhook entry, then remove policies
//! ```
//!
//! An entry that is registered when we start, or when we begin to lead, stays until the policies are seen in place.
//!
//! A graceful stop leaves the policies: nodes are born tainted while nobody of us lives. The moment in which both are
//! there is harmless, since whoever comes second finds the taint.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use groundcrew_core::config::Engine;
use groundcrew_core::feature::Feature;
use groundcrew_core::node_startup::Rules;
use groundcrew_core::node_startup::policy;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding, MutatingWebhookConfiguration,
};
use kube::api::{Api, DynamicObject, ListParams};
use kube::core::discovery::ApiResource;
use kube::{Client, Resource, ResourceExt};
use serde_json::Value;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use super::metrics::Metrics;
use super::{Shared, node_entry};
use crate::admission::registration::{Kind, NAME};
use crate::run::Context;
use crate::runtime::apply::{Outcome, Target, Write, WriteError};

/// How often to look whether the API server was upgraded, and whether the policies are as they should be.
const LOOK: Duration = Duration::from_secs(15);
/// After an error, and while the first answer is missing.
const RETRY: Duration = Duration::from_secs(2);
const CALL: Duration = Duration::from_secs(5);
/// API servers learn of a new policy by watch; until all have, the webhook stays.
const OVERLAP: Duration = Duration::from_secs(3);

/// What is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Active {
    Webhook,
    Policy,
    None,
}

impl Active {
    const fn name(self) -> &'static str {
        match self {
            Self::Webhook => "webhook",
            Self::Policy => "policy",
            Self::None => "none",
        }
    }
}

pub(super) fn start(context: &Context, shared: &Arc<Shared>, metrics: Metrics) {
    let (shared, context) = (Arc::clone(shared), context.clone());
    let known = context.readiness.check("what taints new nodes so far");
    context.tasks.clone().spawn(context.stopping.clone().run_until_cancelled_owned(async move {
        keep_what_is_registered(&context).await;
        known.pass();
        let mut news = shared.version.subscribe();
        let mut leader = context.leadership.watch();
        let mut before = None;
        loop {
            let wait = match settle(&shared, &context, &mut before, &metrics).await {
                Ok(()) => LOOK,
                Err(error) => {
                    warn!(error, "the tainting of new nodes is not set up yet, trying again");
                    RETRY
                }
            };
            tokio::select! {
                Ok(()) = news.changed() => {}
                Ok(()) = leader.changed() => {}
                () = sleep(wait) => {}
            }
        }
    }));
}

async fn settle(
    shared: &Shared,
    context: &Context,
    before: &mut Option<Active>,
    metrics: &Metrics,
) -> Result<(), String> {
    if !shared.rules_known() || (context.leadership.is_leader() && !shared.record.asked()) {
        return Ok(());
    }
    let webhook = context.config.webhook.enabled;
    let active = match context.config.node_startup.engine {
        Engine::Policy => Active::Policy,
        Engine::Webhook if webhook => Active::Webhook,
        Engine::Auto if served(&context.clients.read).await? => Active::Policy,
        Engine::Auto if webhook => Active::Webhook,
        _ => Active::None,
    };
    let rules = shared.rules();
    let leads = context.leadership.is_leader();
    let mut refused = BTreeMap::new();
    match active {
        Active::Policy if leads => {
            if !served(&context.clients.read).await? {
                // Nobody is tainted by what is not served, so a rule that goes need not wait.
                shared.kept.note(&rules, refused);
                return Err("this API server has no mutating policies, which nodeStartup.engine asks for".to_owned());
            }
            let written;
            (written, refused) = keep(context, &rules, true).await?;
            if written && has_node_entry(context) {
                sleep(OVERLAP).await;
            }
            // What is refused has no policy: where the webhook stands in for it, that stays.
            if refused.is_empty() {
                register(context, false);
            }
        }
        // Who leads next must not drop the entry before it has seen to the policies.
        Active::Policy => {
            if in_place(context, &rules).await? {
                register(context, false);
            }
        }
        Active::Webhook => {
            if register(context, true) {
                sleep(OVERLAP).await;
            }
            remove_where_served(context, &rules).await?;
        }
        Active::None => {
            register(context, false);
            remove_where_served(context, &rules).await?;
        }
    }
    if before.replace(active) != Some(active) {
        info!(engine = active.name(), "new nodes are tainted by this engine");
        metrics.engine(active.name());
    }
    let problem = refused.iter().next().map(|(name, why)| format!("{name}: {why}"));
    match leads {
        true => shared.kept.note(&rules, refused),
        false => shared.kept.forget(),
    }
    problem.map_or(Ok(()), Err)
}

/// Until policies are in place, a registered webhook is what holds new nodes.
async fn keep_what_is_registered(context: &Context) {
    let config = &context.config;
    if !config.webhook.enabled || !matches!(config.node_startup.engine, Engine::Auto | Engine::Policy) {
        return;
    }
    let api: Api<MutatingWebhookConfiguration> = Api::all(context.clients.read.clone());
    let ours = node_entry(config).name();
    loop {
        match timeout(CALL, api.get_opt(NAME)).await {
            Ok(Ok(live)) => {
                if live.is_some_and(|live| live.webhooks.iter().flatten().any(|webhook| webhook.name == ours)) {
                    register(context, true);
                }
                return;
            }
            Ok(Err(error)) => warn!(%error, "cannot ask which webhooks are registered, trying again"),
            Err(_) => warn!("cannot ask in time which webhooks are registered, trying again"),
        }
        sleep(RETRY).await;
    }
}

async fn remove_where_served(context: &Context, rules: &Rules) -> Result<(), String> {
    if context.leadership.is_leader() && served(&context.clients.read).await? {
        keep(context, rules, false).await?;
    }
    Ok(())
}

fn has_node_entry(context: &Context) -> bool {
    context.entries.borrow().iter().any(|e| e.feature == Feature::NodeStartup.name() && e.kind == Kind::Mutating)
}

/// Adds or removes the node webhook; whether that changed anything.
fn register(context: &Context, wanted: bool) -> bool {
    if has_node_entry(context) == wanted {
        return false;
    }
    context.entries.send_modify(|entries| {
        entries.retain(|e| !(e.feature == Feature::NodeStartup.name() && e.kind == Kind::Mutating));
        if wanted {
            entries.push(node_entry(&context.config));
        }
    });
    true
}

/// Whether the API server serves policies of the version we write.
pub(super) async fn served(client: &Client) -> Result<bool, String> {
    let asked = client.list_api_group_resources("admissionregistration.k8s.io/v1");
    match timeout(CALL, asked).await {
        Ok(Ok(list)) => Ok(list.resources.iter().any(|r| r.name == "mutatingadmissionpolicies")),
        Ok(Err(kube::Error::Api(status))) if status.code == 404 => Ok(false),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("no answer in time".to_owned()),
    }
}

/// What the rules ask for: a policy each, and bindings where the guard is open. Nothing is bound by a policy without.
fn wanted(context: &Context, rules: &Rules) -> (Vec<Value>, Vec<Value>) {
    let failure_policy = context.config.node_startup.failure_policy.name();
    let tainting = || rules.rules.iter().filter(|rule| rule.taints());
    let policies = tainting().map(|rule| policy::policy(rules, rule, failure_policy)).collect();
    (policies, tainting().filter(|rule| !rules.is_stopped(rule)).map(policy::binding).collect())
}

/// What the API server would not have, by name, and why.
type Refused = BTreeMap<String, String>;

/// Makes policies and bindings what the rules ask for, or removes them all; whether anything was written. One that is
/// refused is no reason to leave the others undone.
async fn keep(context: &Context, rules: &Rules, wants: bool) -> Result<(bool, Refused), String> {
    let (policies, bindings) = if wants { wanted(context, rules) } else { Default::default() };
    let mut refused = Refused::new();
    let one = keep_kind::<MutatingAdmissionPolicy>(context, &policies, &mut refused).await?;
    let two = keep_kind::<MutatingAdmissionPolicyBinding>(context, &bindings, &mut refused).await?;
    Ok((one || two, refused))
}

/// Whether the leader has done all that.
async fn in_place(context: &Context, rules: &Rules) -> Result<bool, String> {
    let (policies, bindings) = wanted(context, rules);
    let live_policies = owned::<MutatingAdmissionPolicy>(&context.clients.read).await?;
    let live_bindings = owned::<MutatingAdmissionPolicyBinding>(&context.clients.read).await?;
    Ok(policies.iter().all(|wanted| is_there(&live_policies, wanted))
        && bindings.iter().all(|wanted| is_there(&live_bindings, wanted)))
}

fn name_of(object: &Value) -> &str {
    object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default()
}

fn is_there(live: &[DynamicObject], wanted: &Value) -> bool {
    let same = |live: &DynamicObject| {
        let spec = live.data.get("spec").zip(wanted.get("spec"));
        spec.is_some_and(|(live, wanted)| holds(live, wanted) && whom(live) == whom(wanted))
    };
    live.iter().any(|live| live.name_any() == name_of(wanted) && same(live))
}

/// Whom a policy means. The server adds nothing here, so a label more than we want is a node less, not its own matter.
fn whom(spec: &Value) -> Value {
    spec.pointer("/matchConstraints/objectSelector").map(without_empty).unwrap_or(Value::Null)
}

/// Empty is absent, as the server sees it.
fn without_empty(value: &Value) -> Value {
    let keeps = |value: &Value| !matches!(value, Value::Null) && !is_empty(value);
    match value {
        Value::Object(map) => {
            let kept = map.iter().map(|(key, value)| (key.clone(), without_empty(value)));
            Value::Object(kept.filter(|(_, value)| keeps(value)).collect())
        }
        Value::Array(list) => list.iter().map(without_empty).collect(),
        other => other.clone(),
    }
}

async fn keep_kind<K: Resource<DynamicType = ()>>(
    context: &Context,
    wanted: &[Value],
    refused: &mut Refused,
) -> Result<bool, String> {
    let live = owned::<K>(&context.clients.read).await?;
    let mut written = false;
    for object in wanted.iter().filter(|object| !is_there(&live, object)) {
        let name = name_of(object);
        let target = Target::of::<K>(None, name, "");
        match context.writer.write(Feature::NodeStartup, &target, &Write::Apply(object.clone())).await {
            Err(WriteError::Refused(status)) => {
                refused.insert(name.to_owned(), status.message.clone());
                continue;
            }
            other => done(other)?,
        }
        written = true;
        debug!(name, "policy applied");
    }
    for object in live {
        let name = object.name_any();
        if wanted.iter().any(|wanted| name_of(wanted) == name) {
            continue;
        }
        let target = Target::of::<K>(None, &name, &object.uid().unwrap_or_default());
        done(context.writer.write(Feature::NodeStartup, &target, &Write::Delete { version: None }).await)?;
        written = true;
        debug!(name, "policy removed");
    }
    Ok(written)
}

fn done(result: Result<Outcome, WriteError>) -> Result<(), String> {
    match result {
        Ok(Outcome::Done(_) | Outcome::Gone) => Ok(()),
        Ok(other) => Err(format!("{other:?}")),
        Err(error) => Err(error.to_string()),
    }
}

/// The objects of ours that the API server has.
pub(super) async fn owned<K: Resource<DynamicType = ()>>(client: &Client) -> Result<Vec<DynamicObject>, String> {
    let resource = ApiResource::erase::<K>(&());
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let [(by, owner), (of, feature)] = [policy::OWNED_BY, policy::FEATURE];
    let labels = ListParams::default().labels(&format!("{by}={owner},{of}={feature}"));
    match timeout(CALL, api.list(&labels)).await {
        Ok(Ok(list)) => Ok(list.items),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("no answer in time".to_owned()),
    }
}

/// Whether everything we want is there as we want it; what the server added is its own.
fn holds(live: &Value, wanted: &Value) -> bool {
    match (live, wanted) {
        (Value::Object(live), Value::Object(wanted)) => {
            wanted.iter().all(|(key, value)| live.get(key).is_some_and(|live| holds(live, value)) || is_empty(value))
        }
        (Value::Array(live), Value::Array(wanted)) => {
            live.len() == wanted.len() && live.iter().zip(wanted).all(|(live, wanted)| holds(live, wanted))
        }
        _ => live == wanted,
    }
}

fn is_empty(value: &Value) -> bool {
    value.as_object().is_some_and(serde_json::Map::is_empty) || value.as_array().is_some_and(Vec::is_empty)
}

#[cfg(test)]
mod tests {
    use groundcrew_core::node_startup::Draft;
    use serde_json::json;

    use super::*;

    fn policy_of(selector: Value) -> Value {
        let node_selector = serde_json::from_value(selector).unwrap();
        let draft = Draft { name: "gpu".to_owned(), all_daemon_sets: true, node_selector, ..Draft::default() };
        policy::policy(&Rules::default(), &draft.compile().0, "Fail")
    }

    /// As the API server gives it back: with what it adds, and without what is empty.
    fn live(selector: Value) -> DynamicObject {
        let mut object = policy_of(json!({}));
        object["spec"]["matchConstraints"]["objectSelector"] = selector;
        object["spec"]["variables"] = json!([]);
        object["metadata"]["resourceVersion"] = json!("7");
        serde_json::from_value(object).unwrap()
    }

    #[rstest::rstest]
    #[case::same(json!({"matchLabels": {"a": "1"}}), json!({"matchLabels": {"a": "1"}}), true)]
    #[case::everybody(json!({}), json!({}), true)]
    #[case::empty_parts(json!({"matchLabels": {}, "matchExpressions": []}), json!({}), true)]
    #[case::no_values(json!({"matchExpressions": [{"key": "a", "operator": "Exists", "values": []}]}),
        json!({"matchExpressions": [{"key": "a", "operator": "Exists"}]}), true)]
    #[case::widened(json!({"matchLabels": {"a": "1"}}), json!({"matchLabels": {"a": "1", "b": "2"}}), false)]
    #[case::widened_to_all(json!({}), json!({"matchLabels": {"a": "1"}}), false)]
    #[case::narrowed(json!({"matchLabels": {"a": "1"}}), json!({}), false)]
    fn a_policy_is_in_place_only_if_it_means_the_same_nodes(
        #[case] wanted: Value,
        #[case] there: Value,
        #[case] expected: bool,
    ) {
        assert_eq!(is_there(&[live(there)], &policy_of(wanted)), expected);
    }
}
