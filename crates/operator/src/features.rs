//! The one table of features: what each needs from the cluster and what it does in this process.

use groundcrew_core::config::Config;
use groundcrew_core::feature::Feature;
use k8s_openapi::api::rbac::v1::PolicyRule;
use prometheus_client::registry::Registry;

use crate::admission::PodFeature;
use crate::admission::certs::Trust;
use crate::admission::registration::{self, Desired, Entry, Namespaces, Target};
use crate::run::Context;
use crate::{spread, timestamp};

/// One feature, as the process sees it.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub feature: Feature,
    pub enabled: fn(&Config) -> bool,
    /// What it may do in the whole cluster.
    pub permissions: fn(&Config) -> Vec<PolicyRule>,
    /// What the API server is to send us for it.
    pub entries: fn(&Config, &Namespaces) -> Vec<Entry>,
    /// Its part in pod admission.
    pub admission: fn(&Context) -> Option<Box<dyn PodFeature>>,
    /// Starts its caches and controllers.
    pub start: fn(&Context, &mut Registry),
}

pub const TABLE: [Row; 2] = [spread::ROW, timestamp::ROW];

pub fn enabled(config: &Config) -> impl Iterator<Item = &'static Row> {
    TABLE.iter().filter(|row| (row.enabled)(config))
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
