//! The webhook configurations: what the API server is to send us, and how it knows us.
//!
//! [`desired`] is pure and also what `groundcrew manifests` prints; [`keep`] holds the API server to it.
//!
//! Each feature has an entry of its own, yet one object is sent once: an entry fires only if no wider entry before it
//! on the same path fires, and the handler serves all features whichever entry called.

use std::collections::BTreeMap;

use groundcrew_core::config::BaseUrl;
use groundcrew_core::feature::Feature;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MatchCondition, MutatingWebhook, MutatingWebhookConfiguration, RuleWithOperations, ServiceReference,
    ValidatingWebhook, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use kube::api::ObjectMeta;

use super::certs::Trust;

mod compare;
mod keep;
mod object;
mod record;
#[cfg(test)]
mod tests;

pub use self::keep::{Settings, keep, remove};

/// The name of both configurations.
pub const NAME: &str = "groundcrew";
/// Ends the name of every entry.
const DOMAIN: &str = ".groundcrew.io";
/// Under `matchConditions` the feature's own condition; the others say which entries come first.
const OWN_CONDITION: &str = "opted-in";
/// A hung webhook costs every object this much: one second is the least the API knows.
const TIMEOUT_SECONDS: i32 = 1;

/// Which of the two configurations an entry belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Mutating,
    Validating,
}

/// Whether an object that we cannot judge gets in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailurePolicy {
    Ignore,
    Fail,
}

/// From which namespaces objects are sent. Says nothing about cluster-scoped objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Namespaces {
    All,
    Except(Vec<String>),
}

impl Namespaces {
    fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::All, _) => true,
            (Self::Except(_), Self::All) => false,
            (Self::Except(mine), Self::Except(others)) => mine.iter().all(|name| others.contains(name)),
        }
    }

    fn selector(&self) -> LabelSelector {
        match self {
            Self::Except(names) if !names.is_empty() => LabelSelector {
                match_expressions: Some(vec![LabelSelectorRequirement {
                    key: "kubernetes.io/metadata.name".to_owned(),
                    operator: "NotIn".to_owned(),
                    values: Some(names.clone()),
                }]),
                ..LabelSelector::default()
            },
            _ => LabelSelector::default(),
        }
    }
}

/// Which requests are meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    pub groups: Vec<&'static str>,
    pub versions: Vec<&'static str>,
    pub resources: Vec<&'static str>,
    pub operations: Vec<&'static str>,
    /// `Namespaced`, `Cluster` or `*`.
    pub scope: &'static str,
}

/// One feature's entry.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    pub feature: &'static str,
    pub kind: Kind,
    pub path: &'static str,
    pub rules: Vec<Rule>,
    /// CEL over `object`; absent means every object of the rules.
    ///
    /// Should stay as it is under our own patch: the API server evaluates each entry on what the one before it left,
    /// so a condition that our patch turns false lets the next entry send the object once more.
    pub condition: Option<String>,
    pub namespaces: Namespaces,
    pub objects: Option<LabelSelector>,
    pub failure_policy: FailurePolicy,
}

impl Entry {
    /// Pods that are created and fulfil `condition`; without us they are created all the same.
    #[must_use]
    pub fn pod_created(feature: Feature, condition: impl Into<String>, namespaces: Namespaces) -> Self {
        Self {
            feature: feature.name(),
            kind: Kind::Mutating,
            path: "/mutate-v1-pod",
            rules: vec![Rule {
                groups: vec![""],
                versions: vec!["v1"],
                resources: vec!["pods"],
                operations: vec!["CREATE"],
                scope: "Namespaced",
            }],
            condition: Some(condition.into()),
            namespaces,
            objects: None,
            failure_policy: FailurePolicy::Ignore,
        }
    }

    /// Deployments and StatefulSets that are written and fulfil `condition`: their author may be warned, never refused.
    #[must_use]
    pub fn workload_written(feature: Feature, condition: impl Into<String>, namespaces: Namespaces) -> Self {
        Self {
            kind: Kind::Validating,
            path: "/validate",
            rules: vec![Rule {
                groups: vec!["apps"],
                versions: vec!["v1"],
                resources: vec!["deployments", "statefulsets"],
                operations: vec!["CREATE", "UPDATE"],
                scope: "Namespaced",
            }],
            ..Self::pod_created(feature, condition, namespaces)
        }
    }

    pub fn name(&self) -> String {
        format!("{}{DOMAIN}", self.slug())
    }

    /// Feature names have underscores, DNS names must not.
    fn slug(&self) -> String {
        self.feature.replace('_', "-")
    }

    /// Whether each object that `other` is about is one that this entry is about, conditions aside.
    fn covers(&self, other: &Self) -> bool {
        self.path == other.path
            && self.namespaces.covers(&other.namespaces)
            && (self.objects.is_none() || self.objects == other.objects)
            && other.rules.iter().all(|rule| self.rules.contains(rule))
    }
}

/// Where the API server finds us.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    Service {
        name: String,
        namespace: String,
        port: i32,
    },
    /// A server outside the cluster, reached at the base plus the path of each entry.
    Url(BaseUrl),
}

impl Target {
    /// The names the API server verifies in our certificate.
    pub fn names(&self) -> Vec<String> {
        match self {
            Self::Service { name, namespace, .. } => {
                vec![format!("{name}.{namespace}.svc"), format!("{name}.{namespace}.svc.cluster.local")]
            }
            Self::Url(url) => vec![url.host.clone()],
        }
    }

    fn client_config(&self, path: &str, trust: &Trust) -> WebhookClientConfig {
        let ca_bundle = match trust {
            Trust::Bundle(pem) | Trust::Offered(pem) => Some(ByteString(pem.to_vec())),
            Trust::External | Trust::Unknown => None,
        };
        match self {
            Self::Service { name, namespace, port } => WebhookClientConfig {
                ca_bundle,
                service: Some(ServiceReference {
                    name: name.clone(),
                    namespace: namespace.clone(),
                    path: Some(path.to_owned()),
                    port: Some(*port),
                }),
                url: None,
            },
            Self::Url(BaseUrl { base, .. }) => {
                WebhookClientConfig { ca_bundle, service: None, url: Some(format!("{base}{path}")) }
            }
        }
    }
}

/// Both configurations; a kind without entries has none.
#[derive(Debug, Clone, PartialEq)]
pub struct Desired {
    pub mutating: Option<MutatingWebhookConfiguration>,
    pub validating: Option<ValidatingWebhookConfiguration>,
}

pub fn desired(entries: &[Entry], target: &Target, trust: &Trust) -> Desired {
    let metadata = ObjectMeta { name: Some(NAME.to_owned()), labels: Some(labels()), ..ObjectMeta::default() };
    let mutating = arranged(entries, Kind::Mutating);
    let validating = arranged(entries, Kind::Validating);
    let mutating: Vec<_> =
        mutating.iter().map(|(entry, conditions)| mutating_webhook(entry, conditions, target, trust)).collect();
    let validating: Vec<_> =
        validating.iter().map(|(entry, conditions)| validating_webhook(entry, conditions, target, trust)).collect();
    Desired {
        mutating: (!mutating.is_empty())
            .then(|| MutatingWebhookConfiguration { metadata: metadata.clone(), webhooks: Some(mutating) }),
        validating: (!validating.is_empty())
            .then_some(ValidatingWebhookConfiguration { metadata, webhooks: Some(validating) }),
    }
}

/// On everything we create.
pub fn labels() -> BTreeMap<String, String> {
    ["name", "managed-by"].map(|key| (format!("app.kubernetes.io/{key}"), NAME.to_owned())).into()
}

/// The entries of one kind, widest first, each with conditions that keep it silent where an earlier one speaks.
///
/// An entry behind one without a condition would never fire and is left out.
fn arranged(entries: &[Entry], kind: Kind) -> Vec<(&Entry, Vec<MatchCondition>)> {
    let mut entries: Vec<&Entry> = entries.iter().filter(|entry| entry.kind == kind).collect();
    entries.sort_by_key(|entry| (entry.path, entry.namespaces != Namespaces::All));
    let silent = |at: usize, entry: &Entry| {
        entries.iter().take(at).any(|earlier| earlier.condition.is_none() && earlier.covers(entry))
    };
    let conditions = |at: usize, entry: &Entry| {
        let own = entry.condition.iter().map(|expression| condition(OWN_CONDITION.to_owned(), expression.clone()));
        let earlier = entries.iter().take(at).filter(|earlier| earlier.covers(entry)).filter_map(|earlier| {
            let expression = earlier.condition.as_ref()?;
            Some(condition(format!("not-{}", earlier.slug()), format!("!({expression})")))
        });
        own.chain(earlier).collect()
    };
    let arranged = entries.iter().enumerate().filter(|(at, entry)| !silent(*at, entry));
    arranged.map(|(at, entry)| (*entry, conditions(at, entry))).collect()
}

fn condition(name: String, expression: String) -> MatchCondition {
    MatchCondition { name, expression }
}

fn mutating_webhook(entry: &Entry, conditions: &[MatchCondition], target: &Target, trust: &Trust) -> MutatingWebhook {
    let validating = validating_webhook(entry, conditions, target, trust);
    MutatingWebhook {
        admission_review_versions: validating.admission_review_versions,
        client_config: validating.client_config,
        failure_policy: validating.failure_policy,
        match_conditions: validating.match_conditions,
        match_policy: validating.match_policy,
        name: validating.name,
        namespace_selector: validating.namespace_selector,
        object_selector: validating.object_selector,
        // Our patch is the same on what others made of the object since.
        reinvocation_policy: Some("IfNeeded".to_owned()),
        rules: validating.rules,
        side_effects: validating.side_effects,
        timeout_seconds: validating.timeout_seconds,
    }
}

/// Every field is given, also those at their default: what is not ours could be changed unnoticed.
fn validating_webhook(
    entry: &Entry,
    conditions: &[MatchCondition],
    target: &Target,
    trust: &Trust,
) -> ValidatingWebhook {
    ValidatingWebhook {
        admission_review_versions: vec!["v1".to_owned()],
        client_config: target.client_config(entry.path, trust),
        failure_policy: Some(format!("{:?}", entry.failure_policy)),
        match_conditions: (!conditions.is_empty()).then(|| conditions.to_vec()),
        match_policy: Some("Equivalent".to_owned()),
        name: entry.name(),
        namespace_selector: Some(entry.namespaces.selector()),
        object_selector: Some(entry.objects.clone().unwrap_or_default()),
        rules: Some(entry.rules.iter().map(rule).collect()),
        side_effects: "None".to_owned(),
        timeout_seconds: Some(TIMEOUT_SECONDS),
    }
}

fn rule(rule: &Rule) -> RuleWithOperations {
    let owned = |texts: &[&str]| Some(texts.iter().map(|text| (*text).to_owned()).collect());
    RuleWithOperations {
        api_groups: owned(&rule.groups),
        api_versions: owned(&rule.versions),
        operations: owned(&rule.operations),
        resources: owned(&rule.resources),
        scope: Some(rule.scope.to_owned()),
    }
}
