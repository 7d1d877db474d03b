//! Whether operator and agents have stopped. Judged by what changes before our own eyes, on a monotonic clock: neither
//! the holder's renewals nor a pod's deletion are compared with any machine's wall clock.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use tokio::time::Instant;

/// Pods get 20 seconds to end; a lease whose holder died runs out in 15.
const LIMIT: Duration = Duration::from_secs(60);
/// A kubelet that is there ends a pod this soon after its grace period.
const AFTER_GRACE: Duration = Duration::from_secs(10);
/// Kubernetes' own default.
const GRACE_SECONDS: i64 = 30;
/// Of our own leases, for a record that does not tell.
const LEASE_SECONDS: i32 = 15;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Wait,
    /// Nobody runs any more, as far as anybody can know of these pods: their nodes do not say that they ended.
    Stopped(Vec<String>),
    Refused(String),
}

/// What earlier looks have shown.
#[derive(Debug)]
pub(super) struct Stopping {
    began: Instant,
    /// The record of whoever holds the lease, and since when it has looked like that.
    held: Option<(LeaseSpec, Instant)>,
    /// That record when no pod was left that could still be ending.
    held_without_pods: Option<LeaseSpec>,
    /// Since when pods have been seen on their way out, by uid.
    ending: HashMap<String, Instant>,
}

impl Stopping {
    pub(super) fn new(now: Instant) -> Self {
        Self { began: now, held: None, held_without_pods: None, ending: HashMap::new() }
    }

    /// One look at the pods of operator and agents and at the replicas' lease.
    pub(super) fn look(&mut self, pods: &[Pod], lease: Option<Lease>, now: Instant) -> Verdict {
        let late = now.duration_since(self.began) > LIMIT;
        let (stuck, left): (Vec<&Pod>, Vec<&Pod>) = pods.iter().partition(|pod| self.is_stuck(pod, late, now));
        match self.holder(lease, now) {
            None if left.is_empty() => Verdict::Stopped(stuck.iter().map(|pod| pod.name_any()).collect()),
            None if late => Verdict::Refused(format!("{} pods of groundcrew do not end", left.len())),
            None => Verdict::Wait,
            Some(record) => {
                // Without pods that could still be ending, whoever renews runs elsewhere and goes on.
                let goes_on =
                    left.is_empty() && *self.held_without_pods.get_or_insert_with(|| record.clone()) != record;
                if goes_on || late {
                    let name = record.holder_identity.unwrap_or_default();
                    let what = "holds the lease; stop it and run this again";
                    return Verdict::Refused(format!("the operator still runs: {name} {what}"));
                }
                Verdict::Wait
            }
        }
    }

    /// On a node that does not answer a pod is on its way out for ever.
    fn is_stuck(&mut self, pod: &Pod, late: bool, now: Instant) -> bool {
        if pod.metadata.deletion_timestamp.is_none() {
            return false;
        }
        let since = *self.ending.entry(pod.uid().unwrap_or_default()).or_insert(now);
        let grace = pod.metadata.deletion_grace_period_seconds.unwrap_or(GRACE_SECONDS);
        let grace = Duration::from_secs(grace.try_into().unwrap_or_default());
        late || now.duration_since(since) > grace + AFTER_GRACE
    }

    /// The record of whoever may still lead: it changed, or has not yet stood still for as long as it is good for.
    fn holder(&mut self, lease: Option<Lease>, now: Instant) -> Option<LeaseSpec> {
        let held = |spec: &LeaseSpec| spec.holder_identity.as_ref().is_some_and(|holder| !holder.is_empty());
        let Some(record) = lease.and_then(|lease| lease.spec).filter(held) else {
            self.held = None;
            return None;
        };
        let since = match &self.held {
            Some((known, since)) if *known == record => *since,
            _ => self.held.insert((record.clone(), now)).1,
        };
        let lasts = record.lease_duration_seconds.unwrap_or(LEASE_SECONDS);
        let lasts = Duration::from_secs(lasts.try_into().unwrap_or_default());
        (now.duration_since(since) <= lasts).then_some(record)
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};

    use super::*;

    const S: Duration = Duration::from_secs(1);
    const MINUTE: i64 = 60;

    /// Renewed so many seconds ago by the holder's clock.
    fn lease(holder: &str, renewed: i64) -> Option<Lease> {
        let renewed = Timestamp::from_second(Timestamp::now().as_second() - renewed).unwrap();
        let spec = LeaseSpec {
            holder_identity: Some(holder.to_owned()),
            renew_time: Some(MicroTime(renewed)),
            lease_duration_seconds: Some(15),
            ..LeaseSpec::default()
        };
        Some(Lease { spec: Some(spec), ..Lease::default() })
    }

    fn pod(ending: bool) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.name = Some("groundcrew-agent-x".to_owned());
        pod.metadata.deletion_timestamp = ending.then(|| Time(Timestamp::now()));
        pod.metadata.deletion_grace_period_seconds = ending.then_some(20);
        pod
    }

    fn refused(verdict: &Verdict, why: &str) -> bool {
        matches!(verdict, Verdict::Refused(said) if said.contains(why))
    }

    #[test]
    fn a_holder_counts_until_its_record_stood_still_whatever_its_clock_says() {
        for renewed in [-10 * MINUTE, 0, 10 * MINUTE] {
            let (now, lease) = (Instant::now(), lease("a", renewed));
            let mut stopping = Stopping::new(now);
            assert_eq!(stopping.look(&[], lease.clone(), now), Verdict::Wait, "{renewed}");
            assert_eq!(stopping.look(&[], lease.clone(), now + 15 * S), Verdict::Wait, "{renewed}");
            assert_eq!(stopping.look(&[], lease, now + 16 * S), Verdict::Stopped(vec![]), "{renewed}");
        }
    }

    #[test]
    fn a_lease_given_back_or_never_held_is_free_at_once() {
        let now = Instant::now();
        for lease in [None, Some(Lease::default()), lease("", 0)] {
            assert_eq!(Stopping::new(now).look(&[], lease, now), Verdict::Stopped(vec![]));
        }
    }

    #[test]
    fn who_renews_without_a_pod_runs_elsewhere() {
        let now = Instant::now();
        let mut stopping = Stopping::new(now);
        assert_eq!(stopping.look(&[pod(true)], lease("a", 4), now), Verdict::Wait);
        assert_eq!(stopping.look(&[pod(true)], lease("a", 2), now + 2 * S), Verdict::Wait, "it may be ending");
        assert_eq!(stopping.look(&[], lease("a", 2), now + 3 * S), Verdict::Wait, "killed, perhaps");
        assert!(refused(&stopping.look(&[], lease("a", 0), now + 4 * S), "a holds the lease"));
    }

    #[test]
    fn a_pod_that_nobody_deleted_is_waited_for_and_then_named() {
        let now = Instant::now();
        let mut stopping = Stopping::new(now);
        assert_eq!(stopping.look(&[pod(false)], None, now + 60 * S), Verdict::Wait);
        assert!(refused(&stopping.look(&[pod(false)], None, now + 61 * S), "1 pods"));
    }

    #[test]
    fn a_pod_on_a_dead_node_holds_nobody_up_for_ever() {
        let now = Instant::now();
        let mut stopping = Stopping::new(now);
        assert_eq!(stopping.look(&[pod(true)], None, now), Verdict::Wait);
        assert_eq!(stopping.look(&[pod(true)], None, now + 30 * S), Verdict::Wait);
        let stuck = Verdict::Stopped(vec!["groundcrew-agent-x".to_owned()]);
        assert_eq!(stopping.look(&[pod(true)], None, now + 31 * S), stuck);
        let renewed = stopping.look(&[pod(true)], lease("a", 0), now + 32 * S);
        assert_eq!(renewed, Verdict::Wait, "its node is silent, it is not");
        assert!(refused(&stopping.look(&[pod(true)], lease("a", -1), now + 33 * S), "still runs"));
    }
}
