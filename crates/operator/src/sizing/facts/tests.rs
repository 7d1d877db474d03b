use groundcrew_core::sizing::Resource;
use serde_json::{Value, json};

use super::*;

fn read(pod: Value) -> Option<PodFacts> {
    pod_facts(serde_json::from_value(pod).unwrap())
}

fn owned() -> Value {
    json!({
        "metadata": {
            "name": "p", "uid": "u", "resourceVersion": "7", "generation": 2,
            "annotations": {"flexdaemonsets.xai/resource-template": "t"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "du", "controller": true}],
        },
        "spec": {
            "nodeName": "n",
            "containers": [{"name": "a", "image": "i", "resources": {"limits": {"cpu": "1"}}, "unknown": {"x": 1}}],
            "initContainers": [{"name": "s", "restartPolicy": "Always"}],
        },
        "status": {
            "phase": "Running", "qosClass": "Burstable", "observedGeneration": 1,
            "containerStatuses": [{"name": "a", "allocatedResources": {"cpu": "500m"}}],
        },
    })
}

#[test]
fn what_matters_of_a_pod_is_kept() {
    let facts = read(owned()).unwrap();
    assert_eq!((facts.owner.as_str(), facts.owner_uid.as_str(), facts.node.as_deref()), ("d", "du", Some("n")));
    assert_eq!((facts.template.as_deref(), facts.version.as_str(), facts.qos), (Some("t"), "7", Some(Qos::Burstable)));
    assert_eq!(facts.shape.containers.len(), 2);
    assert_eq!(facts.shape.containers[0].declared(Resource::Cpu), Some(1000));
    assert_eq!(facts.allocated[0].of(Resource::Cpu), Some(500));
    assert!(facts.unobserved && !facts.ending);
}

#[test]
fn pods_of_others_are_not_kept() {
    let mut other = owned();
    other["metadata"]["ownerReferences"][0]["kind"] = json!("ReplicaSet");
    assert!(read(other).is_none());
    let mut bare = owned();
    bare["metadata"]["ownerReferences"] = json!([]);
    assert!(read(bare).is_none());
}

#[test]
fn a_pod_not_bound_yet_is_known_by_its_pin() {
    let mut pending = owned();
    pending["spec"]["nodeName"] = Value::Null;
    let pin = json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["pinned"]}]});
    let required = json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [pin]}});
    pending["spec"]["affinity"] = json!({"nodeAffinity": required});
    assert_eq!(read(pending).unwrap().node.as_deref(), Some("pinned"));
}

#[test]
fn finished_and_leaving_pods_are_ending() {
    let mut finished = owned();
    finished["status"]["phase"] = json!("Failed");
    assert!(read(finished).unwrap().ending);
    let mut leaving = owned();
    leaving["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    assert!(read(leaving).unwrap().ending);
}

#[test]
fn the_kubelets_word_is_read_from_the_conditions() {
    let of = |kind: &str, status: &str, reason: &str| {
        let mut pod = owned();
        pod["status"]["conditions"] = json!([{"type": kind, "status": status, "reason": reason}]);
        read(pod).unwrap().kubelet
    };
    assert_eq!(of("PodResizePending", "True", "Deferred"), Kubelet::Deferred);
    assert_eq!(of("PodResizePending", "True", "Infeasible"), Kubelet::Infeasible);
    assert_eq!(of("PodResizePending", "False", "Infeasible"), Kubelet::Idle);
    assert_eq!(of("PodResizeInProgress", "True", ""), Kubelet::InProgress);
    assert_eq!(of("PodResizeInProgress", "True", "Error"), Kubelet::Failing);
    assert_eq!(of("Ready", "True", ""), Kubelet::Idle);
}

#[test]
fn a_daemon_set_names_its_template_and_declares_its_containers() {
    let set = json!({
        "metadata": {"name": "d", "uid": "u", "annotations": {"flexdaemonsets.xai/resource-template": "t"}},
        "spec": {"template": {"spec": {"containers": [{"name": "a"}]}}},
    });
    let facts = daemon_set(serde_json::from_value(set).unwrap());
    assert_eq!((facts.template.as_deref(), facts.shape.containers.len()), (Some("t"), 1));
    let silent = json!({"metadata": {"annotations": {"flexdaemonsets.xai/resource-template": ""}}});
    assert_eq!(daemon_set(serde_json::from_value(silent).unwrap()).template, None);
}
