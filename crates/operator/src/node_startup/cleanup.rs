//! Leaves no taint, policy or finalizer behind: for `groundcrew cleanup`, and where the feature was turned off.
//!
//! Only what is known to be ours is touched: taints on record, those of rules, and those of the configuration where it
//! is in force. Another tool may use the same taint in a cluster where this feature has never been on.

use std::time::Duration;

use groundcrew_core::config::Config;
use groundcrew_core::feature::Feature;
use groundcrew_core::node_startup::{NodeFacts, Rule, Rules, Seen, TaintSpec, decide};
use jiff::Timestamp;
use k8s_openapi::api::admissionregistration::v1::{MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding};
use k8s_openapi::api::core::v1 as api;
use k8s_openapi::api::rbac::v1::PolicyRule;
use kube::api::{Api, ListParams};
use kube::{Resource, ResourceExt};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use super::crd::NodeStartupRule;
use super::rules::FINALIZER;
use super::{engine, gather, record};
use crate::manifests::rule;
use crate::run::Context;
use crate::runtime::apply::{Metrics, Outcome, Target, Write, Writer};
use crate::runtime::client::Clients;

/// API servers learn by watch that a policy is gone.
const LINGER: Duration = Duration::from_secs(2);
const ATTEMPTS: usize = 20;
const CALL: Duration = Duration::from_secs(30);
const AGAIN: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_secs(5);
const PAGE: u32 = 500;

/// Who cleans, and where.
struct Cleaner<'a> {
    clients: &'a Clients,
    writer: &'a Writer,
    namespace: &'a str,
}

/// What a feature that is off may still do: take back what it did while it was on.
#[must_use]
pub fn permissions() -> Vec<PolicyRule> {
    let policies = ["mutatingadmissionpolicies", "mutatingadmissionpolicybindings"];
    vec![
        rule("", &["nodes"], &["list", "patch"], &[]),
        rule("groundcrew.io", &["nodestartuprules"], &["list", "patch"], &[]),
        rule("admissionregistration.k8s.io", &policies, &["list", "delete"], &[]),
    ]
}

/// For a feature that is off: what it left is taken back, again and again until a rollout must be over.
pub fn start(context: &Context) {
    let context = context.clone();
    context.tasks.clone().spawn(context.stopping.clone().run_until_cancelled_owned(async move {
        let mut leader = context.leadership.watch();
        let mut clean_since = None;
        loop {
            if leader.wait_for(|leads| *leads).await.is_err() {
                return;
            }
            let Context { clients, writer, namespace, .. } = &context;
            let cleaner = Cleaner { clients, writer, namespace };
            let pause = match cleaner.retire(&context.config, clean_since).await {
                Ok(Step::Over) => return,
                Ok(Step::Clean) => {
                    clean_since.get_or_insert_with(Instant::now);
                    AGAIN
                }
                Ok(Step::Cleaned) => {
                    clean_since = Some(Instant::now());
                    AGAIN
                }
                Err(why) => {
                    warn!(why, "node_startup is off and could not take back everything yet, trying again");
                    RETRY
                }
            };
            sleep(pause).await;
        }
    }));
}

enum Step {
    /// There was something to take back.
    Cleaned,
    Clean,
    /// There is nothing of ours, and has not been for long.
    Over,
}

/// `groundcrew cleanup`, with whatever rights its caller has.
pub async fn run(clients: &Clients, config: &Config, namespace: &str) -> Result<(), String> {
    let writer = &Writer::for_any_replica(clients.write.clone(), Metrics::default());
    let recorded = record::read(&clients.read, namespace).await?;
    Cleaner { clients, writer, namespace }.take_back(config, &recorded).await.map(drop)
}

impl Cleaner<'_> {
    async fn retire(&self, config: &Config, clean_since: Option<Instant>) -> Result<Step, String> {
        let recorded = record::read(&self.clients.read, self.namespace).await?;
        // The record knows only the built-in taints; a rule that has tainted anybody carries our finalizer.
        let never_on = || async { Ok::<_, String>(recorded.is_empty() && self.bound_rules().await?.is_empty()) };
        if clean_since.is_none() && never_on().await? {
            return Ok(Step::Over);
        }
        if self.take_back(config, &recorded).await? > 0 {
            info!("node_startup is off: its policies and taints were taken back");
            return Ok(Step::Cleaned);
        }
        if clean_since.is_some_and(|since| since.elapsed() > record::FORGET_AFTER) {
            if recorded.is_empty() {
                return Ok(Step::Over);
            }
            record::write(self.writer, self.namespace, &[]).await?;
        }
        Ok(Step::Clean)
    }

    /// Policies first, so that nobody is tainted any more; then the taints; then the rules may go. How much that was.
    async fn take_back(&self, config: &Config, recorded: &[TaintSpec]) -> Result<usize, String> {
        let mut policies = 0;
        if engine::served(&self.clients.read).await? {
            policies += self.delete::<MutatingAdmissionPolicyBinding>().await?;
            policies += self.delete::<MutatingAdmissionPolicy>().await?;
        }
        let own = self.cluster_rules().await?;
        let mut rules: Vec<Rule> = recorded.iter().cloned().map(Rule::of_the_past).collect();
        if config.node_startup.enabled || policies > 0 {
            rules.extend(config.node_startup.rules().rules.into_iter().map(|rule| Rule::of_the_past(rule.taint)));
        }
        rules.extend(own.iter().map(|rule| Rule::of_the_past(rule.draft().taint())));
        if policies > 0 || !own.is_empty() {
            sleep(LINGER).await;
        }
        let released = self.release_all(&Rules { rules, ..Rules::default() }).await?;
        Ok(policies + released + self.let_rules_go().await?)
    }

    /// Lists and releases until a list shows nobody held: another writer may have made a patch fail.
    async fn release_all(&self, rules: &Rules) -> Result<usize, String> {
        let mut released = 0;
        for _ in 0..ATTEMPTS {
            let mut held = 0;
            for node in self.nodes().await? {
                let seen = Seen { node: &node, daemon_sets: &[], pods: &[], user_pods: true };
                let now = Timestamp::now();
                let Some(patch) = decide(rules, &seen, now).patch(&node, now) else { continue };
                held += 1;
                let target = Target::of::<api::Node>(None, &node.name, &node.uid);
                if self.write(&target, &Write::Json(patch)).await? {
                    released += 1;
                    info!(node = node.name, "Removed startup taint");
                }
            }
            if held == 0 {
                return Ok(released);
            }
        }
        Err("some nodes keep changing and are still held; run it again".to_owned())
    }

    async fn nodes(&self) -> Result<Vec<NodeFacts>, String> {
        let nodes: Api<gather::Node> = Api::all(self.clients.read.clone());
        let mut params = ListParams::default().limit(PAGE);
        let mut facts = Vec::new();
        loop {
            let page = in_time(nodes.list(&params)).await?;
            facts.extend(page.items.into_iter().filter_map(gather::node));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(facts),
            }
        }
    }

    async fn cluster_rules(&self) -> Result<Vec<NodeStartupRule>, String> {
        match timeout(CALL, Api::<NodeStartupRule>::all(self.clients.read.clone()).list(&ListParams::default())).await {
            Ok(Ok(list)) => Ok(list.items),
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => Ok(Vec::new()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("no answer in time".to_owned()),
        }
    }

    async fn bound_rules(&self) -> Result<Vec<NodeStartupRule>, String> {
        let mut bound = self.cluster_rules().await?;
        bound.retain(|rule| rule.finalizers().iter().any(|f| f == FINALIZER));
        Ok(bound)
    }

    /// Without anybody to remove it, our finalizer would keep a rule from ever being deleted.
    async fn let_rules_go(&self) -> Result<usize, String> {
        let mut freed = 0;
        for _ in 0..ATTEMPTS {
            let bound = self.bound_rules().await?;
            if bound.is_empty() {
                return Ok(freed);
            }
            for rule in bound {
                let kept: Vec<&String> = rule.finalizers().iter().filter(|f| *f != FINALIZER).collect();
                let patch = json!({"metadata": {"finalizers": kept}});
                let target = Target::of::<NodeStartupRule>(None, &rule.name_any(), &rule.uid().unwrap_or_default());
                let version = rule.resource_version().unwrap_or_default();
                freed += usize::from(self.write(&target, &Write::Merge { version, patch }).await?);
            }
        }
        Err("some rules keep changing and still carry the finalizer; run it again".to_owned())
    }

    async fn delete<K: Resource<DynamicType = ()>>(&self) -> Result<usize, String> {
        let owned = engine::owned::<K>(&self.clients.read).await?;
        for object in &owned {
            let target = Target::of::<K>(None, &object.name_any(), &object.uid().unwrap_or_default());
            self.write(&target, &Write::Delete { version: None }).await?;
        }
        Ok(owned.len())
    }

    /// Whether it was made; not if the object has changed or is gone.
    async fn write(&self, target: &Target, write: &Write) -> Result<bool, String> {
        match self.writer.write(Feature::NodeStartup, target, write).await {
            Ok(Outcome::Done(_)) => Ok(true),
            Ok(Outcome::Gone | Outcome::Conflict) => Ok(false),
            Ok(other) => Err(format!("{other:?}")),
            Err(error) => Err(error.to_string()),
        }
    }
}

async fn in_time<T>(call: impl Future<Output = kube::Result<T>>) -> Result<T, String> {
    match timeout(CALL, call).await {
        Ok(answer) => answer.map_err(|e| e.to_string()),
        Err(_) => Err("no answer in time".to_owned()),
    }
}
