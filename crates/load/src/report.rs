//! What a run counted: outcomes, latencies, and how well it kept its own plan.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{Error, ErrorKind};
use std::time::Duration;

use groundcrew_core::warmup::converge;
use groundcrew_core::warmup::outcome::{Cut, Tally};
use hdrhistogram::Histogram;

/// Why a request did not succeed. One word each: these are counted and shown, never parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Failure {
    Refused,
    Unreachable,
    Tls,
    /// No whole response within the request's time.
    Timeout,
    /// The connection ended before the response did.
    Closed,
    /// Bytes that are not the protocol asked for.
    Protocol,
    Status(u16),
    Grpc(u16),
    NotServing,
    /// Under way when the cap or a cancellation came.
    CutOff,
}

impl Failure {
    pub(crate) fn of_connect(error: &Error) -> Self {
        match error.kind() {
            ErrorKind::ConnectionRefused => Self::Refused,
            ErrorKind::TimedOut => Self::Timeout,
            ErrorKind::ConnectionReset => Self::Closed,
            _ => Self::Unreachable,
        }
    }

    pub(crate) fn of_exchange(error: &hyper::Error) -> Self {
        if error.is_parse() {
            return Self::Protocol;
        }
        if error.is_timeout() { Self::Timeout } else { Self::Closed }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused => f.write_str("connection refused"),
            Self::Unreachable => f.write_str("no connection"),
            Self::Tls => f.write_str("TLS handshake failed"),
            Self::Timeout => f.write_str("timed out"),
            Self::Closed => f.write_str("connection closed early"),
            Self::Protocol => f.write_str("not the protocol asked for"),
            Self::Status(status) => write!(f, "status {status}"),
            Self::Grpc(code) => write!(f, "gRPC status {}", grpc_name(*code)),
            Self::NotServing => f.write_str("health service says not serving"),
            Self::CutOff => f.write_str("cut off"),
        }
    }
}

fn grpc_name(code: u16) -> &'static str {
    const NAMES: [&str; 17] = [
        "OK",
        "CANCELLED",
        "UNKNOWN",
        "INVALID_ARGUMENT",
        "DEADLINE_EXCEEDED",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "INTERNAL",
        "UNAVAILABLE",
        "DATA_LOSS",
        "UNAUTHENTICATED",
    ];
    NAMES.get(usize::from(code)).unwrap_or(&"UNKNOWN")
}

/// How a run came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Complete,
    Capped,
    /// Set aside for longer than it may be.
    NoPlace,
    Cancelled,
}

/// Everything a run counted.
#[derive(Clone, Debug)]
pub struct Report {
    pub planned: u32,
    pub sent: u32,
    pub succeeded: u32,
    pub failures: BTreeMap<Failure, u32>,
    /// Microseconds from the planned start, successes only.
    pub latency: Histogram<u32>,
    /// Microseconds between the planned start and the real one.
    pub lag: Histogram<u32>,
    pub curve: Option<converge::Summary>,
    /// The first step that its timeout ended, and that.
    pub late_step: Option<(String, Duration)>,
    pub end: End,
}

/// Five minutes is the longest anything here may take.
const LONGEST_MICROS: u64 = 300_000_000;

impl Report {
    /// Nothing if the histogram's bounds were wrong, which they are not.
    pub(crate) fn new(planned: u32) -> Option<Self> {
        // Two digits: a hundred times smaller than three, and nobody acts on a hundredth.
        let histogram = Histogram::new_with_bounds(1, LONGEST_MICROS, 2).ok()?;
        Some(Self {
            planned,
            sent: 0,
            succeeded: 0,
            failures: BTreeMap::new(),
            lag: histogram.clone(),
            latency: histogram,
            curve: None,
            late_step: None,
            end: End::Complete,
        })
    }

    pub(crate) fn started(&mut self, lag: Duration) {
        self.sent += 1;
        self.lag.saturating_record(micros(lag));
    }

    pub(crate) fn ended(&mut self, outcome: Result<Duration, Failure>) {
        match outcome {
            Ok(latency) => {
                self.succeeded += 1;
                self.latency.saturating_record(micros(latency));
            }
            Err(failure) => *self.failures.entry(failure).or_default() += 1,
        }
    }

    /// Whatever was sent and never came back.
    pub(crate) fn cut_off(&mut self, end: End) {
        self.end = end;
        let back = self.succeeded + self.failures.values().sum::<u32>();
        let lost = self.sent.saturating_sub(back);
        if lost > 0 {
            *self.failures.entry(Failure::CutOff).or_default() += lost;
        }
    }

    /// Adds what a later part of the same warm-up counted.
    pub(crate) fn absorb(&mut self, other: &Self) {
        self.sent += other.sent;
        self.succeeded += other.succeeded;
        for (failure, count) in &other.failures {
            *self.failures.entry(*failure).or_default() += count;
        }
        // Both were made with the same bounds.
        let _ = self.latency.add(&other.latency);
        let _ = self.lag.add(&other.lag);
        self.end = other.end;
    }

    #[must_use]
    pub fn quantile(&self, q: f64) -> Duration {
        if self.latency.is_empty() { Duration::ZERO } else { Duration::from_micros(self.latency.value_at_quantile(q)) }
    }

    /// What goes on the pod: `cap` is how long it might take, `patience` how long it might be without a place.
    #[must_use]
    pub fn tally(&self, cap: Duration, patience: Duration) -> Tally {
        let most = self.failures.iter().max_by_key(|(_, count)| **count);
        Tally {
            planned: self.planned,
            sent: self.sent,
            succeeded: self.succeeded,
            p50: self.quantile(0.5),
            p99: self.quantile(0.99),
            cut: match self.end {
                End::Capped => Some(Cut::Cap(cap)),
                End::NoPlace => Some(Cut::NoPlace(patience)),
                End::Complete => self.late_step.clone().map(|(name, timeout)| Cut::Step(name, timeout)),
                End::Cancelled => None,
            },
            failure: most.map(|(failure, count)| format!("{failure} ({count})")),
            curve: self.curve,
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX).max(1)
}
