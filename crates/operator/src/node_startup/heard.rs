//! When the operator heard what it has not acted on yet: how fast a release follows is measured from there.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use tokio::time::Instant;

/// By node, the first event about it or its daemon pods since it was last looked at.
#[derive(Debug, Default)]
pub struct Heard(Mutex<HashMap<String, Instant>>);

impl Heard {
    /// To be called while the event is decoded, before anything is queued.
    pub fn note(&self, node: &str) {
        let mut heard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !heard.contains_key(node) {
            heard.insert(node.to_owned(), Instant::now());
        }
    }

    /// Every node that is noted is looked at, so nothing stays here for long.
    pub fn take(&self, node: &str) -> Option<Instant> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(node)
    }
}
