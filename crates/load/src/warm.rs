//! One attempt to warm one pod, from its rules to its outcome.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use groundcrew_core::warmup::outcome::Outcome;
use groundcrew_core::warmup::rules::{Protocol, Rules};
use groundcrew_core::warmup::scenario::Scenario;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::call::{Call, Trace};
use crate::client::{Client, Target};
use crate::engine::{self, Plan, Progress, Throttle};
use crate::grpc;
use crate::report::{End, Report};
use crate::scenario::Runner;

/// What is warmed and how.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    pub address: SocketAddr,
    pub rules: &'a Rules,
    pub scenario: Option<&'a Scenario>,
    /// Requests of the same attempt that another agent has sent and counted.
    pub sent_before: u32,
    pub trace: Trace,
    pub precise: bool,
    /// How long a pod may be without a place; told when that ends it.
    pub max_queue_wait: Duration,
}

/// How it ended; cancelled ones have no outcome, whoever cancelled knows what comes next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    With(Outcome),
    Cancelled,
}

/// Sends the requests. Dropping the future closes every connection.
pub async fn warm<T: Throttle>(work: Work<'_>, throttle: &T, cancel: &CancellationToken, counted: &Progress) -> Ended {
    let result = match work.scenario {
        Some(scenario) => steps(work, scenario, throttle, cancel, counted).await.map(|r| (r, scenario.timeout)),
        None => plain(work, throttle, cancel, counted).await.map(|r| (r, work.rules.timeout)),
    };
    match result {
        _ if cancel.is_cancelled() => Ended::Cancelled,
        Ok((report, _)) if report.end == End::Cancelled => Ended::Cancelled,
        Ok((report, cap)) => Ended::With(Outcome::Ran(report.tally(cap, work.max_queue_wait))),
        Err(why) => Ended::With(Outcome::Unable(why)),
    }
}

async fn plain<T: Throttle>(
    work: Work<'_>,
    throttle: &T,
    cancel: &CancellationToken,
    counted: &Progress,
) -> Result<Report, String> {
    let rules = work.rules;
    let client = Arc::new(Client::new(Target::new(work.address, rules.protocol), work.trace));
    let mut plan = plan(rules, work.sent_before, work.precise);
    let call = if rules.protocol == Protocol::Grpc {
        // Finding the method out is bounded like a request, and takes its time from that of the warm-up.
        let end = Instant::now() + plan.cap;
        let (method, within) = (rules.grpc_method.as_ref(), plan.request_timeout);
        let call = tokio::select! {
            call = grpc::prepare(&client, method, &rules.grpc_payload, within, end) => call?,
            () = cancel.cancelled() => return Err("cancelled".to_owned()),
        };
        plan.cap = end.saturating_duration_since(Instant::now());
        call
    } else {
        Call::get(&rules.endpoint).ok_or("the endpoint is no path")?
    };
    let done = engine::run(&client, &Arc::new(call), plan, false, throttle, cancel, counted).await;
    done.map(|done| done.report).ok_or_else(|| "no histogram".to_owned())
}

async fn steps<T: Throttle>(
    work: Work<'_>,
    scenario: &Scenario,
    throttle: &T,
    cancel: &CancellationToken,
    counted: &Progress,
) -> Result<Report, String> {
    let runner = Runner {
        target: Target::new(work.address, work.rules.protocol),
        protocol: work.rules.protocol,
        trace: work.trace,
        precise: work.precise,
        throttle,
        cancel,
        counted,
        clients: BTreeMap::new(),
    };
    runner.run(scenario).await
}

/// What is left of the rules' plan, at the same pace.
fn plan(rules: &Rules, sent_before: u32, precise: bool) -> Plan {
    let left = rules.requests.saturating_sub(sent_before);
    let share = f64::from(left) / f64::from(rules.requests.max(1));
    Plan {
        requests: left,
        duration: rules.duration.mul_f64(share).max(Duration::from_millis(1)),
        mode: rules.mode,
        request_timeout: rules.request_timeout(),
        cap: rules.timeout,
        precise,
    }
}
