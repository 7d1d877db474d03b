//! Where the webhook's certificate comes from: a Secret the operator keeps itself, or files that someone else keeps.
//!
//! ```text
//!                    ┌── leaf ──► ServingCert ──► handshakes
//! managed or files ──┤
//!                    └── Trust ─► registration ──► caBundle ──► Published ──► managed: the next CA may be used
//! ```

use std::sync::Arc;

use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::Instant;

pub mod files;
pub mod managed;
pub(super) mod mint;
pub(super) mod single;
mod stored;
#[cfg(test)]
pub(super) mod testing;

/// What the webhook configurations have to say about whom callers trust.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Trust {
    /// Not known yet: nothing may be registered.
    #[default]
    Unknown,
    /// Someone else keeps `caBundle` (or the caller's own roots are enough): it stays untouched.
    External,
    /// These PEM certificates, all of them.
    Bundle(Arc<[u8]>),
    /// These PEM certificates, unless somebody was asked to inject others: who keeps the files may keep `caBundle` too.
    Offered(Arc<[u8]>),
}

/// A bundle seen in every webhook configuration of ours, and since when without a break.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    pub bundle: Arc<[u8]>,
    pub since: Instant,
}

/// What both sources offer to the registration. Readiness is [`super::tls::ServingCert::loaded`].
#[derive(Debug, Clone)]
pub struct Source {
    pub trust: watch::Receiver<Trust>,
    /// Whether `trust` was read anew since this replica began to lead: only then may it be written anywhere.
    pub confirmed: watch::Receiver<bool>,
}

/// Reads the wall clock; certificates are the one thing here that outside clocks judge.
pub type Clock = fn() -> Timestamp;
