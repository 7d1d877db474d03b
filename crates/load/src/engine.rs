//! Sends a call as often and in the rhythm that was asked for.
//!
//! Paced requests are open-loop: each starts when its time has come, however slow those before it are, and its latency
//! counts from that time. A server that stalls therefore shows the stall to every request it would have delayed.

use std::sync::Arc;
use std::time::Duration;

use groundcrew_core::warmup::converge::Curve;
use groundcrew_core::warmup::rules::Mode;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::call::Call;
use crate::client::{Answer, Client};
use crate::pace::Pacer;
use crate::report::{End, Failure, Report};

/// How often and how fast.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub requests: u32,
    pub duration: Duration,
    pub mode: Mode,
    pub request_timeout: Duration,
    /// Ends the whole run.
    pub cap: Duration,
    /// Off where time is virtual.
    pub precise: bool,
}

/// Who else wants to send: asked before each request.
pub trait Throttle: Sync {
    /// Returns at once unless the whole run is set aside; then when it goes on, with the time that took. Plan and cap
    /// move by it. Nothing means that it was set aside for longer than it may be.
    fn resumed(&self) -> impl Future<Output = Option<Duration>> + Send;

    /// Returns when it is this run's turn to send one request.
    fn permit(&self) -> impl Future<Output = ()> + Send;
}

/// Nobody else.
#[derive(Clone, Copy, Debug)]
pub struct Free;

impl Throttle for Free {
    async fn resumed(&self) -> Option<Duration> {
        Some(Duration::ZERO)
    }

    async fn permit(&self) {}
}

/// What a run hands back: the counts, and the last answer if its body was asked for.
#[derive(Debug)]
pub struct Done {
    pub report: Report,
    pub last: Option<Answer>,
    /// For how long it stood in favour of others.
    pub set_aside: Duration,
}

/// Runs the plan to its end, to its cap, or until it is cancelled.
pub async fn run(
    client: &Arc<Client>,
    call: &Arc<Call>,
    plan: Plan,
    keep_body: bool,
    throttle: &impl Throttle,
    cancel: &CancellationToken,
    counted: &Progress,
) -> Option<Done> {
    let mut run = Run {
        client,
        call,
        plan,
        keep_body,
        cap: Instant::now() + plan.cap,
        report: Report::new(plan.requests)?,
        last: None,
        set_aside: Duration::ZERO,
        counted,
    };
    let end = match plan.mode {
        Mode::Paced => run.paced(throttle, cancel).await,
        Mode::Asap => run.back_to_back(None, throttle, cancel).await,
        Mode::Converge => {
            let mut curve = Curve::default();
            // The duration is the budget of time.
            run.cap = run.cap.min(Instant::now() + plan.duration);
            let end = run.back_to_back(Some(&mut curve), throttle, cancel).await;
            run.report.curve = Some(curve.summary());
            // Out of time is how a curve that never flattens ends; no cap was hit.
            if end == End::Capped && plan.duration <= plan.cap { End::Complete } else { end }
        }
    };
    run.report.cut_off(end);
    Some(Done { report: run.report, last: run.last, set_aside: run.set_aside })
}

/// Counts that outlive a run that is dropped, for whoever takes over.
#[derive(Debug, Default)]
pub struct Progress {
    sent: std::sync::atomic::AtomicU32,
    succeeded: std::sync::atomic::AtomicU32,
}

impl Progress {
    #[must_use]
    pub fn sent(&self) -> u32 {
        self.sent.load(std::sync::atomic::Ordering::Relaxed)
    }

    #[must_use]
    pub fn succeeded(&self) -> u32 {
        self.succeeded.load(std::sync::atomic::Ordering::Relaxed)
    }
}

struct Run<'a> {
    client: &'a Arc<Client>,
    call: &'a Arc<Call>,
    plan: Plan,
    keep_body: bool,
    cap: Instant,
    report: Report,
    last: Option<Answer>,
    set_aside: Duration,
    counted: &'a Progress,
}

type Outcome = (Instant, Result<Answer, Failure>, Instant);

impl Run<'_> {
    async fn paced(&mut self, throttle: &impl Throttle, cancel: &CancellationToken) -> End {
        let interval = self.plan.duration / self.plan.requests.max(1);
        let pacer = if self.plan.precise { Pacer::for_interval(interval) } else { Pacer::coarse() };
        let mut base = Instant::now();
        let mut under_way = JoinSet::new();
        for k in 0..self.plan.requests {
            let planned = base + self.plan.duration.mul_f64(f64::from(k) / f64::from(self.plan.requests));
            if let Err(end) = self.until(pacer.until(planned), cancel).await {
                return end;
            }
            let turn = match self.turn(throttle, cancel).await {
                Ok(turn) => turn,
                Err(end) => return end,
            };
            base += turn.set_aside;
            // What the throttle held back is our doing, not the server's.
            let counts_from = planned + turn.set_aside + turn.waited;
            self.note_start(counts_from.elapsed());
            under_way.spawn(one(
                self.client.clone(),
                self.call.clone(),
                self.plan.request_timeout,
                self.keep_body,
                counts_from,
            ));
            while let Some(done) = under_way.try_join_next() {
                self.note_end(done.ok());
            }
        }
        while !under_way.is_empty() {
            match self.until(under_way.join_next(), cancel).await {
                Ok(done) => self.note_end(done.and_then(Result::ok)),
                Err(end) => return end,
            }
        }
        End::Complete
    }

    async fn back_to_back(
        &mut self,
        mut curve: Option<&mut Curve>,
        throttle: &impl Throttle,
        cancel: &CancellationToken,
    ) -> End {
        for _ in 0..self.plan.requests {
            if let Err(end) = self.turn(throttle, cancel).await {
                return end;
            }
            self.note_start(Duration::ZERO);
            let sent =
                one(self.client.clone(), self.call.clone(), self.plan.request_timeout, self.keep_body, Instant::now());
            let done = match self.until(sent, cancel).await {
                Ok(done) => done,
                Err(end) => return end,
            };
            let latency = done.1.is_ok().then(|| done.2.saturating_duration_since(done.0));
            self.note_end(Some(done));
            if let (Some(curve), Some(latency)) = (curve.as_deref_mut(), latency)
                && curve.push(latency)
            {
                break;
            }
        }
        End::Complete
    }

    /// The work, unless cap or cancellation come first.
    async fn until<T>(&self, work: impl Future<Output = T>, cancel: &CancellationToken) -> Result<T, End> {
        tokio::select! {
            biased;
            () = cancel.cancelled() => Err(End::Cancelled),
            done = work => Ok(done),
            () = tokio::time::sleep_until(self.cap) => Err(End::Capped),
        }
    }

    async fn turn(&mut self, throttle: &impl Throttle, cancel: &CancellationToken) -> Result<Turn, End> {
        let set_aside = tokio::select! {
            biased;
            () = cancel.cancelled() => return Err(End::Cancelled),
            resumed = throttle.resumed() => resumed.ok_or(End::NoPlace)?,
        };
        self.cap += set_aside;
        self.set_aside += set_aside;
        let asked = Instant::now();
        self.until(throttle.permit(), cancel).await?;
        Ok(Turn { set_aside, waited: asked.elapsed() })
    }

    fn note_start(&mut self, lag: Duration) {
        self.report.started(lag);
        self.counted.sent.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }

    fn note_end(&mut self, done: Option<Outcome>) {
        let Some((from, result, at)) = done else {
            // The task was aborted or panicked; its request is lost like one that was cut off.
            return self.report.ended(Err(Failure::CutOff));
        };
        match result {
            Ok(answer) => {
                self.counted.succeeded.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                self.report.ended(Ok(at.saturating_duration_since(from)));
                self.last = Some(answer).filter(|_| self.keep_body);
            }
            Err(failure) => self.report.ended(Err(failure)),
        }
    }
}

/// What came between a planned start and the permission for it.
struct Turn {
    set_aside: Duration,
    waited: Duration,
}

async fn one(client: Arc<Client>, call: Arc<Call>, within: Duration, keep_body: bool, from: Instant) -> Outcome {
    let result = client.send(&call, within, keep_body).await;
    (from, result, Instant::now())
}
