//! The one table of features: what each needs from the cluster and what it does in this process.

use std::sync::Arc;

use groundcrew_core::config::Config;
use groundcrew_core::feature::Feature;
use k8s_openapi::api::core::v1::Toleration;
use k8s_openapi::api::rbac::v1::PolicyRule;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use prometheus_client::registry::Registry;
use serde_json::Value;

use crate::admission::PodFeature;
use crate::admission::certs::Trust;
use crate::admission::node::NodeFeature;
use crate::admission::registration::{self, Desired, Entry, Namespaces, Target};
use crate::admission::validate::Validator;
use crate::run::Context;
use crate::{definitions, node_startup, sizing, spread, timestamp, warmup};

/// One feature, as the process sees it.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub feature: Feature,
    pub enabled: fn(&Config) -> bool,
    /// What it may do in the whole cluster.
    pub permissions: fn(&Config) -> Vec<PolicyRule>,
    /// What it may do in the operator's own namespace.
    pub own_permissions: fn() -> Vec<PolicyRule>,
    /// What the API server is to send us for it.
    pub entries: fn(&Config, &Namespaces) -> Vec<Entry>,
    /// The kinds it brings along.
    pub crds: fn() -> Vec<CustomResourceDefinition>,
    /// Its part in pod admission.
    pub admission: fn(&Context, &mut Registry) -> Option<Box<dyn PodFeature>>,
    /// What an installation needs for it beyond permissions: namespace and image given.
    pub objects: fn(&Config, &str, &str) -> Vec<Value>,
    /// Starts its caches and controllers.
    pub start: fn(&Context, &mut Registry),
}

pub const TABLE: [Row; 5] = [node_startup::ROW, sizing::ROW, spread::ROW, timestamp::ROW, warmup::ROW];

pub fn enabled(config: &Config) -> impl Iterator<Item = &'static Row> {
    TABLE.iter().filter(|row| (row.enabled)(config))
}

/// Who has a say when a node is created.
#[must_use]
pub fn node_features(context: &Context) -> Vec<Arc<dyn NodeFeature>> {
    let mut features: Vec<Arc<dyn NodeFeature>> = Vec::new();
    if context.config.node_startup.enabled {
        features.push(Arc::clone(&context.node_startup) as _);
    }
    features
}

/// Who may refuse an object or warn of it.
#[must_use]
pub fn validators(context: &Context) -> Vec<Box<dyn Validator>> {
    let mut validators: Vec<Box<dyn Validator>> = Vec::new();
    if context.config.node_startup.enabled && context.config.node_startup.deny_untolerated {
        validators.push(Box::new(node_startup::admission::Denier(Arc::clone(&context.node_startup))));
    }
    if context.config.spread.enabled {
        validators.push(Box::new(spread::RuleReader));
    }
    if context.config.warmup.enabled {
        validators.push(Box::new(warmup::TemplateReader));
    }
    validators
}

/// What the features may do in the whole cluster; one that is off may still undo what it did while it was on.
#[must_use]
pub fn permissions(config: &Config) -> Vec<PolicyRule> {
    let mut rules = node_startup::cleanup::permissions();
    rules.extend(enabled(config).flat_map(|row| (row.permissions)(config)));
    rules
}

/// What the features may do in the operator's own namespace.
#[must_use]
pub fn own_permissions(config: &Config) -> Vec<PolicyRule> {
    enabled(config).flat_map(|row| (row.own_permissions)()).collect()
}

/// Starts the enabled features, and what those that are off have to take back.
pub fn start(context: &Context, registry: &mut Registry) {
    for row in enabled(&context.config) {
        (row.start)(context, registry);
    }
    if !context.config.node_startup.enabled {
        node_startup::cleanup::start(context);
    }
}

/// The resources that the enabled features bring.
#[must_use]
pub fn definitions(config: &Config) -> Vec<CustomResourceDefinition> {
    enabled(config).flat_map(definitions::of).collect()
}

/// What the operator's own pods tolerate. That of a feature that is off as well: nodes that it held are released by the
/// operator alone, and perhaps there are no others to start it on.
#[must_use]
pub fn tolerations(config: &Config) -> Vec<Toleration> {
    node_startup::tolerations(config)
}

/// Where the API server finds the webhooks.
pub fn target(config: &Config, namespace: &str) -> Result<Target, String> {
    match &config.webhook.url {
        Some(url) => Target::url(url).map_err(|e| e.to_string()),
        None => {
            Ok(Target::Service { name: config.webhook.service.clone(), namespace: namespace.to_owned(), port: 443 })
        }
    }
}

/// The entries of every enabled feature; none when the webhook is off.
#[must_use]
pub fn entries(config: &Config, namespace: &str) -> Vec<Entry> {
    if !config.webhook.enabled {
        return Vec::new();
    }
    let namespaces = Namespaces::Except(exempt_namespaces(config, namespace));
    enabled(config).flat_map(|row| (row.entries)(config, &namespaces)).collect()
}

/// The operator's own namespace is always exempt: it must be able to start without itself.
#[must_use]
pub fn exempt_namespaces(config: &Config, own: &str) -> Vec<String> {
    let mut names = config.webhook.exempt_namespaces.clone();
    if !names.iter().any(|name| name == own) {
        names.push(own.to_owned());
    }
    names
}

/// The webhook configurations as they are registered, without a CA.
#[must_use]
pub fn webhook_configurations(config: &Config, namespace: &str) -> Desired {
    let entries = entries(config, namespace);
    match target(config, namespace) {
        Ok(target) => registration::desired(&entries, &target, &Trust::External),
        Err(_) => Desired { mutating: None, validating: None },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_feature_has_one_row() {
        assert_eq!(TABLE.map(|row| row.feature), Feature::ALL);
    }
}
