//! Leader election on a `coordination.k8s.io/v1` Lease.
//!
//! ```text
//!            t0 write starts                                   t0+10 s            t0+15 s
//!  leader    ├───────── leads, may start writes ──────────────┤── last writes end ─┤
//!  others        seen ├──────────── no change for 10 s ─────────────┤ answered ├ 5 s ┤ may take over
//! ```
//!
//! # Guarantees
//! - At no instant do two candidates lead, nor does one lead while a write of another may still be made: a leader
//!   counts from the *start* of its last confirmed write, the others from the moment they *saw* it, which is later.
//! - No other machine's clock is trusted: a record is judged by when it last changed before our own eyes.
//! - Every write carries the resourceVersion it was decided on and touches only the spec fields it owns; annotations and
//!   labels of the Lease stay.
//! - A record that nobody of us wrote (forged, edited, deleted and made again) is waited out like a live leader. Only
//!   two records are free at once: one given back by its holder, and one that was never held. One of an earlier process
//!   of our own pod, where that is known, is free once that process's last write has ended.
//!
//! # Assumptions
//! - Monotonic clocks of two machines run at the same rate within [`DRIFT`] per lease duration.
//! - Who may write the Lease does not forge the exact form of a release.
//!
//! # Caveats
//! - A request that is held up for long between us and the server and then delivered can still take effect. The server
//!   drops what its sender has given up on, and nobody takes over within five seconds of its first sign of life.
//! - A missing Lease is marked with our name and waited out as well, since its last holder may still lead. Ship
//!   [`vacant`] with the manifests and the first leader of a fresh installation need not wait.

mod record;
mod settings;

use std::{collections::VecDeque, time::Duration};

use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

pub use record::vacant;
use record::{Record, now};
pub use settings::{LeaseSettings, identity, own_pod};

use super::leadership::{DEADLINE, Leadership, Term};

const FIELD_MANAGER: &str = "groundcrew-lease";
/// Kept off the end of a term for clocks that do not tick alike; 1.6 % of the lease.
const DRIFT: Duration = Duration::from_millis(250);
/// Unconfirmed writes worth remembering; an older one that still lands is treated as a stranger's.
const CLAIMS: usize = 16;
/// For giving the lease back at the end; SIGTERM leaves 10 s for everything.
const RELEASE: Duration = Duration::from_secs(2);

/// What was last seen on the server, and since when it has looked like that.
#[derive(Debug)]
struct Sight {
    record: Option<Record>,
    since: Instant,
    /// When the first look that began after the holder's last possible write was answered. A server that was stuck
    /// until then has that write in hand now, and five seconds for it.
    last_call: Option<Instant>,
}

/// What may be done about the record that is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Right {
    /// Claim it, and lead once that is confirmed.
    Write,
    /// Put our name where there is none, and wait that out like a stranger's: "still absent" proves nothing, since
    /// somebody may have led and been deleted in between, but a record of ours that is still there does.
    Mark,
    Wait(Duration),
}

/// How a call ended.
enum Reply {
    /// Confirmed, with the new resourceVersion.
    Written(String),
    /// Somebody else was faster, or the Lease is not there.
    Changed,
    /// Unknown or refused.
    Failed,
}

/// One candidate. [`Elector::run`] contends until it is told to stop.
#[derive(Debug)]
pub struct Elector {
    api: Api<Lease>,
    settings: LeaseSettings,
    leadership: Leadership,
    random: fastrand::Rng,
    sight: Option<Sight>,
    /// Whether a held record was ever seen; after that an empty one is no fresh installation.
    seen_held: bool,
    /// Our writes since the last confirmed one: any of them may be what is stored now.
    claims: VecDeque<Record>,
    /// The resourceVersion of our confirmed claim.
    held: Option<String>,
    /// The write given up last, and the first answer to a call that began after it.
    settled: Option<(Instant, Instant)>,
    failing: bool,
}

impl Elector {
    #[must_use]
    pub fn new(client: Client, settings: LeaseSettings) -> (Self, Leadership) {
        let leadership = Leadership::none();
        let elector = Self {
            api: Api::namespaced(client, &settings.namespace),
            random: fastrand::Rng::with_seed(settings.seed),
            settings,
            leadership: leadership.clone(),
            sight: None,
            settled: None,
            seen_held: false,
            claims: VecDeque::new(),
            held: None,
            failing: false,
        };
        (elector, leadership)
    }

    /// Contends for the lease until `shutdown`, then gives it back once the last permitted write has ended.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let leadership = self.leadership.clone();
        tokio::select! {
            biased;
            () = shutdown.cancelled() => {}
            () = leadership.expire() => {}
            () = self.contend() => {}
        }
        self.release().await;
    }

    async fn contend(&mut self) {
        loop {
            let wait = self.step().await;
            sleep(wait).await;
        }
    }

    /// One look or one renewal; returns how long to wait for the next.
    async fn step(&mut self) -> Duration {
        if let (Some(version), Some(claim)) = (self.held.clone(), self.claims.back().cloned())
            && self.leadership.is_leader()
        {
            let renewed = Record { renewed: Some(now()), ..claim };
            match self.write(Some(&version), renewed).await {
                Reply::Written(_) => return self.jitter(self.settings.renew_every),
                Reply::Failed => return self.jitter(self.settings.poll_every),
                Reply::Changed => {}
            }
        }
        self.look().await
    }

    async fn look(&mut self) -> Duration {
        let retry = self.jitter(self.settings.poll_every);
        let began = Instant::now();
        let lease = match timeout(self.settings.call_timeout, self.read()).await {
            Ok(Ok(lease)) => lease,
            Ok(Err(error)) => return self.failed("read", &error, retry),
            Err(elapsed) => return self.failed("read", &elapsed, retry),
        };
        let seen = self.heard(began);
        let record = lease.as_ref().map(Record::of);
        if self.sight.as_ref().is_none_or(|sight| sight.record != record) {
            self.sight = Some(Sight { record: record.clone(), since: seen, last_call: None });
        }
        let last_write = self.settings.duration.saturating_sub(DEADLINE);
        if let Some(sight) = self.sight.as_mut().filter(|sight| began >= sight.since + last_write) {
            sight.last_call.get_or_insert(seen);
        }
        let version = lease.and_then(|lease| lease.metadata.resource_version);
        let right = self.right(record.as_ref(), seen);
        if right != Right::Write {
            self.stand_back(record.as_ref());
        }
        self.seen_held |= record.as_ref().is_some_and(|record| !record.is_vacant());
        match right {
            Right::Write => match self.write(version.as_deref(), self.claim(record)).await {
                Reply::Written(_) => self.jitter(self.settings.renew_every),
                Reply::Changed | Reply::Failed => retry,
            },
            Right::Mark => {
                let mark = self.claim(record);
                if let Reply::Written(_) = self.send(version.as_deref(), &mark).await {
                    self.sight = Some(Sight { record: Some(mark), since: Instant::now(), last_call: None });
                }
                retry
            }
            Right::Wait(left) => retry.min(left),
        }
    }

    /// The server answered a call that began then. Returns the time.
    fn heard(&mut self, began: Instant) -> Instant {
        let now = Instant::now();
        if let Some(given_up) = self.leadership.unanswered()
            && began >= given_up
            && self.settled.is_none_or(|(write, _)| write != given_up)
        {
            self.settled = Some((given_up, now));
        }
        now
    }

    /// Whether all writes made under our lease have taken effect or never will.
    fn is_settled(&self) -> bool {
        let Some(given_up) = self.leadership.unanswered() else { return true };
        self.settled.is_some_and(|(write, answered)| write == given_up && answered.elapsed() >= DEADLINE)
    }

    /// By code, since `Api::get_opt` knows a 404 only by its reason, and not every proxy sends one.
    async fn read(&self) -> kube::Result<Option<Lease>> {
        match self.api.get(&self.settings.name).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
            result => result.map(Some),
        }
    }

    fn right(&self, record: Option<&Record>, seen: Instant) -> Right {
        let until = |time: Instant, then: Right| {
            let left = time.saturating_duration_since(seen);
            if left.is_zero() { then } else { Right::Wait(left) }
        };
        let (since, last_call) = self.sight.as_ref().map_or((seen, None), |sight| (sight.since, sight.last_call));
        // Long enough for a living leader to write its Lease again.
        let grace = since + self.settings.renew_every.mul_f64(1.5);
        match (record, last_call) {
            // Deleted under us: nobody else can have led within our own term.
            (None, _) if self.leadership.is_leader() => Right::Write,
            (None, _) => until(grace, Right::Mark),
            (Some(record), _) if record.is_vacant() && self.seen_held => until(grace, Right::Mark),
            (Some(record), _) if record.is_vacant() || record.is_released() || self.claims.contains(record) => {
                Right::Write
            }
            (Some(Record { holder: Some(holder), .. }), _) if self.settings.follows(holder) => {
                until(since + DEADLINE, Right::Write)
            }
            (Some(_), Some(last_call)) => {
                until((last_call + DEADLINE).max(since + self.settings.duration), Right::Write)
            }
            (Some(_), None) => until(since + self.settings.duration.saturating_sub(DEADLINE), Right::Wait(DEADLINE)),
        }
    }

    /// The record that says we hold it, following on what is stored.
    fn claim(&self, stored: Option<Record>) -> Record {
        let now = now();
        let stored = stored.unwrap_or_default();
        let ours = stored.holder.as_deref() == Some(&self.settings.identity);
        let transitions = match stored.transitions {
            Some(count) if ours => count,
            Some(count) => count.saturating_add(1),
            None => 0,
        };
        Record {
            holder: Some(self.settings.identity.clone()),
            seconds: Some(i32::try_from(self.settings.duration.as_secs()).unwrap_or(i32::MAX)),
            acquired: stored.acquired.filter(|_| ours).or(Some(now)),
            renewed: Some(now),
            transitions: Some(transitions),
        }
    }

    /// Writes the record on `version`, or creates the Lease, and takes or extends the term if that is confirmed.
    async fn write(&mut self, version: Option<&str>, record: Record) -> Reply {
        if self.claims.len() == CLAIMS {
            self.claims.pop_front();
        }
        self.claims.push_back(record.clone());
        self.held = None;
        let start = Instant::now();
        let reply = self.send(version, &record).await;
        if let Reply::Written(version) = &reply {
            self.claims = VecDeque::from([record.clone()]);
            self.held = Some(version.clone());
            self.heard(start);
            // What was seen before our own write is no longer what has been there "since".
            self.sight = None;
            self.seen_held = true;
            self.failing = false;
            if !self.leadership.is_leader() {
                tracing::info!(identity = %self.settings.identity, transitions = record.transitions, "leading");
            }
            self.leadership.grant(Term {
                leads_until: start + self.settings.step_down,
                writes_until: start + self.settings.duration.saturating_sub(DRIFT),
            });
        }
        reply
    }

    async fn send(&mut self, version: Option<&str>, record: &Record) -> Reply {
        let call = async {
            match version {
                Some(version) => {
                    let patch = json!({ "metadata": { "resourceVersion": version }, "spec": record.spec() });
                    let params = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
                    self.api.patch(&self.settings.name, &params, &Patch::Merge(patch)).await
                }
                None => {
                    let mut lease = self.settings.vacant();
                    lease.spec = Some(record.spec());
                    let params = PostParams { field_manager: Some(FIELD_MANAGER.into()), ..PostParams::default() };
                    self.api.create(&params, &lease).await
                }
            }
        };
        match timeout(self.settings.call_timeout, call).await {
            Ok(Ok(lease)) => match lease.metadata.resource_version {
                Some(version) => Reply::Written(version),
                None => Reply::Failed,
            },
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Reply::Changed,
            Ok(Err(error)) => self.failed("write", &error, Reply::Failed),
            Err(elapsed) => self.failed("write", &elapsed, Reply::Failed),
        }
    }

    /// The stored record is not ours to write: whatever we held is gone.
    fn stand_back(&mut self, record: Option<&Record>) {
        if self.leadership.term().is_some() {
            let holder = record.and_then(|record| record.holder.as_deref()).unwrap_or("nobody");
            tracing::warn!(holder, "leadership lost: somebody else wrote the lease");
            self.leadership.revoke();
        }
        self.held = None;
        // Writes of ours from before this record can no longer land, or are no longer ours to build on.
        if record.is_some() {
            self.claims.clear();
        }
    }

    /// Says once that the lease cannot be reached, then keeps to debug.
    fn failed<T>(&mut self, call: &str, error: &dyn std::error::Error, then: T) -> T {
        if std::mem::replace(&mut self.failing, true) {
            tracing::debug!(call, %error, "lease not reached");
        } else {
            tracing::warn!(call, %error, "lease not reached, trying on");
        }
        then
    }

    fn jitter(&mut self, period: Duration) -> Duration {
        period.mul_f64(0.9 + 0.2 * self.random.f64())
    }

    /// Gives the lease back, after the last write that was permitted under it.
    async fn release(mut self) {
        self.leadership.revoke();
        self.leadership.quiet(Instant::now() + DEADLINE).await;
        if self.claims.is_empty() {
            return;
        }
        if timeout(RELEASE, self.give_back()).await != Ok(true) {
            tracing::warn!("lease not given back, others take over when it ends");
        }
    }

    async fn give_back(&mut self) -> bool {
        // Twice, because a renewal that was cut off may land between our read and our write.
        for _ in 0..2 {
            let began = Instant::now();
            let Ok(lease) = self.read().await else { continue };
            self.heard(began);
            let Some(lease) = lease else { return true };
            let stored = Record::of(&lease);
            if !self.claims.contains(&stored) {
                return true;
            }
            // Who follows would lead at once.
            if !self.is_settled() {
                return false;
            }
            let given = Record::released(stored.transitions);
            if let Reply::Written(_) = self.send(lease.metadata.resource_version.as_deref(), &given).await {
                tracing::info!("lease given back");
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests;
