//! What the engine has last made true in the API server, for those who must not run ahead of it.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use groundcrew_core::node_startup::{Rule, Rules, policy};
use tokio::time::Instant;

/// API servers learn by watch that a policy is gone.
const SPREAD: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub(super) struct Kept(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Rules without a policy, and since when.
    over: HashMap<String, Instant>,
    /// Policies that the API server would not have, by name, and why.
    refused: BTreeMap<String, String>,
}

impl Kept {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All that these rules ask for is done, but for what was refused.
    pub(super) fn note(&self, rules: &Rules, refused: BTreeMap<String, String>) {
        let mut state = self.lock();
        let now = Instant::now();
        let since = |name: &String| state.over.get(name).copied().unwrap_or(now);
        let over = rules.over().map(|name| (name.clone(), since(name))).collect();
        *state = State { over, refused };
    }

    /// Another replica leads: what it does is not known here.
    pub(super) fn forget(&self) {
        *self.lock() = State::default();
    }

    /// Whether no policy puts the rule's taint on a node any more.
    pub(super) fn is_over(&self, name: &str) -> bool {
        self.lock().over.get(name).is_some_and(|since| since.elapsed() >= SPREAD)
    }

    pub(super) fn refusal(&self, rule: &Rule) -> Option<String> {
        self.lock().refused.get(&policy::name(rule)).cloned()
    }
}

#[cfg(test)]
mod tests {
    use groundcrew_core::node_startup::Draft;

    use super::*;

    fn rules(deleting: bool) -> Rules {
        let draft = Draft { name: "disks".to_owned(), all_daemon_sets: true, deleting, ..Draft::default() };
        Rules { rules: vec![draft.compile().0], ..Rules::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_deleted_rule_is_over_only_some_time_after_its_policy_was_removed() {
        let kept = Kept::default();
        kept.note(&rules(false), BTreeMap::new());
        tokio::time::advance(SPREAD).await;
        assert!(!kept.is_over("disks"), "its policy is there");
        kept.note(&rules(true), BTreeMap::new());
        assert!(!kept.is_over("disks"), "removed this very moment");
        tokio::time::advance(SPREAD).await;
        kept.note(&rules(true), BTreeMap::new());
        assert!(kept.is_over("disks"), "seeing it gone again does not begin anew");
        kept.forget();
        assert!(!kept.is_over("disks"), "another leader may have put it back");
    }
}
