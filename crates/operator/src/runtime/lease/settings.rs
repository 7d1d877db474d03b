//! Who contends, for what, and how fast.

use std::time::Duration;

/// Where the lease is and how fast it turns.
#[derive(Clone, Debug)]
pub struct LeaseSettings {
    pub namespace: String,
    pub name: String,
    /// Unique per process: a record with this name that we did not write is a stranger's.
    pub identity: String,
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
            identity: identity.into(),
            duration: Duration::from_secs(15),
            step_down: Duration::from_secs(10),
            renew_every: Duration::from_secs(2),
            poll_every: Duration::from_millis(500),
            call_timeout: Duration::from_secs(3),
            seed: fastrand::u64(..),
        }
    }
}

/// Pod name or host name, with a suffix so that a restarted container is somebody else.
#[must_use]
pub fn identity() -> String {
    let named =
        ["POD_NAME", "HOSTNAME"].into_iter().find_map(|name| std::env::var(name).ok().filter(|v| !v.is_empty()));
    let host = || std::fs::read_to_string("/proc/sys/kernel/hostname").ok().map(|name| name.trim().to_owned());
    let suffix: String = std::iter::repeat_with(|| fastrand::char('a'..='z')).take(6).collect();
    format!("{}_{suffix}", named.or_else(host).unwrap_or_else(|| "groundcrew".to_owned()))
}
