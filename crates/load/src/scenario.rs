//! Runs the steps of a `WarmupConfig` in order.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use groundcrew_core::warmup::rules::{Mode, Protocol};
use groundcrew_core::warmup::scenario::{Request, Scenario, Variables};
use http::Method;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::call::{Call, Expect, Trace};
use crate::client::{Client, Target};
use crate::engine::{self, Done, Plan, Progress, Throttle};
use crate::grpc;
use crate::report::{End, Report};

/// What one request of a step may take, unless the step has less time left.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) struct Runner<'a, T> {
    pub target: Target,
    pub protocol: Protocol,
    pub trace: Trace,
    pub precise: bool,
    pub throttle: &'a T,
    pub cancel: &'a CancellationToken,
    pub counted: &'a Progress,
    /// Connections are kept across steps, per protocol.
    pub clients: BTreeMap<&'static str, Arc<Client>>,
}

impl<T: Throttle> Runner<'_, T> {
    /// All steps, or the first thing without which the rest makes no sense.
    pub(crate) async fn run(mut self, scenario: &Scenario) -> Result<Report, String> {
        let mut report = Report::new(scenario.planned()).ok_or("no histogram")?;
        let mut end = Instant::now() + scenario.timeout;
        let mut variables = Variables::new();
        for step in &scenario.steps {
            let mut step_end = end.min(Instant::now() + step.timeout);
            let mut late = false;
            for request in &step.requests {
                let left = step_end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    late = true;
                    break;
                }
                let placed = |e| format!("step {:?}, request {:?}: {e}", step.name, request.name);
                let done = self.request(request, &variables, left).await.map_err(placed)?;
                report.absorb(&done.report);
                if matches!(report.end, End::Cancelled | End::NoPlace) {
                    return Ok(report);
                }
                late |= report.end == End::Capped;
                // Standing aside is not its own doing.
                (end, step_end) = (end + done.set_aside, step_end + done.set_aside);
                let last = done.last.map(|answer| answer.body);
                if !request.extract.is_empty() {
                    let body = last.ok_or_else(|| placed("no response to extract from".to_owned()))?;
                    request.extract(&body, &mut variables).map_err(|e| format!("step {:?}, {e}", step.name))?;
                }
            }
            if late {
                report.late_step.get_or_insert_with(|| (step.name.clone(), step.timeout));
            }
        }
        report.cut_off(if Instant::now() >= end { End::Capped } else { End::Complete });
        Ok(report)
    }

    async fn request(&mut self, request: &Request, variables: &Variables, left: Duration) -> Result<Done, String> {
        let client = self.client(request.protocol.unwrap_or(self.protocol));
        let end = Instant::now() + left;
        let call = Arc::new(self.call(&client, request, variables, end).await?);
        // Looking a method up takes its time from that of the step.
        let left = end.saturating_duration_since(Instant::now());
        let plan = Plan {
            requests: request.count,
            duration: left,
            mode: Mode::Asap,
            request_timeout: left.min(REQUEST_TIMEOUT),
            cap: left,
            precise: self.precise,
        };
        let keep = !request.extract.is_empty();
        let done = engine::run(&client, &call, plan, keep, self.throttle, self.cancel, self.counted).await;
        done.ok_or_else(|| "no histogram".to_owned())
    }

    async fn call(
        &self,
        client: &Arc<Client>,
        request: &Request,
        variables: &Variables,
        end: Instant,
    ) -> Result<Call, String> {
        let filled = request.fill(variables)?;
        let mut call = if request.protocol.unwrap_or(self.protocol) == Protocol::Grpc {
            grpc::prepare(client, request.grpc_method.as_ref(), &filled.grpc_payload, REQUEST_TIMEOUT, end).await?
        } else {
            let method = Method::from_bytes(request.method.as_bytes()).map_err(|e| e.to_string())?;
            let expect = request.expected_status.map_or(Expect::Answer, Expect::Status);
            Call::new(method, filled.endpoint.as_str(), Bytes::from(filled.body), expect).ok_or("no path")?
        };
        for (name, value) in &filled.headers {
            if !call.header(name, value) {
                return Err(format!("header {name} cannot be sent"));
            }
        }
        Ok(call)
    }

    fn client(&mut self, protocol: Protocol) -> Arc<Client> {
        let target = Target::new(self.target.address, protocol);
        self.clients.entry(protocol.name()).or_insert_with(|| Arc::new(Client::new(target, self.trace))).clone()
    }
}
