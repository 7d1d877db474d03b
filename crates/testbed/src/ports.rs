//! Free TCP ports on the loopback address.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::net::{Ipv4Addr, TcpListener};

use anyhow::Context;

/// Below the ports that Linux hands to outgoing connections (32768 and up) and below Kubernetes' node ports (30000 and
/// up): a port found free here is not taken by a passing client a moment later.
const RANGE: std::ops::Range<u16> = 12_000..30_000;

/// Picks `count` different ports that nobody listens on.
///
/// # Caveats
/// Nothing reserves them: another test may take one before its owner binds it, so starters try again.
///
/// # Errors
/// The range is exhausted.
pub fn free_ports(count: usize) -> anyhow::Result<Vec<u16>> {
    let span = u64::from(RANGE.end - RANGE.start);
    let mut seen = BTreeSet::new();
    let mut ports = Vec::with_capacity(count);
    while ports.len() < count {
        anyhow::ensure!(seen.len() < usize::from(RANGE.end - RANGE.start), "no free port in {RANGE:?}");
        let candidate = RANGE.start + u16::try_from(random() % span)?;
        if seen.insert(candidate) && TcpListener::bind((Ipv4Addr::UNSPECIFIED, candidate)).is_ok() {
            ports.push(candidate);
        }
    }
    Ok(ports)
}

/// Picks one port, see [`free_ports`].
///
/// # Errors
/// The range is exhausted.
pub fn free_port() -> anyhow::Result<u16> {
    free_ports(1)?.pop().context("asked for one port, got none")
}

/// Randomness for names and ports, from the standard library's hash seeds: nothing here is a secret.
pub(crate) fn random() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

#[cfg(test)]
mod tests {
    use super::{RANGE, free_ports};

    #[test]
    fn ports_are_distinct_and_in_range() {
        let ports = free_ports(50).unwrap();
        assert_eq!(ports.iter().collect::<std::collections::BTreeSet<_>>().len(), 50);
        assert!(ports.iter().all(|port| RANGE.contains(port)));
    }
}
