//! When the webhook's own certificates are renewed, and in which order, so that no handshake ever fails.
//!
//! ```text
//!          2/3 of A's life            B trusted everywhere            nothing A signed
//!                                       for `overlap`                   is valid now
//! CAs      A ──────────► A, next B ─────────────────────► B, retired A ─────────────────► B
//! leaf by  A             A                                B                               B
//! bundle   A             A + B                            B + A                           B
//! ```
//!
//! # Guarantees
//! - A leaf of a new CA is stored only after the bundle with that CA was seen in the API server for `overlap`.
//! - A CA leaves the bundle only when every leaf it signed has expired.
//! - Carrying a verdict out and deciding again at the same instant ends in [`Verdict::Keep`] after a few steps.
//!
//! # Caveats
//! An expired or unreadable CA cannot be waited for: the next one takes over at once, and trust follows as soon as the
//! registration has published it. That only happens after weeks without a leader, or when someone edits the Secret.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

#[cfg(test)]
mod tests;

/// How far certificates are dated back, for callers whose clock is behind ours.
const BACKDATE: Duration = Duration::from_secs(15 * 60);

/// How long certificates live and how long a new CA must be trusted before it is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    ca_lifetime: Duration,
    leaf_lifetime: Duration,
    overlap: Duration,
}

/// Lifetimes that cannot work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RulesError {
    #[error("a certificate must live at least 1s")]
    TooShort,
    #[error("the leaf must not outlive its CA")]
    LeafOutlivesCa,
    #[error("the overlap must be shorter than a third of the CA's lifetime, the time left when its successor appears")]
    OverlapTooLong,
}

impl Rules {
    pub fn new(ca_lifetime: Duration, leaf_lifetime: Duration, overlap: Duration) -> Result<Self, RulesError> {
        if leaf_lifetime < Duration::from_secs(1) {
            return Err(RulesError::TooShort);
        }
        if leaf_lifetime > ca_lifetime {
            return Err(RulesError::LeafOutlivesCa);
        }
        if overlap >= ca_lifetime / 3 {
            return Err(RulesError::OverlapTooLong);
        }
        Ok(Self { ca_lifetime, leaf_lifetime, overlap })
    }

    /// How often to look at clock and storage even if nothing seems to happen: in time for the shortest-lived leaf.
    pub fn look_every(&self) -> Duration {
        (self.leaf_lifetime / 10).clamp(Duration::from_secs(1), Duration::from_secs(60))
    }

    /// The dates of a CA made now.
    pub fn ca_validity(&self, now: Timestamp) -> Validity {
        Validity { not_before: sub(now, BACKDATE), not_after: whole_second(add(now, self.ca_lifetime)) }
    }

    /// The dates of a leaf made now: it never outlives its CA, so an expired CA has no valid leaf.
    pub fn leaf_validity(&self, now: Timestamp, ca: Validity) -> Validity {
        let not_after = whole_second(add(now, self.leaf_lifetime)).min(ca.not_after);
        Validity { not_before: sub(now, BACKDATE), not_after }
    }

    /// Until when a CA that stops signing now must stay trusted, given the last leaf it signed.
    pub fn retire_at(&self, now: Timestamp, ca: Validity, leaf: Option<Validity>) -> Timestamp {
        let last = leaf.map_or(now, |leaf| leaf.not_after).max(add(now, self.leaf_lifetime));
        last.min(ca.not_after)
    }

    fn leaf_due(&self, leaf: Validity) -> Timestamp {
        sub(leaf.not_after, self.leaf_lifetime / 3)
    }

    fn ca_due(&self, ca: Validity) -> Timestamp {
        sub(ca.not_after, self.ca_lifetime / 3)
    }
}

impl Default for Rules {
    /// Long enough to survive a quarter without a leader, short enough that rotation is no rare event.
    fn default() -> Self {
        const DAY: Duration = Duration::from_secs(24 * 60 * 60);
        Self { ca_lifetime: DAY * 365, leaf_lifetime: DAY * 30, overlap: Duration::from_secs(60) }
    }
}

/// A certificate's dates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Validity {
    pub not_before: Timestamp,
    pub not_after: Timestamp,
}

impl Validity {
    pub fn expired(&self, now: Timestamp) -> bool {
        self.not_after <= now
    }

    fn not_yet(&self, now: Timestamp) -> bool {
        self.not_before > now
    }

    /// Whether it ends later than `lifetime` allows, skew aside: the rules were shortened or the clock went back.
    fn outlives(&self, now: Timestamp, lifetime: Duration) -> bool {
        self.not_after > add(add(now, lifetime), BACKDATE)
    }
}

/// Which of the stored CAs signed the leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Issuer {
    Active,
    Next,
    /// A retired CA, or none we know.
    Other,
}

/// The leaf that is stored and served.
#[derive(Debug, Clone, Copy)]
pub struct Leaf<'a> {
    pub validity: Validity,
    pub issuer: Issuer,
    pub names: &'a [String],
}

/// What is stored, and what was seen of its publication. Anything missing or unreadable is `None`.
#[derive(Debug, Clone, Copy)]
pub struct Seen<'a> {
    pub active: Option<Validity>,
    pub next: Option<Validity>,
    /// For each retired CA the time until which it stays trusted.
    pub retired: &'a [Timestamp],
    pub leaf: Option<Leaf<'a>>,
    /// The names callers will verify.
    pub names: &'a [String],
    /// Whether the stored bundle is exactly the stored CAs.
    pub bundle_intact: bool,
    /// How long this very bundle has been seen in the API server's webhook configurations without a break.
    pub published_for: Option<Duration>,
}

/// Why something is made anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Why {
    /// Two thirds of its life are over.
    Due,
    Expired,
    /// Its dates lie in the future: a clock was wrong.
    NotYetValid,
    /// It ends later than the configured lifetime allows.
    OutlivesRules,
    /// Missing, unreadable, or its key does not match.
    Unusable,
    /// The leaf was not signed by the active CA.
    WrongIssuer,
    /// The leaf lacks a name that callers verify.
    NamesChanged,
    /// The next CA has been trusted for long enough.
    Published,
}

/// What should happen to the stored certificates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Verdict {
    /// Nothing before `until`.
    Keep { until: Timestamp },
    /// A new active CA and leaf; nothing stored can be used.
    MintAll(Why),
    /// A new leaf, signed by the active CA.
    RenewLeaf(Why),
    /// A new next CA, into the bundle and not yet in use.
    PublishNextCa(Why),
    /// Next becomes active and signs a leaf; the old CA retires but stays in the bundle.
    PromoteNextCa(Why),
    /// Retired CAs whose time is over leave the bundle.
    DropRetired,
    /// The bundle is written again from the stored CAs.
    RewriteBundle,
}

pub fn decide(rules: &Rules, seen: Seen<'_>, now: Timestamp) -> Verdict {
    let next = seen.next.filter(|next| !next.expired(now));
    let active = match usable(seen.active, now) {
        Ok(active) => active,
        Err(why) if next.is_some() => return Verdict::PromoteNextCa(why),
        Err(why) => return Verdict::MintAll(why),
    };
    if !seen.bundle_intact {
        return Verdict::RewriteBundle;
    }
    if next.is_some() && seen.published_for.is_some_and(|published| published >= rules.overlap) {
        return Verdict::PromoteNextCa(Why::Published);
    }
    if let Some(why) = leaf_trouble(rules, seen, active, now) {
        return Verdict::RenewLeaf(why);
    }
    match (seen.next, next) {
        (Some(_), None) => return Verdict::PublishNextCa(Why::Expired),
        (None, _) => {
            if let Some(why) = ca_trouble(rules, active, now) {
                return Verdict::PublishNextCa(why);
            }
            // Not while a next CA waits: every change of the bundle starts its waiting anew.
            if seen.retired.iter().any(|until| *until <= now) {
                return Verdict::DropRetired;
            }
        }
        (Some(_), Some(_)) => {}
    }
    Verdict::Keep { until: next_look(rules, seen, active, now) }
}

fn usable(ca: Option<Validity>, now: Timestamp) -> Result<Validity, Why> {
    match ca {
        None => Err(Why::Unusable),
        Some(ca) if ca.expired(now) => Err(Why::Expired),
        Some(ca) => Ok(ca),
    }
}

fn leaf_trouble(rules: &Rules, seen: Seen<'_>, active: Validity, now: Timestamp) -> Option<Why> {
    let Some(leaf) = seen.leaf else { return Some(Why::Unusable) };
    if leaf.issuer != Issuer::Active {
        Some(Why::WrongIssuer)
    } else if leaf.validity.expired(now) {
        Some(Why::Expired)
    } else if leaf.validity.not_yet(now) {
        Some(Why::NotYetValid)
    } else if !seen.names.iter().all(|name| leaf.names.contains(name)) {
        Some(Why::NamesChanged)
    } else if leaf.validity.outlives(now, rules.leaf_lifetime) {
        Some(Why::OutlivesRules)
    } else {
        (renewable(leaf.validity, active) && rules.leaf_due(leaf.validity) <= now).then_some(Why::Due)
    }
}

/// A leaf that lasts as long as its CA gains nothing from a renewal.
fn renewable(leaf: Validity, active: Validity) -> bool {
    leaf.not_after < active.not_after
}

/// A CA from the future or with too long a life still works for callers, so it is replaced like an old one: gently.
fn ca_trouble(rules: &Rules, active: Validity, now: Timestamp) -> Option<Why> {
    if active.not_yet(now) {
        Some(Why::NotYetValid)
    } else if active.outlives(now, rules.ca_lifetime) {
        Some(Why::OutlivesRules)
    } else {
        (rules.ca_due(active) <= now).then_some(Why::Due)
    }
}

fn next_look(rules: &Rules, seen: Seen<'_>, active: Validity, now: Timestamp) -> Timestamp {
    let leaf = seen.leaf.map(|leaf| leaf.validity).filter(|leaf| renewable(*leaf, active));
    let mut until = active.not_after;
    if let Some(leaf) = leaf {
        until = until.min(rules.leaf_due(leaf));
    }
    match seen.next {
        Some(next) => {
            until = until.min(next.not_after);
            if let Some(published) = seen.published_for {
                until = until.min(add(now, rules.overlap.saturating_sub(published)));
            }
        }
        None => {
            until = seen.retired.iter().copied().fold(until, Timestamp::min).min(rules.ca_due(active));
        }
    }
    until
}

/// X.509 dates have no fractions; rounded up, a lifetime of seconds is not cut by almost one of them.
fn whole_second(at: Timestamp) -> Timestamp {
    let seconds = at.as_second() + i64::from(at.subsec_nanosecond() > 0);
    Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX)
}

fn add(at: Timestamp, by: Duration) -> Timestamp {
    SignedDuration::try_from(by).ok().and_then(|by| at.checked_add(by).ok()).unwrap_or(Timestamp::MAX)
}

fn sub(at: Timestamp, by: Duration) -> Timestamp {
    SignedDuration::try_from(by).ok().and_then(|by| at.checked_sub(by).ok()).unwrap_or(Timestamp::MIN)
}
