//! Who may write: a handle that answers "am I the leader" from the clock, and permits for single writes.
//!
//! # Guarantees
//! - [`Leadership::is_leader`] compares with the monotonic clock at each call, so a starved or stopped task that never
//!   got to step down is no leader either.
//! - A [`Permit`] ends before any other replica can hold the lease, and a future run by [`Permit::run`] is never
//!   polled after that: a process that slept between its decision and its write does not write.
//!
//! # Caveats
//! What has left this process can still be under way when its permit ends. Writes therefore also carry the
//! server-side timeout and the uid or resourceVersion they were decided on.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    task::Poll,
    time::Duration,
};

use prometheus_client::{metrics::gauge::Gauge, registry::Registry};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout_at},
};
use tracing::Instrument;

/// The longest a single write may take, connect included: an older decision must not take effect (S5).
pub const DEADLINE: Duration = Duration::from_secs(5);

/// How long one confirmed write of the lease is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Term {
    /// No new work from here on.
    pub(super) leads_until: Instant,
    /// Nothing of ours may be under way from here on.
    pub(super) writes_until: Instant,
}

#[derive(Debug)]
pub(super) struct Shared {
    always: bool,
    term: watch::Sender<Option<Term>>,
    leading: watch::Sender<bool>,
    /// Since when it leads without a break.
    since: Mutex<Option<Instant>>,
    permits: watch::Sender<usize>,
    /// When a write was last given up without an answer.
    unanswered: Mutex<Option<Instant>>,
    gauge: Gauge,
}

/// A cheap handle on the question "may this process act?".
#[derive(Clone, Debug)]
pub struct Leadership(pub(super) Arc<Shared>);

impl Leadership {
    /// Not the leader until an elector grants it.
    #[must_use]
    pub fn none() -> Self {
        Self::with(false)
    }

    /// For one replica without an election, and for writes that every replica may make.
    #[must_use]
    pub fn always() -> Self {
        Self::with(true)
    }

    fn with(always: bool) -> Self {
        let gauge = Gauge::default();
        gauge.set(i64::from(always));
        Self(Arc::new(Shared {
            always,
            term: watch::Sender::new(None),
            leading: watch::Sender::new(always),
            since: Mutex::new(always.then(Instant::now)),
            permits: watch::Sender::new(0),
            unanswered: Mutex::default(),
            gauge,
        }))
    }

    /// Adds the gauge `groundcrew_leader`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("groundcrew_leader", "1 while this replica leads", self.0.gauge.clone());
    }

    /// Adds the gauge of an agent, under another name: it would hide that no replica leads.
    pub fn register_for_agent(&self, registry: &mut Registry) {
        registry.register("groundcrew_agent_lease", "1 while this agent holds its node's lease", self.0.gauge.clone());
    }

    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.0.always || self.term().is_some_and(|term| Instant::now() < term.leads_until)
    }

    /// Changes of leadership, for starting and stopping work.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<bool> {
        self.0.leading.subscribe()
    }

    /// How long it has led without a break.
    #[must_use]
    pub fn led_for(&self) -> Duration {
        let since = *self.0.since.lock().unwrap_or_else(PoisonError::into_inner);
        since.filter(|_| self.is_leader()).map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Leave for one write that ends within `deadline` (at most [`DEADLINE`]), or `None` if it might outlast our term.
    #[must_use]
    pub fn permit(&self, deadline: Duration) -> Option<Permit> {
        let now = Instant::now();
        let end = now + deadline.min(DEADLINE);
        let granted =
            self.0.always || self.term().is_some_and(|term| now < term.leads_until && end <= term.writes_until);
        granted.then(|| {
            self.0.permits.send_modify(|count| *count += 1);
            Permit { end, under_way: false, shared: Arc::clone(&self.0) }
        })
    }

    pub(super) fn term(&self) -> Option<Term> {
        *self.0.term.borrow()
    }

    pub(super) fn grant(&self, term: Term) {
        self.0.term.send_replace(Some(term));
        self.announce(true);
    }

    pub(super) fn revoke(&self) {
        self.0.term.send_replace(None);
        self.announce(self.0.always);
    }

    fn announce(&self, leading: bool) {
        self.0.gauge.set(i64::from(leading));
        let mut since = self.0.since.lock().unwrap_or_else(PoisonError::into_inner);
        *since = leading.then(|| since.unwrap_or_else(Instant::now));
        drop(since);
        self.0.leading.send_if_modified(|current| std::mem::replace(current, leading) != leading);
    }

    /// Announces the end of each term that was not renewed in time. Never returns.
    pub(super) async fn expire(&self) {
        let mut terms = self.0.term.subscribe();
        loop {
            let term = *terms.borrow_and_update();
            let expired = async {
                match term {
                    Some(term) => sleep_until(term.leads_until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                _ = terms.changed() => {}
                () = expired => {
                    tracing::warn!("leadership lost: the lease could not be renewed in time");
                    self.revoke();
                }
            }
        }
    }

    /// Waits until no permit is out, but not beyond `limit`.
    pub(super) async fn quiet(&self, limit: Instant) {
        let mut permits = self.0.permits.subscribe();
        let _ = timeout_at(limit, permits.wait_for(|count| *count == 0)).await;
    }

    /// When a write was last given up without an answer. It may still be carried out: the server got the same
    /// deadline, but counts from when it reads the request.
    pub(super) fn unanswered(&self) -> Option<Instant> {
        *self.0.unanswered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(super) fn permits(&self) -> usize {
        *self.0.permits.borrow()
    }
}

/// Leave to make one write before a fixed end.
#[derive(Debug)]
pub struct Permit {
    end: Instant,
    /// Sent, and not answered yet.
    under_way: bool,
    shared: Arc<Shared>,
}

/// The permit ended first. Whether the write took effect is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the deadline of the write passed")]
pub struct Expired;

impl Permit {
    #[must_use]
    pub fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    /// Drives the write, looking at the clock before each step: tokio's own timeout polls the future first, so a
    /// process that was stopped for a minute would still send.
    pub async fn run<F: Future>(mut self, write: F) -> Result<F::Output, Expired> {
        let mut write = pin!(write);
        let mut timer = pin!(sleep_until(self.end));
        poll_fn(|context| {
            if Instant::now() >= self.end || timer.as_mut().poll(context).is_ready() {
                return Poll::Ready(Err(Expired));
            }
            self.under_way = true;
            let answer = write.as_mut().poll(context);
            self.under_way = answer.is_pending();
            answer.map(Ok)
        })
        .await
    }

    /// The same in a task of its own: whoever is cancelled while waiting, as on the way out, does not abandon a write
    /// half way.
    pub async fn see_through<F>(self, write: F) -> Result<F::Output, Expired>
    where
        F: Future<Output: Send + 'static> + Send + 'static,
    {
        let sent = tokio::spawn(async move { self.run(write).await }.in_current_span());
        sent.await.unwrap_or(Err(Expired))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.under_way {
            *self.shared.unanswered.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
        self.shared.permits.send_modify(|count| *count -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn led_for(seconds: u32) -> Leadership {
        let leadership = Leadership::none();
        let now = Instant::now();
        leadership.grant(Term { leads_until: now + S * seconds, writes_until: now + S * (seconds + 5) });
        leadership
    }

    #[tokio::test(start_paused = true)]
    async fn leadership_ends_by_the_clock_alone() {
        let leadership = led_for(10);
        assert!(leadership.is_leader());
        tokio::time::advance(S * 10).await;
        assert!(!leadership.is_leader());
        assert!(leadership.permit(S).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_renewal_is_no_new_beginning_and_a_loss_is() {
        let leadership = led_for(10);
        tokio::time::advance(S * 8).await;
        let now = Instant::now();
        let term = Term { leads_until: now + S * 10, writes_until: now + S * 15 };
        leadership.grant(term);
        assert_eq!(leadership.led_for(), S * 8);
        leadership.revoke();
        assert_eq!(leadership.led_for(), Duration::ZERO);
        leadership.grant(term);
        tokio::time::advance(S * 3).await;
        assert_eq!(leadership.led_for(), S * 3);
        tokio::time::advance(S * 7).await;
        assert_eq!(leadership.led_for(), Duration::ZERO, "over, whether or not anybody has noticed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_permit_is_refused_when_the_write_could_outlast_the_term() {
        let leadership = led_for(10);
        tokio::time::advance(S * 9).await;
        assert!(leadership.permit(S * 5).is_some());
        let short = Leadership::none();
        let now = Instant::now();
        short.grant(Term { leads_until: now + S, writes_until: now + S * 4 });
        assert!(short.permit(S * 3).is_some());
        assert!(short.permit(S * 5).is_none());
        assert_eq!(leadership.permits(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn an_expired_permit_does_not_poll_the_write() {
        let leadership = led_for(10);
        let permit = leadership.permit(S * 5).unwrap();
        tokio::time::advance(S * 60).await;
        let mut polled = false;
        let result = permit.run(async { polled = true }).await;
        assert_eq!(result, Err(Expired));
        assert!(!polled);
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_given_up_is_remembered_and_an_answered_one_is_not() {
        let leadership = Leadership::always();
        leadership.permit(S).unwrap().run(tokio::time::sleep(S / 2)).await.unwrap();
        drop(leadership.permit(S));
        assert_eq!(leadership.unanswered(), None);
        leadership.permit(S).unwrap().run(std::future::pending::<()>()).await.unwrap_err();
        assert_eq!(leadership.unanswered(), Some(Instant::now()));
        let cancelled = leadership.permit(S).unwrap().run(std::future::pending::<()>());
        tokio::time::timeout(S / 10, cancelled).await.unwrap_err();
        assert_eq!(leadership.unanswered(), Some(Instant::now()));
    }

    #[tokio::test(start_paused = true)]
    async fn losing_the_term_is_announced() {
        let leadership = led_for(10);
        let mut watch = leadership.watch();
        let expiry = tokio::spawn({
            let leadership = leadership.clone();
            async move { leadership.expire().await }
        });
        let start = Instant::now();
        watch.wait_for(|leading| !leading).await.unwrap();
        assert_eq!(start.elapsed(), S * 10);
        expiry.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn without_election_every_permit_is_given_and_still_has_a_deadline() {
        let leadership = Leadership::always();
        assert!(leadership.is_leader() && *leadership.watch().borrow());
        let permit = leadership.permit(S).unwrap();
        assert_eq!(permit.run(std::future::pending::<()>()).await, Err(Expired));
    }
}
