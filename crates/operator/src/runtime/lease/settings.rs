//! Who contends, for what, and how fast.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;

use super::record;

/// Where the lease is and how fast it turns.
#[derive(Clone, Debug)]
pub struct LeaseSettings {
    pub namespace: String,
    pub name: String,
    /// Of a Lease that we make.
    pub labels: BTreeMap<String, String>,
    /// Unique per process: a record with this name that we did not write is a stranger's.
    pub identity: String,
    /// The pod that this process is the only container of: whoever held the lease in its name ended before this process
    /// began, and only its last writes are waited for. Absent where a name alone tells nothing, as on a shared host.
    pub pod: Option<String>,
    /// Others take over after this long without a change.
    pub duration: Duration,
    /// The leader stops this long after the start of its last confirmed write.
    pub step_down: Duration,
    pub renew_every: Duration,
    /// How often a waiting candidate looks: the delay of a graceful takeover.
    pub poll_every: Duration,
    pub call_timeout: Duration,
    /// For jitter.
    pub seed: u64,
}

impl LeaseSettings {
    #[must_use]
    pub fn new(namespace: impl Into<String>, name: impl Into<String>, identity: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
            labels: BTreeMap::new(),
            identity: identity.into(),
            pod: None,
            duration: Duration::from_secs(15),
            step_down: Duration::from_secs(10),
            renew_every: Duration::from_secs(2),
            poll_every: Duration::from_millis(500),
            call_timeout: Duration::from_secs(3),
            seed: fastrand::u64(..),
        }
    }

    /// The Lease as nobody has held it yet.
    #[must_use]
    pub fn vacant(&self) -> Lease {
        let mut lease = record::vacant(&self.namespace, &self.name);
        lease.metadata.labels = (!self.labels.is_empty()).then(|| self.labels.clone());
        lease
    }

    /// Whether the holder is an earlier process of our own pod.
    pub(super) fn follows(&self, holder: &str) -> bool {
        let pod = holder.rsplit_once(SEPARATOR).map(|(pod, _)| pod);
        holder != self.identity && pod.is_some() && pod == self.pod.as_deref()
    }
}

/// No name of a pod or host has one.
const SEPARATOR: char = '_';

/// The name of the pod we run in, where there is one.
#[must_use]
pub fn own_pod() -> Option<String> {
    std::env::var("POD_NAME").ok().filter(|name| !name.is_empty())
}

/// Pod name or host name, with a suffix so that a restarted container is somebody else.
#[must_use]
pub fn identity() -> String {
    let named = || std::env::var("HOSTNAME").ok().filter(|name| !name.is_empty());
    let host = || std::fs::read_to_string("/proc/sys/kernel/hostname").ok().map(|name| name.trim().to_owned());
    let suffix: String = std::iter::repeat_with(|| fastrand::char('a'..='z')).take(6).collect();
    let name = own_pod().or_else(named).or_else(host).unwrap_or_else(|| "groundcrew".to_owned());
    format!("{name}{SEPARATOR}{suffix}")
}
