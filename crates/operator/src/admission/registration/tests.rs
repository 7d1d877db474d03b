use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use super::compare::{concede_injected, difference};
use super::*;
use crate::runtime::leadership::Leadership;

fn pods() -> Vec<Rule> {
    vec![Rule {
        groups: vec![""],
        versions: vec!["v1"],
        resources: vec!["pods"],
        operations: vec!["CREATE"],
        scope: "Namespaced",
    }]
}

fn entry(feature: &'static str, condition: &str, namespaces: Namespaces) -> Entry {
    Entry {
        feature,
        kind: Kind::Mutating,
        path: "/mutate-v1-pod",
        rules: pods(),
        condition: Some(condition.to_owned()),
        namespaces,
        objects: None,
        failure_policy: FailurePolicy::Ignore,
    }
}

fn exempt() -> Namespaces {
    Namespaces::Except(vec!["kube-system".to_owned(), "ops".to_owned()])
}

fn service() -> Target {
    Target::Service { name: "hook".to_owned(), namespace: "ops".to_owned(), port: 443 }
}

fn bundle() -> Trust {
    Trust::Bundle(b"PEM".as_slice().into())
}

fn mutating(entries: &[Entry]) -> Value {
    serde_json::to_value(desired(entries, &service(), &bundle()).mutating.unwrap()).unwrap()
}

fn conditions(configuration: &Value) -> Vec<(String, Vec<String>)> {
    let webhooks = configuration["webhooks"].as_array().unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let of = |webhook: &Value| {
        let conditions = webhook["matchConditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().map(|one| format!("{}: {}", text(&one["name"]), text(&one["expression"]))).collect()
    };
    webhooks.iter().map(|webhook| (text(&webhook["name"]), of(webhook))).collect()
}

#[test]
fn an_entry_says_all_it_means() {
    let expected = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {
            "name": "groundcrew",
            "labels": { "app.kubernetes.io/name": "groundcrew", "app.kubernetes.io/managed-by": "groundcrew" },
        },
        "webhooks": [{
            "name": "timestamp.groundcrew.io",
            "admissionReviewVersions": ["v1"],
            "clientConfig": {
                "caBundle": "UEVN",
                "service": { "name": "hook", "namespace": "ops", "path": "/mutate-v1-pod", "port": 443 },
            },
            "failurePolicy": "Ignore",
            "matchConditions": [{ "name": "opted-in", "expression": "has(x)" }],
            "matchPolicy": "Equivalent",
            "namespaceSelector": { "matchExpressions": [
                { "key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system", "ops"] },
            ] },
            "objectSelector": {},
            "reinvocationPolicy": "IfNeeded",
            "rules": [{
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "operations": ["CREATE"],
                "resources": ["pods"],
                "scope": "Namespaced",
            }],
            "sideEffects": "None",
            "timeoutSeconds": 1,
        }],
    });
    assert_eq!(mutating(&[entry("timestamp", "has(x)", exempt())]), expected);
}

#[test]
fn one_object_is_sent_once_the_widest_entry_first() {
    let entries = [
        entry("timestamp", "time", exempt()),
        entry("warmup", "warm", exempt()),
        entry("sizing", "size", Namespaces::All),
    ];
    let expected: Vec<(String, Vec<String>)> = [
        ("sizing.groundcrew.io", vec!["opted-in: size"]),
        ("timestamp.groundcrew.io", vec!["opted-in: time", "not-sizing: !(size)"]),
        ("warmup.groundcrew.io", vec!["opted-in: warm", "not-sizing: !(size)", "not-timestamp: !(time)"]),
    ]
    .map(|(name, conditions)| (name.to_owned(), conditions.into_iter().map(str::to_owned).collect()))
    .into();
    assert_eq!(conditions(&mutating(&entries)), expected);
}

#[test]
fn entries_about_other_objects_do_not_silence_each_other() {
    let node = Entry { path: "/mutate-node", ..entry("node_startup", "node", Namespaces::All) };
    let fewer = Namespaces::Except(vec!["kube-system".to_owned()]);
    let entries = [node, entry("timestamp", "time", exempt()), entry("warmup", "warm", fewer)];
    let got = conditions(&mutating(&entries));
    let own: Vec<_> = got.iter().map(|(name, conditions)| (name.as_str(), conditions.len())).collect();
    // warmup is about more namespaces than timestamp: silenced by it, it would miss one.
    assert_eq!(own, [("node-startup.groundcrew.io", 1), ("timestamp.groundcrew.io", 1), ("warmup.groundcrew.io", 1)]);
}

#[test]
fn an_entry_that_could_never_fire_is_left_out() {
    let all = Entry { condition: None, ..entry("spread", "", exempt()) };
    let got = conditions(&mutating(&[all, entry("timestamp", "time", exempt())]));
    assert_eq!(got, [("spread.groundcrew.io".to_owned(), vec![])]);
}

#[test]
fn a_kind_without_entries_has_no_configuration() {
    let validating = Entry { kind: Kind::Validating, path: "/validate", ..entry("spread", "x", exempt()) };
    let only = desired(std::slice::from_ref(&validating), &service(), &bundle());
    assert!(only.mutating.is_none());
    let configuration = only.validating.unwrap();
    assert_eq!(configuration.webhooks.unwrap()[0].name, "spread.groundcrew.io");
    let none = desired(&[], &service(), &bundle());
    assert!(none.mutating.is_none() && none.validating.is_none());
}

#[test]
fn a_bundle_of_others_is_not_ours() {
    let configuration = desired(&[entry("timestamp", "x", exempt())], &service(), &Trust::External).mutating.unwrap();
    assert_eq!(configuration.webhooks.unwrap()[0].client_config.ca_bundle, None);
}

#[test]
fn a_url_gets_the_path_of_the_entry_and_is_known_by_its_host() {
    let url = BaseUrl { base: "https://Hooks.Example:8443".to_owned(), host: "hooks.example".to_owned() };
    let target = Target::Url(url);
    assert_eq!(target.names(), ["hooks.example"]);
    let config = target.client_config("/mutate", &Trust::External);
    assert_eq!(config.url.unwrap(), "https://Hooks.Example:8443/mutate");
}

#[test]
fn a_service_is_known_by_its_names() {
    assert_eq!(service().names(), ["hook.ops.svc", "hook.ops.svc.cluster.local"]);
}

/// What the API server makes of an applied configuration.
fn live(desired: &Value) -> Value {
    let mut live = desired.clone();
    live.as_object_mut().unwrap().remove("kind");
    live["metadata"]["resourceVersion"] = json!("7");
    live["metadata"]["managedFields"] = json!([{
        "manager": NAME, "operation": "Apply",
        "fieldsV1": {
            "f:metadata": { "f:labels": { "f:app.kubernetes.io/name": {}, "f:app.kubernetes.io/managed-by": {} } },
            "f:webhooks": { "k:{\"name\":\"timestamp.groundcrew.io\"}": {
                ".": {}, "f:name": {}, "f:rules": {}, "f:clientConfig": { "f:caBundle": {}, "f:service": { "f:name": {} } },
                "f:matchConditions": { "k:{\"name\":\"opted-in\"}": { ".": {}, "f:name": {}, "f:expression": {} } },
            } },
        },
    }]);
    live
}

#[test]
fn only_what_is_ours_is_compared() {
    let desired = mutating(&[entry("timestamp", "x", exempt())]);
    let same = |change: &dyn Fn(&mut Value)| {
        let mut live = live(&desired);
        change(&mut live);
        difference(&live, &desired, NAME)
    };
    assert_eq!(same(&|_| {}), None);
    assert_eq!(same(&|live| live["metadata"]["labels"]["theirs"] = json!("x")), None);
    assert_eq!(
        same(&|live| {
            let conditions = live["webhooks"][0]["matchConditions"].as_array_mut().unwrap();
            conditions.insert(0, json!({ "name": "theirs", "expression": "false" }));
        }),
        None
    );
    let path = "webhooks[timestamp.groundcrew.io].clientConfig.caBundle";
    let overwritten = same(&|live| live["webhooks"][0]["clientConfig"]["caBundle"] = json!("eA=="));
    assert_eq!(overwritten.as_deref(), Some(path));
    assert!(same(&|live| live["webhooks"][0]["rules"].as_array_mut().unwrap().clear()).is_some());
    assert!(same(&|live| live["webhooks"].as_array_mut().unwrap().clear()).is_some());
    assert_eq!(same(&|live| live["metadata"]["managedFields"] = json!([])).as_deref(), Some("ownership"));
}

#[test]
fn an_injected_bundle_is_left_alone_where_somebody_asked_for_it() {
    let ours = mutating(&[entry("timestamp", "x", exempt()), entry("warmup", "y", exempt())]);
    let mut theirs = live(&ours);
    theirs["webhooks"][0]["clientConfig"]["caBundle"] = json!("eA==");
    theirs["webhooks"].as_array_mut().unwrap().pop();
    let conceded = |live: &Value| {
        let mut wanted = ours.clone();
        concede_injected(&mut wanted, live);
        [0, 1].map(|at| wanted["webhooks"][at]["clientConfig"]["caBundle"].clone())
    };
    assert_eq!(conceded(&theirs), ["UEVN", "UEVN"], "nobody asked");
    theirs["metadata"]["annotations"] = json!({ "cert-manager.io/inject-ca-from": "ops/hook" });
    assert_eq!(conceded(&theirs), ["eA==", "UEVN"], "an entry that is not there yet has ours");
    theirs["webhooks"][0]["clientConfig"].as_object_mut().unwrap().remove("caBundle");
    assert_eq!(conceded(&theirs), ["UEVN", "UEVN"], "nothing is injected yet");
}

#[test]
fn what_we_own_and_no_longer_want_is_a_difference() {
    let before = mutating(&[entry("timestamp", "x", exempt())]);
    let external = desired(&[entry("timestamp", "x", exempt())], &service(), &Trust::External).mutating.unwrap();
    let external = serde_json::to_value(external).unwrap();
    assert!(difference(&live(&before), &external, NAME).unwrap().ends_with(".clientConfig.caBundle"));
    let unconditional = mutating(&[Entry { condition: None, ..entry("timestamp", "", exempt()) }]);
    assert!(difference(&live(&before), &unconditional, NAME).unwrap().ends_with(".matchConditions"));
    let renamed = mutating(&[entry("warmup", "x", exempt())]);
    assert!(difference(&live(&before), &renamed, NAME).is_some());
}

#[tokio::test]
async fn who_does_not_lead_writes_nothing() {
    let asked: Arc<Mutex<Vec<String>>> = Arc::default();
    let heard = Arc::clone(&asked);
    let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        heard.lock().unwrap().push(request.method().to_string());
        let answer = if request.uri().path().contains("configmaps") {
            json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"mutating-registered-at": "x"}, "metadata": {}})
        } else {
            let api = "admissionregistration.k8s.io/v1";
            json!({"apiVersion": api, "kind": "MutatingWebhookConfiguration", "metadata": {"name": NAME}})
        };
        let answer = http::Response::new(kube::client::Body::from(answer.to_string().into_bytes()));
        async { Ok::<_, std::convert::Infallible>(answer) }
    });
    let client = kube::Client::new(service, "default");
    let removed = remove(client, Leadership::none(), "ops", "record", jiff::Timestamp::now).await;
    assert!(matches!(removed, Err(keep::Error::NotLeader)), "{removed:?}");
    let asked = asked.lock().unwrap();
    assert!(!asked.is_empty() && asked.iter().all(|method| method == "GET"), "{asked:?}");
}
