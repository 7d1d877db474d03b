//! Trap 1 on a real API server: a patch that does not apply blocks the pod whatever the failure policy says, so ours is
//! applied here before it is sent.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::routing::post;
use groundcrew::admission::{self, Admission, Contribution, PodFeature, PodReview, server, tls};
use groundcrew_core::feature::Feature;
use groundcrew_core::patch::add;
use groundcrew_testbed::objects::{PodExt, pod};
use groundcrew_testbed::{Cluster, Layer};
use jiff::Timestamp;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams, PostParams};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

const SOON: Duration = Duration::from_secs(30);

/// A feature with a bug.
struct Wrong;

impl PodFeature for Wrong {
    fn feature(&self) -> Feature {
        Feature::Timestamp
    }
    fn review(&self, _: &PodReview<'_>, out: &mut Contribution) {
        if let Ok(path) = "/spec/nowhere/x".try_into() {
            out.patch.push(add(path, json!(1)));
        }
    }
}

/// The same patch from somebody who does not check it.
async fn unchecked(body: String) -> axum::Json<Value> {
    let review: Value = serde_json::from_str(&body).unwrap_or_default();
    // [{"op":"add","path":"/spec/nowhere/x","value":1}]
    let patch = "W3sib3AiOiJhZGQiLCJwYXRoIjoiL3NwZWMvbm93aGVyZS94IiwidmFsdWUiOjF9XQ==";
    axum::Json(json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "response": {
            "uid": review.pointer("/request/uid"), "allowed": true, "patchType": "JSONPatch", "patch": patch,
        },
    }))
}

/// Serves both under one certificate; returns the address and the CA.
async fn serve(registry: &mut Registry, stop: CancellationToken) -> anyhow::Result<(String, String)> {
    let certificate = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()])?;
    let pem = certificate.cert.pem();
    let pair = tls::Pair::from_pem(pem.as_bytes(), certificate.signing_key.serialize_pem().as_bytes())?;
    let serving = tls::ServingCert::register(registry);
    serving.swap(pair);
    let admission = Admission {
        features: vec![Box::new(Wrong)],
        node_features: vec![],
        validators: vec![],
        exempt_namespaces: vec![],
        metrics: admission::Metrics::register(registry),
        clock: Timestamp::now,
        limits: admission::body::Limits::default(),
    };
    let router = admission::router(Arc::new(admission)).route("/unchecked", post(unchecked));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = format!("https://{}", listener.local_addr()?);
    let metrics = server::Metrics::register(registry);
    tokio::spawn(server::serve(listener, serving, router, server::Limits::default(), stop, metrics));
    Ok((address, pem))
}

async fn register(cluster: &Cluster, url: &str, ca: &str) -> anyhow::Result<()> {
    use k8s_openapi::ByteString;
    let api: Api<MutatingWebhookConfiguration> = Api::all(cluster.client());
    let configuration = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "trap"},
        "webhooks": [{
            "name": "trap.groundcrew.io", "admissionReviewVersions": ["v1"], "sideEffects": "None",
            "failurePolicy": "Ignore", "timeoutSeconds": 1,
            "clientConfig": {"url": url, "caBundle": ByteString(ca.as_bytes().to_vec())},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}],
        }],
    });
    api.patch("trap", &PatchParams::apply("test").force(), &Patch::Apply(configuration)).await?;
    Ok(())
}

/// Creates by dry run until the answer is as expected: no watch shows when an API server uses a new configuration.
async fn until(pods: &Api<Pod>, refused: bool, more: impl Fn() -> bool) -> anyhow::Result<()> {
    let (began, dry) = (Instant::now(), PostParams { dry_run: true, ..PostParams::default() });
    loop {
        let answer = pods.create(&dry, &pod("probe").annotated("addtime", "")).await;
        if answer.is_err() == refused && more() {
            return Ok(());
        }
        anyhow::ensure!(began.elapsed() < SOON, "expected refused = {refused}, got {answer:?}");
        sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_patch_that_does_not_apply_would_block_the_pod_and_is_therefore_never_sent() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let namespace = cluster.namespace("trap").await?;
    let pods: Api<Pod> = namespace.api();
    let (stop, mut registry) = (CancellationToken::new(), Registry::default());
    let (address, ca) = serve(&mut registry, stop.clone()).await?;

    register(&cluster, &format!("{address}/unchecked"), &ca).await?;
    until(&pods, true, || true).await.context("the API server takes a patch that does not apply: the trap is gone")?;

    register(&cluster, &format!("{address}/mutate-v1-pod"), &ca).await?;
    let dropped = || {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).is_ok()
            && text.contains("groundcrew_admission_reviews_total{outcome=\"unsafe_patch\"}")
    };
    until(&pods, false, dropped).await?;
    stop.cancel();
    Ok(())
}
