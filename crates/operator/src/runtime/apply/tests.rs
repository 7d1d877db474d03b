use std::sync::{Arc, Mutex};

use http::{Response, StatusCode};
use kube::client::Body;
use rstest::rstest;
use tower::service_fn;

use super::*;

type Seen = Arc<Mutex<Vec<(String, Value)>>>;

/// A server that gives one answer to everything and remembers what it was asked.
fn answering(status: u16, body: Value) -> (Writer, Seen) {
    let seen: Seen = Arc::default();
    let asked = Arc::clone(&seen);
    let service = service_fn(move |request: http::Request<Body>| {
        let (asked, body) = (Arc::clone(&asked), body.clone());
        async move {
            let line = format!("{} {}", request.method(), request.uri());
            let bytes = request.into_body().collect_bytes().await.unwrap();
            asked.lock().unwrap().push((line, serde_json::from_slice(&bytes).unwrap_or_default()));
            let response = Response::builder().status(StatusCode::from_u16(status).unwrap());
            Ok::<_, std::convert::Infallible>(response.body(Body::from(body.to_string().into_bytes())).unwrap())
        }
    });
    (Writer::for_any_replica(Client::new(service, "default"), Metrics::default()), seen)
}

fn refusal(code: u16, details: &Value) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": "m", "reason": "r",
        "details": details})
}

fn budget() -> Value {
    json!({"reason": "DisruptionBudget", "message": "m", "field": ""})
}

fn evict() -> Write {
    Write::Evict { version: Some("7".to_owned()), dry_run: false, within: DEADLINE }
}

fn json_write() -> Write {
    Write::Json(serde_json::from_value(json!([{"op": "test", "path": "/a", "value": 1}])).unwrap())
}

async fn outcome(code: u16, details: Value, write: Write) -> Result<Outcome, WriteError> {
    let (writer, _) = answering(code, refusal(code, &details));
    writer.write(Feature::Timestamp, &pod("ns", "a", "u-1"), &write).await
}

#[rstest]
#[case::missing(404, json!({}), evict(), Outcome::Gone)]
#[case::changed(409, json!({}), evict(), Outcome::Conflict)]
#[case::failed_test(422, json!({}), json_write(), Outcome::Conflict)]
#[case::other_object_patched(422, json!({"causes": [{"field": "metadata.uid", "message": "m", "reason": "r"}]}), json_write(), Outcome::Gone)]
#[case::budget(429, json!({"causes": [budget()], "retryAfterSeconds": 10}), evict(), Outcome::Blocked { retry_after: Some(Duration::from_secs(10)) })]
#[case::budget_without_time(429, json!({"causes": [budget()]}), evict(), Outcome::Blocked { retry_after: None })]
#[tokio::test]
async fn refusals_are_outcomes(
    #[case] code: u16,
    #[case] details: Value,
    #[case] write: Write,
    #[case] expected: Outcome,
) {
    assert_eq!(outcome(code, details, write).await.unwrap(), expected);
}

#[rstest]
#[case::no_right(403, json!({}), "refused", false)]
#[case::invalid(422, json!({"causes": [{"field": "spec.x", "message": "m", "reason": "FieldValueInvalid"}]}), "refused", false)]
#[case::overload(429, json!({}), "failed", true)]
#[case::broken(500, json!({}), "failed", true)]
#[case::gave_up(504, json!({}), "timeout", true)]
#[tokio::test]
async fn errors_say_whether_to_try_again(
    #[case] code: u16,
    #[case] details: Value,
    #[case] category: &str,
    #[case] again: bool,
) {
    let error = outcome(code, details, json_write()).await.unwrap_err();
    assert_eq!((error.category(), error.is_retryable()), (category, again));
}

#[tokio::test]
async fn an_eviction_spells_its_preconditions_as_the_server_reads_them() {
    let (writer, seen) = answering(201, json!({"kind": "Status", "status": "Success"}));
    let write = Write::Evict { version: Some("7".to_owned()), dry_run: true, within: DEADLINE };
    writer.write(Feature::Timestamp, &pod("ns", "a", "u-1"), &write).await.unwrap();
    let (line, body) = seen.lock().unwrap().remove(0);
    assert!(line.starts_with("POST /api/v1/namespaces/ns/pods/a/eviction?") && line.contains("dryRun=All"), "{line}");
    let options = json!({"preconditions": {"uid": "u-1", "resourceVersion": "7"}, "dryRun": ["All"]});
    assert_eq!(body["deleteOptions"], options);
}

#[tokio::test]
async fn a_busy_server_is_no_budget() {
    let error = outcome(429, json!({"retryAfterSeconds": 1}), evict()).await.unwrap_err();
    assert!(error.is_retryable());
}

#[tokio::test(start_paused = true)]
async fn the_server_is_told_the_deadline() {
    let (writer, seen) = answering(200, json!({}));
    for write in [evict(), json_write(), Write::Delete { version: None }] {
        writer.write(Feature::Timestamp, &pod("ns", "a", "u-1"), &write).await.unwrap();
        let (line, _) = seen.lock().unwrap().remove(0);
        assert!(line.contains("timeout=5000ms"), "{line}");
    }
}

#[tokio::test]
async fn a_merge_patch_is_bound_to_uid_and_version() {
    let (writer, seen) = answering(200, json!({"metadata": {"resourceVersion": "8"}}));
    let write = Write::Merge { version: "7".to_owned(), patch: json!({"metadata": {"annotations": {"k": "v"}}}) };
    let outcome = writer.write(Feature::Timestamp, &pod("ns", "a", "u-1"), &write).await.unwrap();
    assert_eq!(outcome, Outcome::Done(Some("8".to_owned())));
    let body = seen.lock().unwrap().remove(0).1;
    assert_eq!(body, json!({"metadata": {"annotations": {"k": "v"}, "uid": "u-1", "resourceVersion": "7"}}));
}

#[tokio::test]
async fn a_replica_that_does_not_lead_sends_nothing() {
    let (mut writer, seen) = answering(200, json!({}));
    writer.leadership = Leadership::none();
    let outcome = writer.write(Feature::Timestamp, &pod("ns", "a", "u-1"), &evict()).await.unwrap();
    assert_eq!(outcome, Outcome::NotLeader);
    assert!(seen.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_write_without_an_answer_ends_at_the_deadline() {
    let service = service_fn(async |_: http::Request<Body>| {
        std::future::pending::<Result<Response<Body>, std::convert::Infallible>>().await
    });
    let writer = Writer::for_any_replica(Client::new(service, "default"), Metrics::default());
    let began = tokio::time::Instant::now();
    let error = writer.write(Feature::Timestamp, &pod("ns", "a", "u"), &evict()).await.unwrap_err();
    assert!(matches!(error, WriteError::Timeout));
    assert_eq!(began.elapsed(), DEADLINE);
}

#[tokio::test(start_paused = true)]
async fn a_conflict_reads_again_and_gives_up_after_five_retries() {
    let (mut writes, mut reads) = (0, 0);
    let write = |_: u32| {
        writes += 1;
        async { Ok::<_, ()>(Some(Outcome::Conflict)) }
    };
    let read = || {
        reads += 1;
        async { Ok(Some(0)) }
    };
    assert_eq!(settle(0, write, read).await, Ok(Some(Outcome::Conflict)));
    assert_eq!((writes, reads), (6, 5));
}

#[tokio::test(start_paused = true)]
async fn what_is_gone_when_read_again_is_settled() {
    let settled = settle(0, async |_: u32| Ok::<_, ()>(Some(Outcome::Conflict)), async || Ok(None));
    assert_eq!(settled.await, Ok(Some(Outcome::Gone)));
}

#[tokio::test]
async fn a_write_is_seen_through_though_nobody_waits_for_it_any_more() {
    let (answer, answered) = tokio::sync::watch::channel(false);
    let service = service_fn(move |_: http::Request<Body>| {
        let mut answered = answered.clone();
        async move {
            let _ = answered.wait_for(|answered| *answered).await;
            Ok::<_, std::convert::Infallible>(Response::new(Body::from(b"{}".to_vec())))
        }
    });
    let writer = Writer::for_any_replica(Client::new(service, "default"), Metrics::default());
    let (target, write) = (pod("ns", "a", "u-1"), Write::Status(json!({})));
    let given_up = tokio::time::timeout(Duration::from_millis(10), writer.write(Feature::Timestamp, &target, &write));
    assert!(given_up.await.is_err());
    assert_eq!(writer.leadership.permits(), 1, "it is still under way");
    answer.send_replace(true);
    writer.leadership.quiet(tokio::time::Instant::now() + DEADLINE).await;
    assert_eq!((writer.leadership.permits(), writer.leadership.unanswered()), (0, None));
}
