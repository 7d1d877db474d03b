//! Births and refusals, answered from memory.

use std::sync::Arc;

use groundcrew_core::feature::Feature;
use groundcrew_core::node_startup::admission::{Birth, NodeView, decide, patch};
use groundcrew_core::node_startup::deny::{BoundPod, refusal};
use groundcrew_core::node_startup::guard::Guard;
use groundcrew_core::node_startup::{Rule, Rules};
use json_patch::Patch;
use tracing::{info, warn};

use super::Shared;
use crate::admission::node::{NodeContribution, NodeFeature};
use crate::admission::validate::{Judged, Refusal, Validator};
use crate::runtime::cache::Key;

impl NodeFeature for Shared {
    fn feature(&self) -> Feature {
        Feature::NodeStartup
    }

    fn review(&self, node: &NodeView<'_>, out: &mut NodeContribution) {
        let rules = self.rules();
        let name = node.metadata.name.as_ref().map_or("", |name| name.as_str());
        let births: Vec<(&Rule, Birth)> =
            rules.rules.iter().map(|rule| (rule, decide(&rules, rule, self.guard(rule), node))).collect();
        for (rule, birth) in &births {
            match birth {
                Birth::Taint => info!(node = name, rule = rule.name, taint = %rule.taint, "Adding startup taint"),
                Birth::Clash => {
                    let taint = &rule.taint;
                    warn!(node = name, rule = rule.name, %taint, "another taint has this key and effect");
                    out.warnings.push(format!(
                        "groundcrew: not held by {taint}: the node has another taint of that key and effect"
                    ));
                }
                Birth::Stopped => {
                    warn!(node = name, rule = rule.name, "not tainted: too many recent nodes timed out");
                }
                Birth::NotAsked | Birth::AlreadyThere => {}
            }
        }
        let tainting = births.into_iter().filter(|(_, birth)| *birth == Birth::Taint).map(|(rule, _)| rule);
        let Patch(operations) = patch(node, tainting);
        out.operations.extend(operations);
    }
}

/// `denyUntolerated`.
#[derive(Debug)]
pub struct Denier(pub Arc<Shared>);

impl Validator for Denier {
    fn feature(&self) -> Feature {
        Feature::NodeStartup
    }

    fn judges(&self) -> Judged<'static> {
        Judged { group: "", kinds: &["Pod"], operations: &["CREATE"] }
    }

    fn validate(&self, object: &str) -> Result<(), Refusal> {
        let pod: BoundPod<'_> = serde_json::from_str(object).map_err(|e| Refusal::Unreadable(e.to_string()))?;
        let Some(name) = pod.target() else { return Ok(()) };
        let key = Key { namespace: String::new(), name: name.to_owned() };
        let Some(node) = self.0.world.nodes.get(&key) else { return Ok(()) };
        let rules: Arc<Rules> = self.0.rules();
        refusal(&rules, &pod, &node.taints).map_or(Ok(()), |why| Err(Refusal::Denied(why)))
    }
}

impl Shared {
    /// Open for a rule that nobody has judged yet.
    pub(super) fn guard(&self, rule: &Rule) -> Guard {
        self.guards.load().get(&rule.name).copied().unwrap_or(Guard::Open)
    }
}
