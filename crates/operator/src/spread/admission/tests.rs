use groundcrew_core::pod::PodView;
use rstest::rstest;
use serde_json::{Value, json};

use super::super::objects;
use super::*;
use crate::runtime::cache::Cache;

fn key(namespace: &str, name: &str) -> Key {
    Key { namespace: namespace.into(), name: name.into() }
}

fn object<K: serde::de::DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).unwrap()
}

fn set(name: &str, uid: &str, deployment: Option<&str>) -> (Key, objects::ReplicaSetFacts) {
    let owner =
        |uid| json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "web", "uid": uid, "controller": true});
    let owners: Vec<Value> = deployment.into_iter().map(owner).collect();
    let meta = json!({"name": name, "uid": uid, "ownerReferences": owners});
    let facts = objects::replica_set(object(json!({"metadata": meta, "spec": {"replicas": 3}})));
    (key("ns", name), facts.unwrap())
}

/// The Deployment `web`, its ReplicaSet `web-1`, and a ReplicaSet `web-2` of nobody's.
fn placer() -> Placer {
    let config = groundcrew_core::config::load(json!({}), vec![]).unwrap();
    let mut shared = Arc::into_inner(Shared::new(&config)).unwrap();
    let annotations = json!({"spotalis.io/enabled": "true", "spotalis.io/spot-percentage": "50"});
    let web: objects::Deployment = object(json!({
        "metadata": {"name": "web", "uid": "web", "annotations": annotations},
        "spec": {"replicas": 3, "selector": {"matchLabels": {"app": "web"}}, "template": {}},
    }));
    let web = objects::workload(Kind::Deployment, web.metadata, web.spec, web.status, &config.node_labels).unwrap();
    shared.deployments = Cache::of("deployments", [(key("ns", "web"), web)]);
    shared.replica_sets = Cache::of("sets", [set("web-1", "one", Some("web")), set("web-2", "two", None)]);
    let around = objects::NamespaceFacts { window: Ok(None) };
    shared.namespaces = Cache::of("namespaces", [(key("", "ns"), around)]);
    Placer(Arc::new(shared))
}

#[rstest]
#[case::its_own("web-1", "one", "web", Reviewed::Patched)]
#[case::of_a_set_of_nobodys("web-2", "two", "web", Reviewed::Unchanged)]
#[case::too_new_to_be_known("web-3", "three", "web", Reviewed::Patched)]
#[case::too_new_and_not_selected("web-3", "three", "other", Reviewed::Unchanged)]
#[case::of_another_set_under_the_name("web-1", "later", "other", Reviewed::Unchanged)]
#[case::of_another_name("db-3", "three", "web", Reviewed::Unchanged)]
fn a_pod_is_a_workloads_by_its_owners(
    #[case] set: &str,
    #[case] uid: &str,
    #[case] app: &str,
    #[case] outcome: Reviewed,
) {
    let hash = set.split('-').next_back().unwrap();
    let text = json!({"metadata": {
        "generateName": format!("{set}-"), "labels": {"app": app, "pod-template-hash": hash},
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": set, "uid": uid, "controller": true}],
    }})
    .to_string();
    let pod: PodView<'_> = serde_json::from_str(&text).unwrap();
    let review = PodReview { pod, namespace: "ns", dry_run: false, now: jiff::Timestamp::UNIX_EPOCH };
    assert_eq!(placer().place(&review, &mut Contribution::default()), outcome);
}
