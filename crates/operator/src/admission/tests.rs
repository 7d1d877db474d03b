use axum::body::Body;
use axum::http::Request;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use groundcrew_core::patch::add;
use http_body_util::BodyExt;
use prometheus_client::registry::Registry;
use rstest::rstest;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::*;
use crate::timestamp::Stamper;

const NOW: Timestamp = Timestamp::constant(1_763_000_000, 0);

/// Patches a path that is not there.
struct Wrong;
impl PodFeature for Wrong {
    fn feature(&self) -> Feature {
        Feature::Timestamp
    }
    fn review(&self, _: &PodReview<'_>, out: &mut Contribution) {
        out.patch.push(add("/spec/nowhere/x".try_into().unwrap(), json!(1)));
    }
}

struct Panics;
impl PodFeature for Panics {
    fn feature(&self) -> Feature {
        Feature::Timestamp
    }
    fn review(&self, _: &PodReview<'_>, out: &mut Contribution) {
        out.patch.annotate("half", "done");
        panic!("on purpose");
    }
}

struct Verbose;
impl PodFeature for Verbose {
    fn feature(&self) -> Feature {
        Feature::Timestamp
    }
    fn review(&self, _: &PodReview<'_>, out: &mut Contribution) {
        out.warnings = vec!["short".to_owned(), "long ".repeat(1000)];
    }
}

struct Bench {
    registry: Registry,
    router: Router,
}

impl Bench {
    fn with(features: Vec<Box<dyn PodFeature>>) -> Self {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry);
        let admission = Admission {
            features,
            node_features: Vec::new(),
            validators: Vec::new(),
            exempt_namespaces: vec!["kube-system".to_owned()],
            metrics,
            clock: || NOW,
            limits: body::Limits::default(),
        };
        Self { registry, router: router(Arc::new(admission)) }
    }

    fn stamping() -> Self {
        Self::with(vec![Box::new(Stamper)])
    }

    async fn send(&self, request: Request<Body>) -> (StatusCode, String) {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    async fn review(&self, body: impl Into<Body>) -> (StatusCode, String) {
        self.send(post_json("/mutate-v1-pod", body)).await
    }

    /// The response part of the answer, with the patch decoded.
    async fn admit(&self, review: Value) -> (Value, Value) {
        let (status, body) = self.review(review.to_string()).await;
        assert_eq!(status, StatusCode::OK, "{body}");
        let answer: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(answer["apiVersion"], "admission.k8s.io/v1");
        assert_eq!(answer["kind"], "AdmissionReview");
        let response = answer["response"].clone();
        let patch = match response["patch"].as_str() {
            Some(text) => serde_json::from_slice(&STANDARD.decode(text).unwrap()).unwrap(),
            None => Value::Null,
        };
        (response, patch)
    }

    fn metrics(&self) -> String {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).unwrap();
        text
    }
}

fn post_json(path: &str, body: impl Into<Body>) -> Request<Body> {
    Request::post(path).header("content-type", "application/json").body(body.into()).unwrap()
}

fn review_of(pod: Value) -> Value {
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "0-1-2", "kind": {"group": "", "version": "v1", "kind": "Pod"}, "namespace": "web",
            "operation": "CREATE", "dryRun": false, "object": pod, "oldObject": null,
        }
    })
}

fn asking_pod() -> Value {
    json!({"metadata": {"name": "a", "annotations": {"addtime": ""}}, "spec": {"newer": {"than": "us"}}})
}

#[tokio::test]
async fn a_pod_that_asks_is_stamped_and_the_uid_echoed() {
    let (response, patch) = Bench::stamping().admit(review_of(asking_pod())).await;
    assert_eq!(response["uid"], "0-1-2");
    assert_eq!(response["allowed"], true);
    assert_eq!(response["patchType"], "JSONPatch");
    assert_eq!(
        patch,
        json!([{"op": "add", "path": "/metadata/annotations/timestamp", "value": "2025-11-13T02:13:20Z"}])
    );
}

#[tokio::test]
async fn a_warning_longer_than_the_api_server_passes_on_is_cut() {
    let (response, _) = Bench::with(vec![Box::new(Verbose)]).admit(review_of(asking_pod())).await;
    let lengths: Vec<usize> =
        response["warnings"].as_array().unwrap().iter().map(|w| w.as_str().unwrap().len()).collect();
    assert_eq!(lengths, [5, 256]);
}

#[tokio::test]
async fn the_alias_path_answers_the_same() {
    let bench = Bench::stamping();
    let body = review_of(asking_pod()).to_string();
    let aliased = bench.send(post_json("/mutate", body.clone())).await;
    assert_eq!(aliased, bench.review(body).await);
}

#[rstest]
#[case::update("/request/operation", json!("UPDATE"))]
#[case::delete("/request/operation", json!("DELETE"))]
#[case::connect("/request/operation", json!("CONNECT"))]
#[case::no_object("/request/object", Value::Null)]
#[case::other_kind("/request/kind/kind", json!("Deployment"))]
#[case::a_pod_of_another_group("/request/kind/group", json!("metrics.k8s.io"))]
#[case::exempt_namespace("/request/namespace", json!("kube-system"))]
#[tokio::test]
async fn other_requests_are_allowed_unchanged(#[case] pointer: &str, #[case] value: Value) {
    let mut review = review_of(asking_pod());
    *review.pointer_mut(pointer).unwrap() = value;
    let (response, patch) = Bench::stamping().admit(review).await;
    assert_eq!(response, json!({"uid": "0-1-2", "allowed": true}));
    assert_eq!(patch, Value::Null);
}

#[tokio::test]
async fn a_subresource_is_not_a_created_pod() {
    let mut review = review_of(asking_pod());
    review["request"]["subResource"] = json!("eviction");
    assert_eq!(Bench::stamping().admit(review).await.1, Value::Null);
}

#[tokio::test]
async fn a_second_pass_over_the_patched_pod_changes_nothing() {
    let bench = Bench::stamping();
    let mut pod = asking_pod();
    let (_, patch) = bench.admit(review_of(pod.clone())).await;
    json_patch::patch(&mut pod, &serde_json::from_value::<json_patch::Patch>(patch).unwrap()).unwrap();
    assert_eq!(pod["spec"]["newer"]["than"], "us");
    assert_eq!(bench.admit(review_of(pod)).await.1, Value::Null);
}

#[tokio::test]
async fn a_bad_patch_leads_to_allowed_unpatched_counted() {
    let bench = Bench::with(vec![Box::new(Stamper), Box::new(Wrong)]);
    let (response, patch) = bench.admit(review_of(asking_pod())).await;
    assert_eq!(response["allowed"], true);
    assert_eq!(patch, Value::Null);
    assert!(bench.metrics().contains(r#"groundcrew_admission_reviews_total{outcome="unsafe_patch"} 1"#));
}

#[tokio::test]
async fn a_panicking_feature_loses_only_its_own_part() {
    let bench = Bench::with(vec![Box::new(Panics), Box::new(Stamper)]);
    let (response, patch) = bench.admit(review_of(asking_pod())).await;
    assert_eq!(response["allowed"], true);
    assert_eq!(patch.as_array().map(Vec::len), Some(1));
    assert_eq!(patch[0]["path"], "/metadata/annotations/timestamp");
    assert!(bench.metrics().contains(r#"groundcrew_admission_panics_total{feature="timestamp"} 1"#));
}

#[tokio::test]
async fn an_unreadable_pod_is_allowed_with_a_warning() {
    let (response, _) = Bench::stamping().admit(review_of(json!({"metadata": {"annotations": [1]}}))).await;
    assert_eq!(response["allowed"], true);
    assert!(response["warnings"][0].as_str().unwrap().contains("left unchanged"));
}

#[rstest]
#[case::not_json("{")]
#[case::not_an_object("[]")]
#[case::empty("")]
#[case::no_request(r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}"#)]
#[case::no_uid(r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{}}"#)]
#[case::old_version(r#"{"apiVersion":"admission.k8s.io/v1beta1","kind":"AdmissionReview","request":{"uid":"1"}}"#)]
#[case::duplicate_keys(
    r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"1","uid":"2"}}"#
)]
#[tokio::test]
async fn a_malformed_review_is_refused_with_a_reason(#[case] body: &'static str) {
    let (status, reason) = Bench::stamping().review(body).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(!reason.is_empty());
}

#[tokio::test]
async fn nesting_beyond_reason_is_allowed_unchanged_not_followed() {
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    for hidden in [json!("DEEP"), json!({"metadata": {"annotations": {"addtime": ""}}, "spec": "DEEP"})] {
        let body = review_of(hidden).to_string().replace("\"DEEP\"", &deep);
        let (status, answer) = Bench::stamping().review(body).await;
        assert_eq!(status, StatusCode::OK);
        assert!(answer.contains("\"allowed\":true") && !answer.contains("\"patch\""), "{answer}");
    }
}

#[tokio::test]
async fn invalid_utf8_is_refused() {
    assert_eq!(Bench::stamping().review(vec![0xff, 0xfe]).await.0, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn wrong_method_path_and_type_have_their_own_answers() {
    let bench = Bench::stamping();
    let get = Request::get("/mutate-v1-pod").body(Body::empty()).unwrap();
    assert_eq!(bench.send(get).await.0, StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(bench.send(post_json("/elsewhere", "{}")).await.0, StatusCode::NOT_FOUND);
    let text = Request::post("/mutate-v1-pod").header("content-type", "text/plain").body(Body::from("{}")).unwrap();
    assert_eq!(bench.send(text).await.0, StatusCode::UNSUPPORTED_MEDIA_TYPE);
}

#[tokio::test]
async fn a_large_legal_review_works_and_a_larger_one_is_refused() {
    let bench = Bench::stamping();
    let mut pod = asking_pod();
    pod["metadata"]["annotations"]["big"] = json!("x".repeat(3 << 20));
    assert!(bench.admit(review_of(pod.clone())).await.1.is_array());
    pod["metadata"]["annotations"]["big"] = json!("x".repeat(8 << 20));
    assert_eq!(bench.review(review_of(pod).to_string()).await.0, StatusCode::PAYLOAD_TOO_LARGE);
}

#[tokio::test]
async fn an_announced_gigabyte_is_refused_before_it_is_read() {
    let never = Body::from_stream(futures::stream::pending::<Result<bytes::Bytes, std::io::Error>>());
    let mut request = post_json("/mutate-v1-pod", never);
    request.headers_mut().insert("content-length", "1073741824".parse().unwrap());
    assert_eq!(Bench::stamping().send(request).await.0, StatusCode::PAYLOAD_TOO_LARGE);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_never_ends_is_given_up() {
    let never = Body::from_stream(futures::stream::pending::<Result<bytes::Bytes, std::io::Error>>());
    let (status, _) = Bench::stamping().send(post_json("/mutate-v1-pod", never)).await;
    assert_eq!(status, StatusCode::REQUEST_TIMEOUT);
}
