//! The leader opens what an agent does not: a gate that nobody opens hangs rollouts.
//!
//! Assumptions: `silent_for` and `unchanged_for` are what this process saw on its own monotonic clock, so that no other
//! machine's clock, and no restart of ours, can open a gate early.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use super::facts::Seen;
use super::outcome::failed_open;
use super::rules::{FailurePolicy, MAX_DURATION, Rules, failure_policy};
use super::state::{Phase, Reason, State, Write};
use crate::{duration, timestamp};

/// How long a live agent may leave a ready pod without a sign.
const UNATTENDED: Duration = Duration::from_secs(30);
/// What the agent may be late by before the leader steps in.
const GRACE: Duration = Duration::from_secs(60);

/// A node's agent as the leader sees its Lease.
#[derive(Clone, Copy, Debug)]
pub struct Agent<'a> {
    pub node: &'a str,
    /// Who held the Lease last; absent when this node never had one.
    pub holder: Option<&'a str>,
    pub silent_for: Duration,
    /// Silent for so long means gone.
    pub gone_after: Duration,
    /// How long this leader has led: an outage that cost it the lead has kept agents from renewing as well.
    pub led_for: Duration,
}

impl Agent<'_> {
    /// How long until it counts as gone; zero when it does.
    fn gone_in(&self) -> Duration {
        let silence = self.gone_after.saturating_sub(self.silent_for);
        silence.max((self.gone_after / 2).saturating_sub(self.led_for))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Verdict {
    Leave(Why),
    /// Look again then, if nothing has changed.
    LookAgain {
        after: Duration,
    },
    Open(Write),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Why {
    NoGate,
    Ending,
    Open,
    NotReady,
    /// The agent lives and the user wants the gate shut.
    Closed,
}

/// `unchanged_for`: how long the pod has been ready for warm-up without its record changing.
#[must_use]
pub fn decide(
    seen: &Seen<'_>,
    agent: Agent<'_>,
    unchanged_for: Duration,
    max_queue_wait: Duration,
    now: Timestamp,
) -> Verdict {
    if !seen.is_gated() {
        return Verdict::Leave(Why::NoGate);
    }
    if seen.is_ending() {
        return Verdict::Leave(Why::Ending);
    }
    if seen.is_open() {
        return Verdict::Leave(Why::Open);
    }
    let Ok(containers) = seen.due() else { return Verdict::Leave(Why::NotReady) };
    let record = seen.state().filter(|state| state.containers == containers);
    let gone_in = agent.gone_in();
    if gone_in.is_zero() {
        return Verdict::Open(unavailable(agent, containers, record.as_ref(), now));
    }
    let Some(allowed) = allowed(seen, record.as_ref(), max_queue_wait) else { return Verdict::Leave(Why::Closed) };
    if unchanged_for < allowed {
        return Verdict::LookAgain { after: gone_in.min(allowed - unchanged_for) };
    }
    let cause = format!(
        "the agent of node {} showed no progress for {}, the leader stepped in",
        agent.node,
        duration::text(Duration::from_secs(unchanged_for.as_secs()))
    );
    Verdict::Open(failed_open(&cause, done(containers, record.as_ref())))
}

/// How long the record may stay as it is while the agent lives; nothing when shut is what the user wants.
fn allowed(seen: &Seen<'_>, record: Option<&State>, max_queue_wait: Duration) -> Option<Duration> {
    let Some(state) = record else { return Some(UNATTENDED) };
    let attempt = || match Rules::read(seen.annotations, &seen.spec.containers) {
        Ok(rules) if rules.config.is_none() => rules.timeout,
        // A WarmupConfig has a cap of its own, at most this.
        _ => MAX_DURATION,
    };
    match state.phase {
        // The agent ends the wait itself; this is for one that hangs.
        Phase::Queued | Phase::HandedOver => Some(max_queue_wait + GRACE),
        // One that runs may be set aside for as long as one that waits.
        Phase::Running => Some(attempt() + max_queue_wait + GRACE),
        Phase::Failed if failure_policy(seen.annotations) == FailurePolicy::Closed => None,
        Phase::Failed => Some(super::outcome::MAX_BACKOFF + GRACE),
        Phase::Done => Some(UNATTENDED),
    }
}

fn unavailable(agent: Agent<'_>, containers: Vec<String>, record: Option<&State>, now: Timestamp) -> Write {
    let silent = SignedDuration::try_from(agent.silent_for).unwrap_or_default();
    let since = now.saturating_sub(silent).unwrap_or(now);
    let who = match agent.holder {
        Some(holder) => format!("agent {holder} of node {}", agent.node),
        None => format!("the agent of node {}", agent.node),
    };
    let message = format!("{who} has not been heard of since {}; ready without warm-up", timestamp::text(since));
    Write::new(Reason::AgentUnavailable, &message, done(containers, record))
}

/// What opens a shut gate when nobody will warm the pod any more, and why that is. Containers that are not there yet
/// leave none on record, which says to whoever comes later that the gate is open on purpose.
#[must_use]
pub fn farewell(seen: &Seen<'_>, why: &str) -> Option<Write> {
    if !seen.is_gated() || seen.is_ending() || seen.is_open() {
        return None;
    }
    let message = format!("{why}; ready without warm-up");
    Some(Write::new(Reason::AgentUnavailable, &message, done(seen.due().unwrap_or_default(), None)))
}

fn done(containers: Vec<String>, record: Option<&State>) -> State {
    let (attempt, starts) = record.map_or((1, 0), |state| (state.attempt, state.starts));
    State { containers, phase: Phase::Done, attempt, starts, sent: 0, succeeded: 0, next: None, since: None }
}
