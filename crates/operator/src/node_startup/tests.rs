//! The routes of `node_startup` without a socket or a cluster.

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use groundcrew_core::config::load;
use groundcrew_core::node_startup::Seen;
use http_body_util::BodyExt;
use rstest::rstest;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::admission::Denier;
use super::*;
use crate::admission::{Admission, body, router};

fn shared() -> Arc<Shared> {
    Shared::new(&load(json!({"nodeStartup": {"enabled": true}}), vec![]).unwrap())
}

fn routes(shared: &Arc<Shared>) -> Router {
    router(Arc::new(Admission {
        features: Vec::new(),
        node_features: vec![Arc::clone(shared) as _],
        validators: vec![Box::new(Denier(Arc::clone(shared)))],
        exempt_namespaces: vec!["kube-system".to_owned()],
        metrics: crate::admission::Metrics::register(&mut Registry::default()),
        clock: || jiff::Timestamp::constant(1_763_000_000, 0),
        limits: body::Limits::default(),
    }))
}

async fn post(path: &str, body: impl Into<Body>) -> (u16, Value) {
    let request = Request::post(path).header("content-type", "application/json").body(body.into()).unwrap();
    let response = routes(&shared()).oneshot(request).await.unwrap();
    let status = response.status().as_u16();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&bytes).unwrap_or_default())
}

fn review(kind: &str, operation: &str, object: &Value) -> String {
    json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
        "uid": "u", "kind": {"group": "", "version": "v1", "kind": kind}, "operation": operation, "object": object,
    }})
    .to_string()
}

fn patch(answer: &Value) -> Option<Value> {
    let text = answer.pointer("/response/patch")?.as_str()?;
    serde_json::from_slice(&STANDARD.decode(text).unwrap()).unwrap()
}

fn taint() -> Value {
    json!({"key": "startup.k8s.io/initializing", "value": "wait", "effect": "NoSchedule"})
}

#[rstest]
#[case::no_taints("Node", "CREATE", json!({"metadata": {"name": "n"}, "spec": {}}),
    Some(json!([{"op": "add", "path": "/spec/taints", "value": [taint()]}])))]
#[case::some_taints("Node", "CREATE", json!({"metadata": {}, "spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}}),
    Some(json!([{"op": "add", "path": "/spec/taints/-", "value": taint()}])))]
#[case::already_there("Node", "CREATE", json!({"metadata": {}, "spec": {"taints": [taint()]}}), None)]
#[case::update("Node", "UPDATE", json!({"metadata": {}, "spec": {}}), None)]
#[case::other_kind("Pod", "CREATE", json!({"metadata": {}, "spec": {}}), None)]
#[case::system_pool("Node", "CREATE", json!({"metadata": {"labels": {"kubernetes.azure.com/mode": "system"}}, "spec": {}}), None)]
#[case::unreadable("Node", "CREATE", json!({"metadata": 7, "spec": {}}), None)]
#[tokio::test]
async fn the_node_webhook_keeps_the_seeds_contract(
    #[case] kind: &str,
    #[case] operation: &str,
    #[case] object: Value,
    #[case] expected: Option<Value>,
) {
    let (status, answer) = post("/mutate-node", review(kind, operation, &object)).await;
    assert_eq!(status, 200);
    assert_eq!(answer["response"]["allowed"], true);
    assert_eq!(answer["response"]["uid"], "u");
    assert_eq!(patch(&answer), expected);
}

#[tokio::test]
async fn json_that_asks_nothing_is_allowed_and_what_is_no_json_is_refused() {
    let (status, answer) = post("/mutate-node", "{}").await;
    assert_eq!((status, &answer["response"]["allowed"]), (200, &json!(true)));
    for body in ["", "{", "not json", "[1", "\u{0}"] {
        assert_eq!(post("/mutate-node", body).await.0, 400, "{body:?}");
    }
    assert_eq!(post("/mutate-node", vec![0xff, 0xfe]).await.0, 400);
}

#[tokio::test]
async fn an_unreadable_node_is_allowed_with_a_warning() {
    let (_, answer) = post("/mutate-node", review("Node", "CREATE", &json!({"metadata": 7}))).await;
    assert!(answer["response"]["warnings"][0].as_str().unwrap().contains("could not be read"));
}

#[tokio::test]
async fn a_pod_that_names_an_unknown_node_is_allowed() {
    let pod = json!({"metadata": {"name": "p"}, "spec": {"nodeName": "n"}});
    let (status, answer) = post("/validate", review("Pod", "CREATE", &pod)).await;
    assert_eq!((status, &answer["response"]["allowed"]), (200, &json!(true)));
}

#[test]
fn auto_registers_no_webhook_before_it_knows_the_api_server() {
    let config = |engine: &str, deny: bool| {
        load(json!({"nodeStartup": {"enabled": true, "engine": engine, "denyUntolerated": deny}}), vec![]).unwrap()
    };
    let paths = |engine, deny| -> Vec<&str> {
        entries(&config(engine, deny), &Namespaces::All).iter().map(|e| e.path).collect()
    };
    assert_eq!(paths("auto", false), Vec::<&str>::new());
    assert_eq!(paths("webhook", false), ["/mutate-node"]);
    assert_eq!(paths("policy", true), ["/validate"]);
    assert_eq!(node_entry(&config("webhook", false)).failure_policy, FailurePolicy::Fail);
}

#[test]
fn the_operator_tolerates_its_own_taint_to_release_nodes_even_while_the_feature_is_off() {
    for enabled in [true, false] {
        let section = json!({"enabled": enabled, "taintKey": "a.b/c", "operatorTolerates": ["example.com/gpu"]});
        let all = crate::features::tolerations(&load(json!({"nodeStartup": section}), vec![]).unwrap());
        let keys: Vec<_> = all.iter().filter_map(|t| t.key.as_deref()).collect();
        assert_eq!(keys, ["a.b/c", "example.com/gpu"]);
        assert!(all.iter().all(|t| t.operator.as_deref() == Some("Exists") && t.effect.is_none()));
    }
}

#[test]
fn a_feature_that_is_off_may_take_back_and_nothing_else() {
    let mut verbs: Vec<String> = cleanup::permissions().into_iter().flat_map(|rule| rule.verbs).collect();
    verbs.sort();
    verbs.dedup();
    assert_eq!(verbs, ["delete", "list", "patch"]);
    assert!(!load(json!({}), vec![]).unwrap().node_startup.enabled);
}

#[test]
fn pods_move_between_nodes_in_the_index_and_leave_nothing_behind() {
    let by_node = ByNode::default();
    let pod = Key { namespace: "a".to_owned(), name: "p".to_owned() };
    assert_eq!(by_node.put(&pod, Some("n")), ["n"]);
    assert_eq!(by_node.put(&pod, Some("n")), ["n"]);
    assert_eq!(by_node.put(&pod, Some("m")), ["n", "m"]);
    assert_eq!(by_node.put(&pod, None), ["m"]);
    assert_eq!(by_node.put(&pod, None), Vec::<String>::new());
}

#[test]
fn a_pod_is_read_down_to_what_decides() {
    let read = |extra: Value| {
        let mut pod = json!({
            "metadata": {"name": "p", "namespace": "ns", "creationTimestamp": "2026-01-01T00:00:00Z",
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "du", "controller": true}]},
            "spec": {"nodeName": "n", "containers": [{"name": "a"}, {"name": "b"}]},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [{"name": "a", "ready": true}, {"name": "b", "ready": true}]},
        });
        json_patch::merge(&mut pod, &extra);
        gather::pod(serde_json::from_value(pod).unwrap(), true, &Interned::default())
    };
    let daemon = read(json!({})).unwrap().daemon.unwrap();
    assert!(daemon.ready && !daemon.annotated && !daemon.ending);
    assert_eq!((daemon.owner.as_str(), daemon.owner_uid.as_str()), ("d", "du"));
    let unready =
        json!({"status": {"containerStatuses": [{"name": "a", "ready": true}, {"name": "b", "ready": false}]}});
    assert!(!read(unready).unwrap().daemon.unwrap().ready);
    assert!(read(json!({"status": {"phase": "Failed"}})).unwrap().daemon.unwrap().ending);
    assert!(read(json!({"metadata": {"ownerReferences": null}})).unwrap().daemon.is_none());
    assert!(read(json!({"spec": {"nodeName": null}})).is_none());
    assert!(read(json!({"metadata": {"ownerReferences": null, "namespace": "kube-system"}})).is_none());
}

#[test]
fn the_sample_expression_holds_beside_pods_without_its_label() {
    let path =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/samples/node_startup/expression.yaml");
    let sample: NodeStartupRule = serde_saphyr::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let (rule, invalid) = sample.draft().compile();
    assert_eq!(invalid, None);
    let pod = |name: &str, labels: Value| {
        let owner =
            json!([{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": name, "uid": "u", "controller": true}]);
        let pod = json!({
            "metadata": {"name": name, "namespace": "ns", "labels": labels, "ownerReferences": owner,
                "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"nodeName": "n"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        });
        gather::pod(serde_json::from_value(pod).unwrap(), false, &Interned::default()).unwrap().daemon.unwrap()
    };
    let node = |annotations: Value| {
        let metadata =
            json!({"name": "n", "uid": "n", "creationTimestamp": "2026-01-01T00:00:00Z", "annotations": annotations});
        gather::node(serde_json::from_value(json!({"metadata": metadata})).unwrap()).unwrap()
    };
    let storage = json!({"app": "storage"});
    let pods = [pod("kube-proxy", json!({"k8s-app": "x"})), pod("s-1", storage.clone()), pod("s-2", storage)];
    let unmet = |node: &NodeFacts| {
        let seen = Seen { node, daemon_sets: &[], pods: &pods, user_pods: false };
        groundcrew_core::node_startup::evidence::unmet(&Rules::default(), &rule, &seen).len()
    };
    assert_eq!(unmet(&node(json!({"example.com/driver": "4.2"}))), 0);
    assert_eq!(unmet(&node(json!({}))), 1);
}
