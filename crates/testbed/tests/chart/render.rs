//! What helm renders: kept as goldens, equal to `groundcrew manifests`, and never more than a feature needs.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context;
use groundcrew::{cleanup, manifests};
use groundcrew_core::config;
use groundcrew_testbed::{Helm, repository};
use rstest::rstest;
use serde_json::{Value, json};

use crate::support::{HOME, by_title, committed, features, permissions, render, set, template, title};

fn everything() -> Value {
    json!({
        "image": {"repository": "registry.example/groundcrew", "digest": format!("sha256:{}", "a".repeat(64))},
        "imagePullSecrets": [{"name": "pull"}],
        "operator": {
            "replicas": 3, "nodeSelector": {"pool": "system"}, "tolerations": [{"key": "system", "operator": "Exists"}],
            "podAnnotations": {"a": "b"}, "podLabels": {"c": "d"}, "env": [{"name": "RUST_BACKTRACE", "value": "1"}],
        },
        "agent": {"nodeSelector": {"kubernetes.io/os": "linux"}, "podLabels": {"c": "d"}},
        "networkPolicy": {
            "restrictEgress": true,
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        },
        "monitoring": {
            "labels": {"release": "prometheus"}, "serviceMonitor": {"enabled": true}, "prometheusRule": {"enabled": true},
            "dashboards": {"enabled": true},
        },
        "config": {"nodeStartup": {"enabled": true, "phases": ["preinit", "initializing"]},
                   "tracing": {"otlpEndpoint": "http://collector:4318"}},
    })
}

#[rstest]
#[case("default", json!({}))]
#[case("everything", everything())]
#[case("nothing", json!({"config": features(false), "networkPolicy": {"enabled": false}, "cleanup": {"enabled": false},
                         "operator": {"podDisruptionBudget": {"enabled": false}}}))]
#[case("cert-manager", json!({"certificates": {"certManager": {"enabled": true}}}))]
#[case("own-certificate", json!({"certificates": {"secretName": "my-certificate"}}))]
#[tokio::test]
async fn the_render_is_the_committed_one(#[case] name: &str, #[case] values: Value) -> anyhow::Result<()> {
    let path = repository().join("crates/testbed/tests/chart/goldens").join(format!("{name}.yaml"));
    committed(&path, &template(&Helm::ensure()?, &values).await?)
}

/// What both forms must agree on; the rest is bookkeeping of whoever applies it.
fn essence(mut object: Value) -> anyhow::Result<Value> {
    if let Some(metadata) = object["metadata"].as_object_mut() {
        if let Some(labels) = metadata.get_mut("labels").and_then(Value::as_object_mut) {
            labels.remove("app.kubernetes.io/managed-by");
        }
        // Hooks of helm and Argo CD.
        metadata.remove("annotations");
    }
    if object.get("rules").is_some() {
        object["rules"] = json!(permissions(&object["rules"]));
    }
    if let Some(text) = object.pointer("/data/config.yaml").and_then(Value::as_str) {
        let mut config = config::load(serde_saphyr::from_str(text)?, vec![])?;
        config.given = Value::Null;
        object["data"] = json!(format!("{config:#?}"));
    }
    if let Some(checksum) = object.pointer_mut("/spec/template/metadata/annotations/checksum~1config") {
        *checksum = json!("any");
    }
    Ok(object)
}

fn essences(objects: Vec<Value>) -> anyhow::Result<BTreeMap<String, Value>> {
    by_title(objects).into_iter().map(|(title, object)| Ok((title, essence(object)?))).collect()
}

/// Only in `groundcrew manifests`: helm makes the namespace, the operator applies its definitions and registers its
/// webhooks. kubectl users see all of it beforehand.
const WITHOUT_HELM: [&str; 4] =
    ["Namespace", "CustomResourceDefinition", "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"];

#[rstest]
#[case::defaults(json!({}))]
#[case::all_features(features(true))]
#[case::no_feature(features(false))]
#[case::no_definitions(json!({"crds": {"manage": false}}))]
#[case::no_resize(json!({"sizing": {"resize": false}}))]
#[case::observing(json!({"spread": {"mode": "observe"}}))]
#[case::no_webhook(json!({"webhook": {"enabled": false}}))]
#[case::no_metrics(json!({"metrics": {"enabled": false}}))]
#[case::lease_elsewhere(json!({"controller": {"leaderElection": {"namespace": "elections"}}}))]
#[case::phases_off(json!({"nodeStartup": {"enabled": false, "phases": ["preinit"], "operatorTolerates": ["a.b/c"]}}))]
#[case::phases(json!({"nodeStartup": {"enabled": true, "operatorTolerates": ["example.com/gpu"], "phases": [
    "preinit", "initializing", {"name": "disk", "taintKey": "a.b/disk", "initLabel": "role=disk"}]}}))]
#[tokio::test]
async fn the_chart_and_the_manifests_are_the_same_objects(#[case] file: Value) -> anyhow::Result<()> {
    same_objects(file.clone(), json!({"config": file})).await
}

/// The chart takes the name of a Secret, the configuration file the directory it is mounted at.
#[tokio::test]
async fn certificates_of_others_are_mounted_alike() -> anyhow::Result<()> {
    let values = json!({"certificates": {"secretName": "groundcrew-webhook-cert"}});
    same_objects(json!({"webhook": {"certDir": "/certs"}}), values).await
}

async fn same_objects(file: Value, mut values: Value) -> anyhow::Result<()> {
    let config = config::load(file, vec![])?;
    let image = "registry.example/groundcrew:9";
    let mut plain = manifests::objects(&config, HOME, image);
    plain.extend(cleanup::manifests::objects(&config, HOME, image));
    plain.retain(|object| !WITHOUT_HELM.iter().any(|kind| object["kind"] == *kind));
    values["image"] = json!({"repository": "registry.example/groundcrew", "tag": "9"});
    let (plain, chart) = (essences(plain)?, essences(render(&Helm::ensure()?, &values).await?)?);
    let titles = |objects: &BTreeMap<String, Value>| objects.keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(titles(&plain), titles(&chart), "manifests left, chart right");
    for (title, object) in plain {
        let (left, right) = (serde_json::to_string_pretty(&object)?, serde_json::to_string_pretty(&chart[&title])?);
        assert!(object == chart[&title], "{title}\n--- manifests\n{left}\n--- chart\n{right}");
    }
    Ok(())
}

fn granted(objects: &[Value]) -> BTreeSet<(String, [String; 4])> {
    let roles = objects.iter().filter(|object| object.get("rules").is_some());
    roles.flat_map(|role| permissions(&role["rules"]).into_iter().map(|one| (title(role), one))).collect()
}

#[rstest]
// What it keeps is for taking back what it did while it was on.
#[case("nodeStartup", &["mutatingadmissionpolicies/create", "nodestartuprules/watch", "nodestartuprules/status"], &[])]
#[case("sizing", &["flexdaemonsettemplates", "pods/resize"], &[])]
#[case("spread", &["pods/eviction", "poddisruptionbudgets", "groundcrew-spread"], &[])]
#[case("timestamp", &[], &[])]
#[case("warmup", &["pods/status", "warmupconfigs"], &["DaemonSet/groundcrew-agent", "ServiceAccount/groundcrew-agent",
    "ValidatingAdmissionPolicy/groundcrew-agent-pods", "NetworkPolicy/groundcrew-agent"])]
#[tokio::test]
async fn a_feature_that_is_off_leaves_neither_objects_nor_rights(
    #[case] feature: &str,
    #[case] rights: &[&str],
    #[case] objects: &[&str],
) -> anyhow::Result<()> {
    let helm = Helm::ensure()?;
    // Clean-up takes back what any feature did while it was on.
    let values = |on: bool| {
        let mut values = json!({"config": features(true), "cleanup": {"enabled": false}});
        set(&mut values, &format!("config.{feature}.enabled"), &json!(on));
        values
    };
    let (on, off) = (render(&helm, &values(true)).await?, render(&helm, &values(false)).await?);
    let has = |all: &[Value], object: &str| all.iter().any(|found| title(found) == object);
    for object in objects {
        assert!(has(&on, object) && !has(&off, object), "{object}");
    }
    let named = |all: &[Value], right: &str| {
        granted(all).iter().any(|(_, [_, resource, verb, name])| {
            [resource, name].contains(&&right.to_owned()) || format!("{resource}/{verb}") == *right
        })
    };
    for right in rights {
        assert!(named(&on, right) && !named(&off, right), "{right}");
    }
    assert!(granted(&off).is_subset(&granted(&on)));
    Ok(())
}

#[rstest]
#[case("http://collector:4318", 4318)]
#[case("http://collector:4318/", 4318)]
#[case("https://collector:4318/v1/traces", 4318)]
#[case("https://collector.example/v2", 443)]
#[case("http://10.0.0.1", 80)]
#[case("http://[fd00::1]/otlp", 80)]
#[case("http://[fd00::1]:4319", 4319)]
#[tokio::test]
async fn traces_may_leave_by_the_port_of_their_collector(#[case] url: &str, #[case] port: u16) -> anyhow::Result<()> {
    let values = json!({"networkPolicy": {"restrictEgress": true}, "config": {"tracing": {"otlpEndpoint": url}}});
    let objects = by_title(render(&Helm::ensure()?, &values).await?);
    let egress = &objects["NetworkPolicy/groundcrew"]["spec"]["egress"];
    assert_eq!(egress[1]["ports"][0]["port"], port, "{egress}");
    Ok(())
}

#[tokio::test]
async fn no_right_is_a_wildcard_or_more_than_it_must_be() -> anyhow::Result<()> {
    let objects = render(&Helm::ensure()?, &json!({"config": features(true)})).await?;
    let granted = granted(&objects);
    assert!(granted.len() > 20, "{granted:?}");
    for (role, [group, resource, verb, name]) in &granted {
        let right = format!("{role}: {verb} {group}/{resource} ({name})");
        assert!(![group, resource, verb].iter().any(|part| part.contains('*')), "{right}");
        assert!(!(resource == "pods" && verb == "delete"), "{right}");
        assert!(!["escalate", "bind", "impersonate"].contains(&verb.as_str()), "{right}");
        assert!(
            !["pods/exec", "pods/attach", "pods/portforward", "serviceaccounts/token"].contains(&resource.as_str())
        );
        let of_cluster = role.starts_with("ClusterRole/");
        assert!(!(resource == "secrets" && of_cluster), "{right}");
        assert!(!(resource == "secrets" && verb != "create" && name == "any name"), "{right}");
    }
    Ok(())
}

/// The restricted profile is enforced by a real API server where the chart is installed; this names what it needs.
#[tokio::test]
async fn every_pod_runs_without_rights_on_its_node() -> anyhow::Result<()> {
    let objects = render(&Helm::ensure()?, &everything()).await?;
    let pods: Vec<&Value> =
        objects.iter().map(|object| &object["spec"]["template"]["spec"]).filter(|spec| spec.is_object()).collect();
    assert_eq!(pods.len(), 3, "operator, agents, clean-up");
    for pod in pods {
        assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
        assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
        for forbidden in ["hostNetwork", "hostPID", "hostIPC", "hostUsers"] {
            assert!(pod.get(forbidden).is_none(), "{forbidden}");
        }
        for container in pod["containers"].as_array().context("no containers")? {
            let security = &container["securityContext"];
            assert_eq!(security["readOnlyRootFilesystem"], true);
            assert_eq!(security["allowPrivilegeEscalation"], false);
            assert_eq!(security["capabilities"]["drop"], json!(["ALL"]));
        }
    }
    Ok(())
}
