use super::super::resize::{Kubelet, Leave, Reason, Verdict};
use super::super::status::{Condition, Tally, crowded, load};
use super::*;

fn tally(verdicts: &[Verdict]) -> Tally {
    let mut tally = Tally::default();
    tally.daemon_set("kube-system", "agent");
    tally.daemon_set("kube-system", "agent");
    verdicts.iter().for_each(|verdict| tally.pod(verdict));
    tally
}

#[test]
fn pods_are_counted_by_what_they_wait_for() {
    let summary = tally(&[
        Verdict::Leave(Leave::Right),
        Verdict::Leave(Leave::Ending),
        Verdict::Resize(vec![], vec![Reason::Storage]),
        Verdict::Wait(Kubelet::InProgress, vec![]),
        Verdict::Wait(Kubelet::Deferred, vec![]),
        Verdict::TakeBack(vec![], vec![Reason::Infeasible]),
        Verdict::Restart(vec![Reason::Qos, Reason::Storage]),
    ])
    .summary(&Ok(contract()));
    assert_eq!((summary.daemon_sets, summary.pods), (1, 6));
    assert_eq!((summary.pods_resizing, summary.pods_needing_restart), (4, 3));
    let reasons: Vec<_> = summary.restart_reasons.into_iter().collect();
    assert_eq!(reasons, [("EphemeralStorage", 2), ("Infeasible", 1), ("QoSClass", 1)]);
    assert!(summary.ready.holds && summary.resize_pending.holds);
    assert_eq!(
        summary.resize_pending.message,
        "2 pods being resized; 1 pod deferred by the kubelet until the node has room; \
         1 pod refused by the kubelet, tried again later; \
         3 pods will have the new size after the next restart (EphemeralStorage 2, Infeasible 1, QoSClass 1)"
    );
}

#[test]
fn conditions_say_what_holds_and_why() {
    let short = |condition: &Condition| (condition.holds, condition.reason);
    let idle = Tally::default().summary(&Ok(contract()));
    assert_eq!((short(&idle.ready), short(&idle.resize_pending)), ((true, "Unused"), (false, "UpToDate")));
    let used = tally(&[Verdict::Leave(Leave::Right)]).summary(&Ok(contract()));
    assert_eq!((short(&used.ready), short(&used.resize_pending)), ((true, "InUse"), (false, "UpToDate")));
    let late = tally(&[Verdict::Restart(vec![Reason::Qos])]).summary(&Ok(contract()));
    assert_eq!((short(&late.ready), short(&late.resize_pending)), ((true, "InUse"), (true, "RestartNeeded")));
    let moving = tally(&[Verdict::Resize(vec![], vec![])]).summary(&Ok(contract()));
    assert_eq!(short(&moving.resize_pending), (true, "Resizing"));
    let failing = tally(&[Verdict::Leave(Leave::Unsized(Why::NodeMissing("n".to_owned())))]).summary(&Ok(contract()));
    assert_eq!(short(&failing.ready), (false, "PodsUnsized"));
    let whole = tally(&[Verdict::Leave(Leave::Unsized(Why::PodLevel))]).summary(&Ok(contract()));
    assert_eq!(short(&whole.ready), (true, "InUse"), "left alone on purpose");
    let broken = Tally::default().summary(&Template::read(&Raw::default()));
    assert_eq!(short(&broken.ready), (false, "Invalid"));
    assert!(broken.ready.message.contains("cpuPercentage"));
}

#[test]
fn a_crowded_node_is_noticed_by_its_fullest_resource() {
    let sized = |cpu: &str, memory: &str| shape(&pod(&[container("a", &json!({"cpu": cpu, "memory": memory}))], &[]));
    let pods = [sized("1", "4Gi"), sized("500m", "6Gi")];
    let load = load(&node(4000, 16 * GI, 0), &pods.each_ref());
    assert_eq!(load, Amounts { cpu: Some(37), memory: Some(62), storage: None });
    assert_eq!(crowded(&load, 50), Some((Resource::Memory, 62)));
    assert_eq!(crowded(&load, 62), None);
}

#[test]
fn the_class_is_the_one_the_api_server_computes() {
    let of = |containers: &[Value], init: &[Value]| shape(&pod(containers, init)).qos();
    let full = json!({"cpu": "1", "memory": "1Gi"});
    assert_eq!(of(&[json!({"name": "a"})], &[]), Qos::BestEffort);
    assert_eq!(of(&[container("a", &json!({"cpu": "0", "nvidia.com/gpu": "1"}))], &[]), Qos::BestEffort);
    assert_eq!(of(&[container("a", &full)], &[]), Qos::Guaranteed);
    assert_eq!(of(&[container("a", &full)], &[json!({"name": "i"})]), Qos::Burstable);
    assert_eq!(of(&[container("a", &json!({"cpu": "1"}))], &[]), Qos::Burstable);
    let uneven = json!({"name": "a", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "1Gi"}}});
    assert_eq!(of(&[uneven], &[]), Qos::Burstable);
}

#[test]
fn the_scheduler_reserves_the_hungriest_moment() {
    let cpu = |amount: &str| json!({"cpu": amount});
    let mains = [container("a", &cpu("300m")), container("b", &cpu("200m"))];
    let init = [container("i", &cpu("550m")), sidecar("s", &cpu("100m")), container("j", &cpu("450m"))];
    assert_eq!(shape(&pod(&mains, &init)).reserves(Resource::Cpu), 600);
    let init = [sidecar("s", &cpu("100m")), container("j", &cpu("550m"))];
    assert_eq!(shape(&pod(&mains, &init)).reserves(Resource::Cpu), 650);
}
