//! What a Lease says, apart from its metadata.

use jiff::{Timestamp, Unit};
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};

/// What a released record says, as client-go writes it: nobody holds it and there is nothing to wait for.
const RELEASED_SECONDS: i32 = 1;

/// A lease that was never held, for the installation manifests.
#[must_use]
pub fn vacant(namespace: &str, name: &str) -> Lease {
    let metadata = ObjectMeta { namespace: Some(namespace.into()), name: Some(name.into()), ..ObjectMeta::default() };
    Lease { metadata, spec: Some(LeaseSpec::default()) }
}

/// The part of the Lease that makes up a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) holder: Option<String>,
    pub(super) seconds: Option<i32>,
    pub(super) acquired: Option<Timestamp>,
    pub(super) renewed: Option<Timestamp>,
    pub(super) transitions: Option<i32>,
}

impl Record {
    pub(super) fn of(lease: &Lease) -> Self {
        let spec = lease.spec.clone().unwrap_or_default();
        Self {
            holder: spec.holder_identity.filter(|holder| !holder.is_empty()),
            seconds: spec.lease_duration_seconds,
            acquired: spec.acquire_time.map(|time| time.0),
            renewed: spec.renew_time.map(|time| time.0),
            transitions: spec.lease_transitions,
        }
    }

    /// Given back by its holder.
    pub(super) fn released(transitions: Option<i32>) -> Self {
        let now = Some(now());
        Self { holder: None, seconds: Some(RELEASED_SECONDS), acquired: now, renewed: now, transitions }
    }

    pub(super) fn is_released(&self) -> bool {
        self.holder.is_none() && self.seconds == Some(RELEASED_SECONDS)
    }

    pub(super) fn is_vacant(&self) -> bool {
        *self == Self::default()
    }

    pub(super) fn spec(&self) -> LeaseSpec {
        LeaseSpec {
            // Empty rather than absent: a merge patch must clear it, and client-go does the same.
            holder_identity: Some(self.holder.clone().unwrap_or_default()),
            lease_duration_seconds: self.seconds,
            acquire_time: self.acquired.map(MicroTime),
            renew_time: self.renewed.map(MicroTime),
            lease_transitions: self.transitions,
            ..LeaseSpec::default()
        }
    }
}

/// Wall time, for people who read the Lease. Microseconds, as the API stores it, so that our own record compares equal.
pub(super) fn now() -> Timestamp {
    let now = Timestamp::now();
    now.round(Unit::Microsecond).unwrap_or(now)
}
