//! The state machine on pods as the API server shows them.

mod bound;

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::ToSpan;
use serde_json::{Value, json};

use super::backstop::{self, Agent};
use super::facts::{Spec, Status};
use super::outcome::Tally;
use super::*;
use crate::keys;

const NOW: Timestamp = Timestamp::constant(1_763_000_000, 0);
const QUEUE: Duration = Duration::from_secs(300);

/// A pod of one container that is ready to be warmed; tests change what matters to them.
#[derive(Clone)]
struct Pod {
    annotations: BTreeMap<String, String>,
    deleting: bool,
    spec: Value,
    status: Value,
}

fn pod() -> Pod {
    Pod {
        annotations: BTreeMap::new(),
        deleting: false,
        spec: json!({
            "nodeName": "node-a",
            "readinessGates": [{"conditionType": "kube-booster.io/warmup-ready"}],
            "containers": [{"name": "app", "ports": [{"containerPort": 8080}]}],
        }),
        status: json!({
            "phase": "Running",
            "podIP": "10.1.2.3",
            "conditions": [{"type": "ContainersReady", "status": "True"}],
            "containerStatuses": [running("app", "c1")],
        }),
    }
}

fn running(name: &str, id: &str) -> Value {
    json!({"name": name, "ready": true, "containerID": format!("containerd://{id}"),
           "state": {"running": {"startedAt": "2025-11-13T02:00:00Z"}}})
}

impl Pod {
    fn with(mut self, key: &str, value: &str) -> Self {
        self.annotations.insert(key.to_owned(), value.to_owned());
        self
    }

    fn status(mut self, pointer: &str, value: Value) -> Self {
        *self.status.pointer_mut(pointer).unwrap() = value;
        self
    }

    fn restarted(self, id: &str) -> Self {
        self.status("/containerStatuses/0", running("app", id))
    }

    /// What the API server holds after the write.
    fn after(mut self, write: &Write) -> Self {
        let patch = write.patch("u", None, None, NOW);
        let state = patch["metadata"]["annotations"][keys::WARMUP_STATE].as_str().unwrap().to_owned();
        self.annotations.insert(keys::WARMUP_STATE.to_owned(), state);
        let conditions = self.status["conditions"].as_array_mut().unwrap();
        conditions.retain(|c| c["type"] != keys::WARMUP_READY);
        conditions.push(patch["status"]["conditions"][0].clone());
        self
    }

    fn see<T>(&self, look: impl FnOnce(&Seen<'_>) -> T) -> T {
        let spec: Spec = serde_json::from_value(self.spec.clone()).unwrap();
        let status: Status = serde_json::from_value(self.status.clone()).unwrap();
        look(&Seen { annotations: &self.annotations, deleting: self.deleting, spec: &spec, status: &status })
    }

    fn decide(&self) -> Verdict {
        self.see(|seen| decide(seen, QUEUE, NOW, 0.0))
    }

    fn job(&self) -> Job {
        match self.decide() {
            Verdict::Warm(job) => *job,
            other => panic!("{other:?}"),
        }
    }

    fn backstop(&self, silent: u64, unchanged: u64) -> backstop::Verdict {
        self.backstop_of(3_600, silent, unchanged)
    }

    fn backstop_of(&self, led: u64, silent: u64, unchanged: u64) -> backstop::Verdict {
        let gone_after = Duration::from_secs(30);
        let (silent_for, led_for) = (Duration::from_secs(silent), Duration::from_secs(led));
        let agent = Agent { node: "node-a", holder: Some("agent-x"), silent_for, gone_after, led_for };
        self.see(|seen| backstop::decide(seen, agent, Duration::from_secs(unchanged), QUEUE, NOW))
    }
}

fn complete(job: &Job) -> Write {
    let tally = Tally { planned: 3, sent: 3, succeeded: 3, ..Tally::default() };
    job.attempt.ended(&Outcome::Ran(tally), on_failure(job), NOW, 0.0)
}

fn fail(job: &Job) -> Write {
    let tally = Tally { planned: 3, sent: 3, ..Tally::default() };
    job.attempt.ended(&Outcome::Ran(tally), on_failure(job), NOW, 0.0)
}

fn on_failure(job: &Job) -> OnFailure {
    OnFailure { policy: job.rules.failure_policy, retries: job.rules.retries }
}

#[test]
fn a_ready_pod_is_warmed() {
    let job = pod().job();
    assert_eq!(job.address, "10.1.2.3:8080".parse().unwrap());
    assert_eq!(job.attempt.containers, ["containerd://c1"]);
    assert_eq!((job.attempt.number, job.attempt.starts), (1, 1));
}

#[test]
fn an_ipv6_address_is_as_good() {
    assert_eq!(pod().status("/podIP", json!("fd00::7")).job().address, "[fd00::7]:8080".parse().unwrap());
}

#[test]
fn a_pod_without_the_gate_is_left_alone() {
    let mut free = pod();
    free.spec["readinessGates"] = Value::Null;
    assert_eq!(free.decide(), Verdict::Leave(Why::NoGate));
}

#[test]
fn ending_pods_are_left_alone() {
    assert_eq!(Pod { deleting: true, ..pod() }.decide(), Verdict::Leave(Why::Ending));
    for phase in ["Succeeded", "Failed"] {
        assert_eq!(pod().status("/phase", json!(phase)).decide(), Verdict::Leave(Why::Ending));
    }
}

#[test]
fn everything_must_be_ready_first() {
    let missing = |pod: Pod| match pod.decide() {
        Verdict::Leave(Why::NotReady(missing)) => missing,
        other => panic!("{other:?}"),
    };
    assert_eq!(missing(pod().status("/phase", json!("Pending"))), Missing::Running);
    assert_eq!(missing(pod().status("/conditions/0/status", json!("False"))), Missing::ContainersReady);
    assert_eq!(missing(pod().status("/containerStatuses/0/ready", json!(false))), Missing::ReadyContainer);
    assert_eq!(missing(pod().status("/containerStatuses", json!([]))), Missing::ReadyContainer);
    let mut unbound = pod();
    unbound.spec["nodeName"] = Value::Null;
    assert_eq!(missing(unbound), Missing::Node);
}

#[test]
fn native_sidecars_count_and_plain_init_containers_do_not() {
    let mut two = pod();
    two.spec["initContainers"] = json!([{"name": "setup"}, {"name": "proxy", "restartPolicy": "Always"}]);
    assert_eq!(two.decide(), Verdict::Leave(Why::NotReady(Missing::ReadyContainer)));
    two.status["initContainerStatuses"] = json!([
        {"name": "setup", "ready": true, "containerID": "containerd://s", "state": {"terminated": {"exitCode": 0}}},
        running("proxy", "c0"),
    ]);
    assert_eq!(two.job().attempt.containers, ["containerd://c0", "containerd://c1"]);
}

#[test]
fn a_warmed_pod_is_left_alone_until_a_container_restarts() {
    let warm = pod().after(&complete(&pod().job()));
    assert_eq!(warm.decide(), Verdict::Leave(Why::Done));
    // Readiness flaps, the containers stay: nothing is cold.
    assert_eq!(warm.clone().status("/containerStatuses/0/ready", json!(false)).decide(), Verdict::Leave(Why::Done));
    let dead = warm.clone().status("/containerStatuses/0/state", json!({"terminated": {"exitCode": 1}}));
    assert!(matches!(dead.decide(), Verdict::Shut(write) if write.reason == Reason::WarmupStale));
    let Verdict::Shut(write) = warm.clone().restarted("c2").decide() else { panic!() };
    let again = warm.restarted("c2").after(&write).job();
    assert_eq!((again.attempt.containers[0].as_str(), again.attempt.number), ("containerd://c2", 1));
}

#[test]
fn a_gate_opened_without_a_record_is_trusted_until_a_container_starts_later() {
    let opened = |at: &str| {
        let condition = json!({"type": keys::WARMUP_READY, "status": "True", "lastTransitionTime": at});
        pod().status("/conditions", json!([{"type": "ContainersReady", "status": "True"}, condition]))
    };
    assert_eq!(opened("2025-11-13T02:00:00Z").decide(), Verdict::Leave(Why::Done));
    assert!(matches!(opened("2025-11-13T01:59:59Z").decide(), Verdict::Shut(_)));
}

#[test]
fn a_restart_that_nobody_saw_does_not_take_a_serving_pod_out() {
    // All of them started at 02:00:00; now is 02:13:20.
    let ready = |status: &str, since: &str| json!({"type": "Ready", "status": status, "lastTransitionTime": since});
    let opened = json!({"type": keys::WARMUP_READY, "status": "True", "lastTransitionTime": "2025-11-13T01:00:00Z"});
    let with = |pod: &Pod, ready: Value| {
        let mut pod = pod.clone();
        pod.status["conditions"].as_array_mut().unwrap().push(ready);
        pod
    };
    let recorded = pod().after(&complete(&pod().job())).restarted("c2");
    let unrecorded = pod().status("/conditions", json!([{"type": "ContainersReady", "status": "True"}, opened]));
    for pod in [recorded, unrecorded] {
        let serving = with(&pod, ready("True", "2025-11-13T02:00:05Z"));
        assert_eq!(serving.decide(), Verdict::Leave(Why::Done));
        // Its probe fails for a while, long after the restart.
        let flapping = with(&pod, ready("False", "2025-11-13T02:12:00Z"));
        assert_eq!(flapping.decide(), Verdict::Leave(Why::Done));
        // Out of service since its container ended.
        let coming = with(&pod, ready("False", "2025-11-13T02:00:00Z"));
        assert!(matches!(coming.decide(), Verdict::Shut(_)));
        let ended = coming.status("/containerStatuses/0/state", json!({"terminated": {"exitCode": 1}}));
        assert!(matches!(ended.decide(), Verdict::Shut(_)));
        // So quick that the pod never ceased to be Ready.
        let young = json!({"running": {"startedAt": "2025-11-13T02:12:30Z"}});
        assert!(matches!(serving.status("/containerStatuses/0/state", young).decide(), Verdict::Shut(_)));
    }
}

#[test]
fn a_crash_repeats_a_warm_up_once_and_a_second_one_ends_it() {
    let first = pod().job();
    let crashed = pod().after(&first.attempt.started("x"));
    let second = crashed.job();
    assert_eq!((second.attempt.number, second.attempt.starts), (1, 2));
    let crashed_again = pod().after(&second.attempt.started("x"));
    let Verdict::Conclude(write) = crashed_again.decide() else { panic!() };
    assert_eq!(write.reason, Reason::WarmupFailedOpen);
    assert!(write.message.ends_with("the agent stopped twice during this warm-up"), "{}", write.message);
}

#[test]
fn a_handed_over_warm_up_goes_on_where_it_was() {
    let job = pod().job();
    let next = pod().after(&job.attempt.handed_over(2, 1)).job();
    assert_eq!((next.attempt.sent, next.attempt.succeeded, next.attempt.starts), (2, 1, 1));
    let queued = pod().after(&next.attempt.queued()).job();
    assert_eq!(queued.attempt, next.attempt);
}

#[test]
fn what_is_in_hand_ends_with_its_containers_and_when_somebody_opens_the_gate() {
    let containers = ["containerd://c1".to_owned()];
    let address = "10.1.2.3:8080".parse().unwrap();
    let over = |pod: Pod| pod.see(|seen| over(seen, InHand { containers: &containers, address }));
    assert_eq!(over(pod()), None);
    assert_eq!(over(pod().status("/containerStatuses/0/ready", json!(false))), None);
    assert_eq!(over(pod().restarted("c2")), Some(Why::ContainersChanged));
    assert_eq!(over(pod().status("/podIP", json!("10.1.2.4"))), Some(Why::AddressChanged));
    assert_eq!(over(Pod { deleting: true, ..pod() }), Some(Why::Ending));
    let backstop::Verdict::Open(by_leader) = pod().backstop(30, 0) else { panic!() };
    assert_eq!(over(pod().after(&by_leader)), Some(Why::Done), "it is in service already");
}

#[test]
fn a_failed_attempt_waits_and_then_counts_on() {
    let retried = pod().with(keys::WARMUP_RETRIES, "1");
    let failed = retried.clone().after(&fail(&retried.job()));
    let Verdict::Wait { until } = failed.decide() else { panic!() };
    assert!(until > NOW && until <= NOW + 1.seconds());
    let later = failed.see(|seen| decide(seen, QUEUE, until, 0.0));
    let Verdict::Warm(second) = later else { panic!("{later:?}") };
    assert_eq!(second.attempt.number, 2);
    assert_eq!(fail(&second).reason, Reason::WarmupFailedOpen);
    let set_back = failed.see(|seen| decide(seen, QUEUE, NOW - 1.hour(), 0.0));
    assert!(matches!(set_back, Verdict::Warm(_)), "no pause is that long: {set_back:?}");
}

#[test]
fn a_bad_annotation_opens_the_gate_or_is_said_once() {
    let bad = pod().with(keys::WARMUP_REQUESTS, "0");
    let Verdict::Conclude(write) = bad.decide() else { panic!() };
    assert_eq!(
        write.message,
        "Warmup failed but pod marked ready (fail-open): warmup-requests must be at least 1, got 0"
    );
    assert_eq!(bad.after(&write).decide(), Verdict::Leave(Why::Done));

    let closed = pod().with(keys::WARMUP_REQUESTS, "0").with(keys::WARMUP_FAILURE_POLICY, "closed");
    let Verdict::Conclude(write) = closed.decide() else { panic!() };
    assert_eq!(write.reason, Reason::WarmupFailed);
    let said = closed.after(&write);
    assert_eq!(said.decide(), Verdict::Leave(Why::Said));
    assert_eq!(said.with(keys::WARMUP_REQUESTS, "5").job().attempt.number, 1);
}

#[test]
fn no_usable_address_is_a_failure() {
    for ip in [
        Value::Null,
        json!(""),
        json!("169.254.169.254"),
        json!("0.0.0.0"),
        json!("224.0.0.1"),
        json!("fe80::1"),
        json!("::ffff:169.254.169.254"),
        json!("metadata.internal"),
    ] {
        let Verdict::Conclude(write) = pod().status("/podIP", ip.clone()).decide() else { panic!("{ip}") };
        assert_eq!(write.reason, Reason::WarmupFailedOpen);
        assert!(write.message.ends_with("the pod has no IP that can be used"), "{}", write.message);
    }
}

#[test]
fn the_leader_opens_what_a_gone_agent_left_shut() {
    let backstop::Verdict::Open(write) = pod().backstop(30, 0) else { panic!() };
    assert_eq!(write.reason, Reason::AgentUnavailable);
    assert_eq!(
        write.message,
        "agent agent-x of node node-a has not been heard of since 2025-11-13T02:12:50Z; ready without warm-up"
    );
    // The agent that comes back finds it done.
    assert_eq!(pod().after(&write).decide(), Verdict::Leave(Why::Done));
    assert!(matches!(pod().backstop(29, 0), backstop::Verdict::LookAgain { after } if after == Duration::from_secs(1)));
}

#[test]
fn a_new_leader_hears_agents_out_before_it_calls_them_gone() {
    use backstop::Verdict;
    let after = Duration::from_secs(5);
    assert_eq!(pod().backstop_of(10, 600, 0), Verdict::LookAgain { after });
    assert!(matches!(pod().backstop_of(15, 600, 0), Verdict::Open(_)));
    assert_eq!(pod().backstop_of(29, 29, 0), Verdict::LookAgain { after: Duration::from_secs(1) });
}

#[test]
fn waiting_for_a_place_is_bounded_across_agents() {
    let job = pod().job();
    assert_eq!(job.patience, QUEUE);
    let queued = pod().after(&job.attempt.queued());
    let later = |seconds: i64| queued.see(|seen| decide(seen, QUEUE, NOW + seconds.seconds(), 0.0));
    let Verdict::Warm(job) = later(299) else { panic!() };
    assert_eq!((job.patience, job.attempt.since), (Duration::from_secs(1), NOW));
    let Verdict::Conclude(write) = later(300) else { panic!() };
    assert_eq!(
        write.message,
        "Warmup failed but pod marked ready (fail-open): no place among the warm-ups of this node for 5m0s"
    );
    let Verdict::Warm(job) = later(-10_000) else { panic!("a clock set back") };
    assert_eq!(job.patience, QUEUE);
}

#[test]
fn the_leader_opens_closed_gates_of_a_gone_agent_too_but_not_of_a_live_one() {
    let closed = pod().with(keys::WARMUP_FAILURE_POLICY, "closed");
    let failed = closed.clone().after(&fail(&closed.job()));
    assert!(matches!(failed.backstop(30, 0), backstop::Verdict::Open(_)));
    assert_eq!(failed.backstop(0, 100_000), backstop::Verdict::Leave(backstop::Why::Closed));
    assert!(matches!(closed.backstop(0, 30), backstop::Verdict::Open(_)), "never taken up");
}

#[test]
fn the_leader_gives_a_live_agent_the_time_its_record_explains() {
    let job = pod().job();
    let opens_at = |pod: &Pod| (0..2_000).find(|t| matches!(pod.backstop(0, *t), backstop::Verdict::Open(_)));
    assert_eq!(opens_at(&pod()), Some(30));
    assert_eq!(opens_at(&pod().after(&job.attempt.queued())), Some(360));
    assert_eq!(opens_at(&pod().after(&job.attempt.started("x"))), Some(35 + 300 + 60));
    let retried = pod().with(keys::WARMUP_RETRIES, "1");
    assert_eq!(opens_at(&retried.clone().after(&fail(&retried.job()))), Some(120));
    let backstop::Verdict::Open(write) = pod().backstop(5, 31) else { panic!() };
    assert_eq!(write.reason, Reason::WarmupFailedOpen);
    assert!(write.message.contains("showed no progress for 31s"), "{}", write.message);
}

#[test]
fn the_leader_leaves_what_is_open_unready_or_ending() {
    use backstop::{Verdict, Why};
    let warm = pod().after(&complete(&pod().job()));
    assert_eq!(warm.backstop(1_000, 1_000), Verdict::Leave(Why::Open));
    assert_eq!(pod().status("/phase", json!("Pending")).backstop(1_000, 0), Verdict::Leave(Why::NotReady));
    assert_eq!(Pod { deleting: true, ..pod() }.backstop(1_000, 0), Verdict::Leave(Why::Ending));
}

#[test]
fn a_farewell_opens_every_shut_gate_for_good() {
    let farewell = |pod: &Pod| pod.see(|seen| backstop::farewell(seen, "warm-up is over"));
    let write = farewell(&pod()).unwrap();
    assert_eq!((write.reason.opens(), write.message.as_str()), (true, "warm-up is over; ready without warm-up"));
    // Opened before its containers run, and not shut again by an agent that comes back.
    let early = farewell(&pod().status("/phase", json!("Pending"))).unwrap();
    assert_eq!(pod().after(&early).decide(), Verdict::Leave(Why::Done));
    assert!(farewell(&pod().after(&complete(&pod().job()))).is_none());
}
