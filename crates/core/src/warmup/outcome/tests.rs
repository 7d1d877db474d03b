use rstest::rstest;

use super::*;

const NOW: Timestamp = Timestamp::constant(1_763_000_000, 0);
const OPEN: OnFailure = OnFailure { policy: FailurePolicy::Open, retries: 0 };
const CLOSED: OnFailure = OnFailure { policy: FailurePolicy::Closed, retries: 0 };

fn attempt(number: u32) -> Attempt {
    Attempt { containers: vec!["containerd://a".to_owned()], number, starts: 1, sent: 0, succeeded: 0, since: NOW }
}

fn ran(sent: u32, succeeded: u32) -> Tally {
    let failure = (succeeded < sent).then(|| format!("connection refused ({})", sent - succeeded));
    let (p50, p99) = (Duration::from_nanos(1_234_567), Duration::from_micros(56_789));
    Tally { planned: sent, sent, succeeded, p50, p99, failure, ..Tally::default() }
}

#[test]
fn one_success_completes_it() {
    let write = attempt(1).ended(&Outcome::Ran(ran(3, 2)), OPEN, NOW, 0.0);
    assert_eq!((write.reason, write.state.phase), (Reason::WarmupComplete, Phase::Done));
    assert_eq!(write.message, "warmup completed: 2/3 requests succeeded (66.7%), P50=1.234ms, P99=56.7ms");
}

#[test]
fn no_success_opens_the_gate_with_the_cause() {
    let write = attempt(1).ended(&Outcome::Ran(ran(3, 0)), OPEN, NOW, 0.0);
    assert_eq!((write.reason, write.state.phase), (Reason::WarmupFailedOpen, Phase::Done));
    assert_eq!(
        write.message,
        "Warmup failed but pod marked ready (fail-open): 0/3 requests succeeded: connection refused (3)"
    );
}

#[test]
fn what_could_not_run_opens_the_gate_with_the_cause() {
    let write = attempt(1).ended(&Outcome::Unable("the pod has no IP".to_owned()), OPEN, NOW, 0.0);
    assert_eq!(write.message, "Warmup failed but pod marked ready (fail-open): the pod has no IP");
}

#[test]
fn retries_come_before_failing_open() {
    let once = OnFailure { retries: 1, ..OPEN };
    let first = attempt(1).ended(&Outcome::Ran(ran(3, 0)), once, NOW, 1.0);
    assert_eq!((first.reason, first.state.phase), (Reason::WarmupFailed, Phase::Failed));
    assert_eq!(
        first.message,
        "0/3 requests succeeded: connection refused (3); attempt 2 follows at 2025-11-13T02:13:21Z"
    );
    assert_eq!(first.state.next, Some(Timestamp::constant(1_763_000_001, 0)));
    assert_eq!(attempt(2).ended(&Outcome::Ran(ran(3, 0)), once, NOW, 1.0).reason, Reason::WarmupFailedOpen);
}

#[test]
fn a_closed_gate_stays_shut_and_says_when_next() {
    for number in [1, 5, 200] {
        let write = attempt(number).ended(&Outcome::Ran(ran(3, 0)), CLOSED, NOW, 0.0);
        assert_eq!(write.reason, Reason::WarmupFailed);
        assert!(write.message.contains(&format!("; attempt {} follows at 2025-", number + 1)), "{}", write.message);
    }
    let write = attempt(1).impossible("warmup-requests must be at least 1, got 0", FailurePolicy::Closed);
    assert_eq!((write.reason, write.state.next), (Reason::WarmupFailed, None));
    assert!(write.message.starts_with("warmup-requests must be at least 1, got 0; the next attempt follows when"));
}

#[test]
fn converging_tells_cold_warm_and_spent() {
    let curve = |flattened| converge::Summary {
        flattened,
        cold_p95: Duration::from_millis(180),
        warm_p95: Duration::from_micros(12_340),
    };
    let message = |flattened| {
        let tally = Tally { curve: Some(curve(flattened)), ..ran(240, 240) };
        attempt(1).ended(&Outcome::Ran(tally), OPEN, NOW, 0.0).message
    };
    assert!(
        message(true).ends_with(", converged: p95 180ms cold, 12.3ms warm, 240 requests spent"),
        "{}",
        message(true)
    );
    assert!(message(false).contains("not yet flat: p95"), "{}", message(false));
}

#[test]
fn a_cap_is_mentioned() {
    let tally = Tally { planned: 100, cut: Some(Cut::Cap(Duration::from_secs(35))), ..ran(40, 40) };
    let message = attempt(1).ended(&Outcome::Ran(tally), OPEN, NOW, 0.0).message;
    assert!(message.ends_with(", stopped by the cap of 35s with 40 of 100 sent"), "{message}");
    let tally = Tally { planned: 100, cut: Some(Cut::NoPlace(Duration::from_secs(300))), ..ran(40, 0) };
    let message = attempt(1).ended(&Outcome::Ran(tally), OPEN, NOW, 0.0).message;
    assert!(message.ends_with(", stopped: no place among the warm-ups of this node for 5m0s"), "{message}");
}

#[test]
fn a_step_that_was_ended_is_mentioned() {
    let cut = Some(Cut::Step("login".to_owned(), Duration::from_secs(30)));
    let tally = Tally { planned: 100, cut, ..ran(40, 40) };
    let message = attempt(1).ended(&Outcome::Ran(tally), OPEN, NOW, 0.0).message;
    assert!(message.ends_with(", step \"login\" ended by its timeout of 30s with 40 of 100 sent"), "{message}");
}

#[test]
fn what_was_handed_over_counts() {
    let write = attempt(1).handed_over(4, 3);
    assert_eq!((write.reason, write.state.phase), (Reason::WarmupRunning, Phase::HandedOver));
    assert_eq!((write.state.sent, write.state.succeeded), (4, 3));
    let rest = Attempt { sent: 4, succeeded: 3, ..attempt(1) };
    let write = rest.ended(&Outcome::Ran(ran(6, 0)), OPEN, NOW, 0.0);
    assert!(write.message.starts_with("warmup completed: 3/10 requests succeeded (30.0%)"), "{}", write.message);
}

#[rstest]
#[case(1, 0.0, 500)]
#[case(1, 1.0, 1_000)]
#[case(2, 1.0, 2_000)]
#[case(5, 1.0, 16_000)]
#[case(7, 1.0, 60_000)]
#[case(4_000_000_000, 1.0, 60_000)]
#[case(3, 7.0, 4_000)]
fn backoff_doubles_from_a_second_to_a_minute(#[case] failures: u32, #[case] jitter: f64, #[case] millis: u64) {
    assert_eq!(backoff(failures, jitter), Duration::from_millis(millis));
}
