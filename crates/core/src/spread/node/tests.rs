use rstest::rstest;
use serde_json::{Value, json};

use super::*;

fn names() -> NodeLabels {
    crate::config::load(Value::Null, vec![]).unwrap().node_labels
}

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

#[rstest]
#[case::configured(&[("karpenter.sh/capacity-type", "spot")], Class::Spot)]
#[case::configured_on_demand(&[("karpenter.sh/capacity-type", "on-demand")], Class::OnDemand)]
#[case::eks(&[("eks.amazonaws.com/capacityType", "SPOT")], Class::Spot)]
#[case::eks_on_demand(&[("eks.amazonaws.com/capacityType", "ON_DEMAND")], Class::OnDemand)]
#[case::gke(&[("cloud.google.com/gke-spot", "true")], Class::Spot)]
#[case::gke_preemptible(&[("cloud.google.com/gke-preemptible", "true")], Class::Spot)]
#[case::gke_new(&[("cloud.google.com/gke-provisioning", "spot")], Class::Spot)]
#[case::aks(&[("kubernetes.azure.com/scalesetpriority", "spot")], Class::Spot)]
#[case::unknown(&[("disk", "ssd")], Class::OnDemand)]
#[case::configured_is_stronger(
    &[("karpenter.sh/capacity-type", "on-demand"), ("cloud.google.com/gke-spot", "true")], Class::OnDemand)]
fn labels_tell_the_class(#[case] pairs: &[(&str, &str)], #[case] class: Class) {
    assert_eq!(class_of(&labels(pairs), &names()), class);
}

#[test]
fn a_class_known_by_the_labels_of_a_cloud_alone_cannot_be_asked_for() {
    let karpenter = labels(&[("karpenter.sh/capacity-type", "spot")]);
    let (eks, plain) = (labels(&[("eks.amazonaws.com/capacityType", "SPOT")]), labels(&[]));
    let lacks = |class, nodes: &[&Labels]| lacks_label(class, nodes.iter().copied(), &names());
    assert!(lacks(Class::Spot, &[&eks, &plain]) && lacks(Class::OnDemand, &[&eks, &plain]));
    assert!(!lacks(Class::Spot, &[&eks, &karpenter]));
    assert!(!lacks(Class::OnDemand, &[&karpenter]), "an autoscaler may make the first one");
}

fn node(class: &str) -> Node {
    Node {
        name: "n".into(),
        labels: labels(&[("karpenter.sh/capacity-type", class)]),
        ready: true,
        allocatable: Amount::of(&labels(&[("cpu", "4"), ("memory", "8Gi"), ("pods", "10")])),
        ..Node::default()
    }
}

fn needs(template: Value) -> Needs {
    Needs::of(&serde_json::from_value(template).unwrap(), &labels(&[("app", "web")]), &names())
}

fn plain() -> Needs {
    needs(json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "1500m", "memory": "1Gi"}}}]}))
}

fn tainted(node: Node, key: &str) -> Node {
    let taint = Taint { key: key.into(), value: String::new(), effect: "NoSchedule".into() };
    Node { taints: vec![taint], ..node }
}

#[test]
fn only_a_ready_node_of_the_class_with_room_takes_a_pod() {
    let takes = |node: &Node, used| node.takes(&plain(), Class::Spot, &used);
    let used = |cpu, pods| Amount::of(&labels(&[("cpu", cpu), ("pods", pods)]));
    assert!(takes(&node("spot"), Amount::default()));
    assert!(!takes(&node("on-demand"), Amount::default()));
    assert!(!takes(&Node { ready: false, ..node("spot") }, Amount::default()));
    assert!(!takes(&Node { unschedulable: true, ..node("spot") }, Amount::default()));
    assert!(takes(&node("spot"), used("2500m", "9")));
    assert!(!takes(&node("spot"), used("2501m", "1")));
    assert!(!takes(&node("spot"), used("0", "10")));
}

#[test]
fn taints_need_a_toleration_and_those_of_leaving_nodes_cannot_be_tolerated() {
    let tolerant = needs(json!({"containers": [], "tolerations": [{"operator": "Exists"}]}));
    assert!(!tainted(node("spot"), "team").takes(&plain(), Class::Spot, &Amount::default()));
    assert!(tainted(node("spot"), "team").takes(&tolerant, Class::Spot, &Amount::default()));
    for key in LEAVING {
        assert!(!tainted(node("spot"), key).takes(&tolerant, Class::Spot, &Amount::default()), "{key}");
    }
}

#[test]
fn the_template_may_name_the_other_class_and_still_go_to_this_one() {
    let pinned = needs(json!({"containers": [], "nodeSelector": {"karpenter.sh/capacity-type": "on-demand"}}));
    assert!(node("spot").takes(&pinned, Class::Spot, &Amount::default()));
    let elsewhere = needs(json!({"containers": [], "nodeSelector": {"disk": "ssd"}}));
    assert!(!node("spot").takes(&elsewhere, Class::Spot, &Amount::default()));
}

#[test]
fn limits_without_requests_and_overhead_count() {
    let limited = needs(json!({
        "containers": [{"name": "a", "resources": {"limits": {"nvidia.com/gpu": "1", "cpu": "2"}, "requests": {"cpu": "1"}}}],
        "overhead": {"memory": "64Mi"},
        "resources": {"requests": {"memory": "1Gi"}},
    }));
    let counted = [("cpu", "1"), ("memory", "1088Mi"), ("nvidia.com/gpu", "1"), ("pods", "1")];
    assert_eq!(*limited.amount(), Amount::of(&labels(&counted)));
}

#[rstest]
#[case::own("web", "kubernetes.io/hostname", true)]
#[case::of_others("db", "kubernetes.io/hostname", false)]
#[case::by_zone("web", "topology.kubernetes.io/zone", false)]
fn anti_affinity_against_its_own_kind_keeps_pods_on_nodes_of_their_own(
    #[case] app: &str,
    #[case] topology: &str,
    #[case] apart: bool,
) {
    let term = json!({"labelSelector": {"matchLabels": {"app": app}}, "topologyKey": topology});
    let anti = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}});
    assert_eq!(needs(json!({"containers": [], "affinity": anti})).apart(), apart);
}
