//! A pod is warm before it is Ready.
//!
//! ```text
//!            containers ready      a place is free         requests end
//! waiting ──────────────────► queued ─────────► running n ─────────────► done, failed open
//!    ▲                           ▲                  │ nothing succeeded
//!    │ a container restarted     │ backoff over     ▼ and a retry, or policy closed
//!  stale ◄──── done              └─────────────── failed
//! ```
//!
//! Where a pod stands is read from the pod alone: its condition, and the annotation that names the containers meant.
//! So an agent, a leader or a kubelet that starts anew neither repeats nor forgets a warm-up.

use std::net::SocketAddr;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

pub mod admission;
pub mod backstop;
pub mod converge;
pub mod endpoint;
pub mod facts;
pub mod fair;
pub mod outcome;
mod port;
pub mod rules;
pub mod scenario;
pub mod state;

pub use facts::{Missing, Seen};
use outcome::{Attempt, OnFailure, Outcome};
use rules::Rules;
use state::{Phase, Reason, State, Write};

/// A crash repeats a warm-up; a second one means the warm-up may be what kills the agent.
const MAX_STARTS: u32 = 2;
/// A live agent sees a restart within seconds. A container that has served for longer has seen its requests already.
const RESTART_NOTICED: SignedDuration = SignedDuration::from_secs(60);

/// What this agent already has in its queue or under way for the pod.
#[derive(Clone, Copy, Debug)]
pub struct InHand<'a> {
    pub containers: &'a [String],
    pub address: SocketAddr,
}

/// What should happen to the pod, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Verdict {
    Leave(Why),
    /// The gate shuts at once: what was warm is gone.
    Shut(Write),
    Wait {
        until: Timestamp,
    },
    /// Into the queue.
    Warm(Box<Job>),
    /// No request can be sent: the gate opens or stays shut as the policy says.
    Conclude(Write),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Why {
    NoGate,
    Ending,
    Done,
    NotReady(Missing),
    ContainersChanged,
    AddressChanged,
    /// A condition that waits for someone to change the pod.
    Said,
}

/// Everything an attempt needs, all of it checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Job {
    pub attempt: Attempt,
    pub rules: Rules,
    pub address: SocketAddr,
    /// How long it may still be without a place, before it begins and while it is set aside.
    pub patience: Duration,
}

/// What is to be done with a pod that this agent has not in hand.
#[must_use]
pub fn decide(seen: &Seen<'_>, max_queue_wait: Duration, now: Timestamp, jitter: f64) -> Verdict {
    if let Some(why) = not_ours(seen) {
        return Verdict::Leave(why);
    }
    if seen.is_open() {
        return opened(seen, now);
    }
    match seen.due() {
        Ok(containers) => due(seen, containers, max_queue_wait, now, jitter),
        Err(missing) => Verdict::Leave(Why::NotReady(missing)),
    }
}

/// Why what is in hand has to end, if it has to: not by readiness, which may flap under load.
#[must_use]
pub fn over(seen: &Seen<'_>, held: InHand<'_>) -> Option<Why> {
    if let Some(why) = not_ours(seen) {
        return Some(why);
    }
    if !seen.still_runs(held.containers) {
        return Some(Why::ContainersChanged);
    }
    if seen.address() != Some(held.address.ip()) {
        return Some(Why::AddressChanged);
    }
    // Whoever opened it has put the pod into service.
    seen.is_open().then_some(Why::Done)
}

fn not_ours(seen: &Seen<'_>) -> Option<Why> {
    if !seen.is_gated() {
        return Some(Why::NoGate);
    }
    seen.is_ending().then_some(Why::Ending)
}

fn opened(seen: &Seen<'_>, now: Timestamp) -> Verdict {
    let state = seen.state();
    let recently = now.saturating_sub(RESTART_NOTICED).unwrap_or(now);
    let stale = match &state {
        // Opened on purpose before there was anything to warm.
        Some(state) if state.containers.is_empty() => false,
        Some(state) => seen.restarted(recently, |id, _| state.containers.iter().any(|known| known == id)),
        // Opened by a predecessor that kept no record.
        None => match seen.condition().and_then(|condition| condition.last_transition_time) {
            Some(opened) => seen.restarted(recently, |_, started| started.is_none_or(|at| at <= opened)),
            None => false,
        },
    };
    if !stale {
        return Verdict::Leave(Why::Done);
    }
    let message = "a container was restarted and is cold again";
    let none = State {
        containers: Vec::new(),
        phase: Phase::Queued,
        attempt: 1,
        starts: 0,
        sent: 0,
        succeeded: 0,
        next: None,
        since: None,
    };
    Verdict::Shut(Write::new(Reason::WarmupStale, message, none))
}

fn due(seen: &Seen<'_>, containers: Vec<String>, max_queue_wait: Duration, now: Timestamp, jitter: f64) -> Verdict {
    let known = seen.state().filter(|state| state.containers == containers);
    let attempt = next_attempt(containers, known.as_ref(), now);
    let policy = rules::failure_policy(seen.annotations);
    let rules = match Rules::read(seen.annotations, &seen.spec.containers) {
        Ok(rules) => rules,
        Err(problems) => return say(seen, attempt.impossible(&problems.to_string(), policy)),
    };
    // Further away than any pause is long: the clock was set back.
    let longest = SignedDuration::try_from(outcome::MAX_BACKOFF).unwrap_or_default();
    let is_ahead = |next: &Timestamp| *next > now && next.duration_since(now) <= longest;
    if let Some(next) = known.as_ref().and_then(|state| state.next).filter(is_ahead) {
        return Verdict::Wait { until: next };
    }
    let on_failure = OnFailure { policy, retries: rules.retries };
    let unable = |why: &str| say(seen, attempt.ended(&Outcome::Unable(why.to_owned()), on_failure, now, jitter));
    if attempt.starts > MAX_STARTS {
        return unable("the agent stopped twice during this warm-up");
    }
    let waited = Duration::try_from(now.duration_since(attempt.since)).unwrap_or_default();
    let patience = max_queue_wait.saturating_sub(waited);
    if patience.is_zero() {
        return unable(&outcome::no_place(max_queue_wait));
    }
    match seen.address() {
        Some(ip) => {
            let address = SocketAddr::new(ip, rules.port);
            Verdict::Warm(Box::new(Job { attempt, rules, address, patience }))
        }
        None => unable("the pod has no IP that can be used"),
    }
}

/// Where the record of these containers leads next.
fn next_attempt(containers: Vec<String>, known: Option<&State>, now: Timestamp) -> Attempt {
    let fresh = Attempt { containers, number: 1, starts: 1, sent: 0, succeeded: 0, since: now };
    let Some(state) = known else { return fresh };
    let same = Attempt { number: state.attempt, starts: state.starts.max(1), ..fresh };
    match state.phase {
        // The agent that wrote this is gone and nobody knows how many requests it sent.
        Phase::Running => Attempt { starts: same.starts + 1, ..same },
        Phase::Queued | Phase::HandedOver => {
            // A clock that was set back must not make it wait longer.
            let since = state.since.map_or(now, |since| since.min(now));
            Attempt { sent: state.sent, succeeded: state.succeeded, since, ..same }
        }
        Phase::Failed if state.next.is_some() => Attempt { number: state.attempt + 1, starts: 1, ..same },
        Phase::Failed | Phase::Done => same,
    }
}

fn say(seen: &Seen<'_>, write: Write) -> Verdict {
    if write.is_known(seen) { Verdict::Leave(Why::Said) } else { Verdict::Conclude(write) }
}

#[cfg(test)]
mod tests;
