//! What people hear of a workload: each state once, as an event or, while only observing, as a line in the log.

use std::collections::HashMap;
use std::sync::Mutex;

use groundcrew_core::spread::{Split, Verdict};
use k8s_openapi::api::core::v1::ObjectReference;
use tracing::info;

use super::locked;
use crate::runtime::cache::Key;
use crate::runtime::events::Events;

#[derive(Debug)]
pub struct Tell {
    events: Events,
    enforces: bool,
    /// What was last said about a workload, so that only changes are.
    said: Mutex<HashMap<Key, String>>,
}

impl Tell {
    #[must_use]
    pub fn new(events: Events, enforces: bool) -> Self {
        Self { events, enforces, said: Mutex::default() }
    }

    pub fn warn(&self, tag: &Key, regarding: ObjectReference, reason: &'static str, note: &str) {
        if !self.is_news(tag, note) {
            return;
        }
        if self.enforces {
            self.events.warning(regarding, reason, note.to_owned());
        } else {
            info!(workload = %tag, reason, verdict = note, "observed");
        }
    }

    pub fn moved(&self, tag: &Key, regarding: ObjectReference, note: String) {
        self.is_news(tag, "moving");
        self.events.normal(regarding, "PodRescheduled", note);
    }

    /// Worth a word only after something else was said.
    pub fn settled(&self, tag: &Key, regarding: ObjectReference, split: Split) {
        if self.forget(tag) && self.enforces {
            let note = format!("The split is as asked: {} spot, {} on-demand", split.spot, split.on_demand);
            self.events.normal(regarding, "ReconciliationSuccess", note);
        }
    }

    pub fn observed(&self, tag: &Key, verdict: &Verdict) {
        let text = match verdict {
            Verdict::Rest { why, .. } | Verdict::Remember { why, .. } => why.to_string(),
            Verdict::Move { pod, from, to, .. } => format!("would evict {} from {from} for {to}", pod.name),
            Verdict::Replace { pod, to } => format!("would replace {} on {to}", pod.name),
            Verdict::Rank { pods } => format!("would rank {} pods anew", pods.len()),
        };
        if self.is_news(tag, &text) {
            info!(workload = %tag, verdict = text, "observed");
        }
    }

    /// Whether anything had been said.
    pub fn forget(&self, tag: &Key) -> bool {
        locked(&self.said).remove(tag).is_some()
    }

    fn is_news(&self, tag: &Key, note: &str) -> bool {
        locked(&self.said).insert(tag.clone(), note.to_owned()).as_deref() != Some(note)
    }
}
