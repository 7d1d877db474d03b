//! How much of all bodies together is held: whoever takes longest to send the rest gives way to who comes now.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// What a request costs before its body: its headers (see the server's limit) and its task.
const REQUEST_BYTES: usize = 16 << 10;

/// Bytes of bodies that are still arriving. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Budget {
    bytes: usize,
    ledger: Arc<Mutex<Ledger>>,
}

#[derive(Debug, Default)]
struct Ledger {
    used: usize,
    last: u64,
    /// In the order in which they began.
    arriving: BTreeMap<u64, Arriving>,
}

#[derive(Debug)]
struct Arriving {
    held: usize,
    /// Dropped when the body has to go.
    _stay: oneshot::Sender<()>,
}

impl Budget {
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self { bytes, ledger: Arc::default() }
    }

    /// A share for one body, and what ends when that body has to go.
    pub(super) fn enter(&self) -> (Share, oneshot::Receiver<()>) {
        let mut ledger = self.ledger();
        ledger.last += 1;
        let id = ledger.last;
        let (stay, evicted) = oneshot::channel();
        ledger.arriving.insert(id, Arriving { held: 0, _stay: stay });
        drop(ledger);
        let share = Share { id, budget: self.clone() };
        share.grow(REQUEST_BYTES);
        (share, evicted)
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // Counters and a map, right after every statement: a panic elsewhere does not spoil them.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(super) fn used(&self) -> usize {
        self.ledger().used
    }
}

impl Ledger {
    fn remove(&mut self, id: u64) {
        if let Some(gone) = self.arriving.remove(&id) {
            self.used -= gone.held;
        }
    }
}

/// What one body holds; given back when dropped.
#[derive(Debug)]
pub(super) struct Share {
    id: u64,
    budget: Budget,
}

impl Share {
    /// Takes more; those that began first go until it fits. Says whether this one may stay.
    pub(super) fn grow(&self, bytes: usize) -> bool {
        let mut ledger = self.budget.ledger();
        let Some(own) = ledger.arriving.get_mut(&self.id) else { return false };
        own.held += bytes;
        ledger.used += bytes;
        while ledger.used > self.budget.bytes
            && let Some((&first, _)) = ledger.arriving.first_key_value()
        {
            ledger.remove(first);
        }
        ledger.arriving.contains_key(&self.id)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.ledger().remove(self.id);
    }
}
