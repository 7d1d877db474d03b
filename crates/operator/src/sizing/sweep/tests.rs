use groundcrew_core::sizing::{Amounts, Distribution, PerResource, Share, Template};
use serde_json::json;

use super::super::crd::TemplateStatus;
use super::super::facts::{DaemonSetFacts, TemplateFacts};
use super::*;

const GI: u64 = 1 << 30;
const SETTINGS: Settings = Settings { resize: true, warn_share: 50 };

fn shape(cpu: u64, memory: u64) -> Shape {
    let sizes = json!({"cpu": format!("{cpu}m"), "memory": memory.to_string()});
    let spec = json!({"containers": [{"name": "a", "resources": {"requests": sizes, "limits": sizes}}]});
    Shape::of_spec(&serde_json::from_value(spec).unwrap())
}

/// A pod `ds-node` of the DaemonSet, with the size of ten percent unless said otherwise.
fn pod(set: &str, node: &str, cpu: u64) -> (Key, PodFacts) {
    let facts = PodFacts {
        uid: format!("{set}-{node}"),
        version: "1".to_owned(),
        owner: set.to_owned(),
        owner_uid: format!("uid-{set}"),
        template: None,
        node: Some(node.to_owned()),
        shape: shape(cpu, GI / 10),
        qos: Some(Qos::Guaranteed),
        kubelet: Kubelet::Idle,
        allocated: vec![],
        unobserved: false,
        ending: false,
    };
    (key("ns", &format!("{set}-{node}")), facts)
}

fn set(name: &str, template: &str) -> (Key, DaemonSetFacts) {
    let facts =
        DaemonSetFacts { uid: format!("uid-{name}"), template: Some(template.to_owned()), shape: shape(100, GI / 10) };
    (key("ns", name), facts)
}

fn percent(name: &str, cpu: u8) -> (Key, TemplateFacts) {
    let share = |percent| Share { percent, min: None, max: None };
    let shares = PerResource { cpu: share(cpu), memory: share(10), storage: share(10) };
    let template = Ok(Template { shares, distribution: Distribution::Pod });
    let facts = TemplateFacts { uid: "t".to_owned(), generation: Some(1), template, status: TemplateStatus::default() };
    (key("", name), facts)
}

/// Nodes `a` and `b` of one cpu and 1Gi, DaemonSets `x` and `y` on template `t`.
fn facts(cpu_percent: u8) -> Facts {
    let node = |name| (key("", name), Ok(Amounts { cpu: Some(1000), memory: Some(GI), storage: None }));
    Facts {
        templates: Cache::of("templates", [percent("t", cpu_percent)]),
        daemon_sets: Cache::of("sets", [set("x", "t"), set("y", "t")]),
        nodes: Cache::of("nodes", [node("a"), node("b")]),
        templates_known: tokio::sync::watch::channel(true).1,
    }
}

fn names(plan: &Plan) -> Vec<&str> {
    plan.jobs.iter().map(|job| job.key.name.as_str()).collect()
}

fn plan(cpu_percent: u8, pods: Vec<(Key, PodFacts)>, memory: &mut Memory, budget: usize) -> Plan {
    sweep(&facts(cpu_percent), &Cache::of("pods", pods), memory, &SETTINGS, budget, Instant::now())
}

fn four() -> Vec<(Key, PodFacts)> {
    vec![pod("x", "a", 100), pod("x", "b", 100), pod("y", "a", 100), pod("y", "b", 100)]
}

#[tokio::test]
async fn pods_of_the_right_size_are_only_counted() {
    let plan = plan(10, four(), &mut Memory::default(), 9);
    assert_eq!((names(&plan).len(), plan.held), (0, 0));
    let summary = &plan.templates["t"];
    assert_eq!((summary.daemon_sets, summary.pods, summary.pods_resizing), (2, 4, 0));
}

#[tokio::test]
async fn one_pod_of_a_node_at_a_time_and_no_more_than_the_pace() {
    let mut memory = Memory::default();
    let first = plan(12, four(), &mut memory, 9);
    assert_eq!((names(&first), first.held), (vec!["x-a", "x-b"], 2));
    let slow = plan(12, four(), &mut memory, 1);
    assert_eq!((names(&slow), slow.held), (vec!["x-a"], 3));
}

#[tokio::test]
async fn a_node_whose_kubelet_is_at_work_waits_and_a_deferred_pod_holds_nobody_up() {
    let mut pods = vec![pod("x", "a", 120), pod("y", "a", 100)];
    pods[0].1.kubelet = Kubelet::InProgress;
    let busy = plan(12, pods, &mut Memory::default(), 9);
    assert_eq!((names(&busy).len(), busy.held), (0, 1));
    let mut pods = vec![pod("x", "a", 120), pod("y", "a", 100)];
    pods[0].1.kubelet = Kubelet::Deferred;
    assert_eq!(names(&plan(12, pods, &mut Memory::default(), 9)), ["y-a"]);
}

#[tokio::test]
async fn a_resize_that_goes_on_holds_up_others_but_not_its_own_way_back() {
    let mut pods = vec![pod("x", "a", 300), pod("y", "a", 300)];
    pods[1].1.kubelet = Kubelet::InProgress;
    let back = plan(12, pods, &mut Memory::default(), 9);
    assert_eq!((names(&back), back.held), (vec!["y-a"], 1));
}

#[tokio::test]
async fn a_resize_that_the_kubelet_fails_to_make_holds_nobody_up_and_is_not_being_made() {
    let mut pods = vec![pod("x", "a", 120), pod("y", "a", 100)];
    pods[0].1.kubelet = Kubelet::Failing;
    let plan = plan(12, pods, &mut Memory::default(), 9);
    assert_eq!(names(&plan), ["y-a"]);
    let summary = &plan.templates["t"];
    assert_eq!((summary.pods_resizing, summary.restart_reasons.get("Failing")), (1, Some(&1)));
}

#[tokio::test(start_paused = true)]
async fn a_write_that_failed_leaves_the_pace_to_others_for_a_while() {
    let mut memory = Memory::default();
    let pods = || vec![pod("x", "a", 100), pod("x", "b", 100)];
    assert_eq!(names(&plan(12, pods(), &mut memory, 1)), ["x-a"]);
    let failed = Failed { tries: 1, not_before: Instant::now() + resize::retry_soon(1) };
    memory.failed.insert("x-a".to_owned(), failed);
    let second = plan(12, pods(), &mut memory, 1);
    assert_eq!((names(&second), second.held), (vec!["x-b"], 1), "the pass is soon made again for it");
    tokio::time::advance(resize::retry_soon(1)).await;
    assert_eq!(names(&plan(12, pods(), &mut memory, 1)), ["x-a"]);
    plan(12, vec![], &mut memory, 9);
    assert!(memory.failed.is_empty(), "pods that are gone are forgotten");
}

#[tokio::test]
async fn who_makes_room_goes_first() {
    let pods = vec![pod("x", "a", 100), pod("y", "a", 300)];
    assert_eq!(names(&plan(12, pods, &mut Memory::default(), 9)), ["y-a"]);
}

#[tokio::test(start_paused = true)]
async fn an_own_write_is_waited_for_until_it_is_seen_or_too_old() {
    let mut memory = Memory::default();
    let sent = |version: &str| Sent { at: Instant::now(), version: version.to_owned() };
    memory.sent.insert("x-a".to_owned(), sent("1"));
    assert_eq!(plan(12, vec![pod("x", "a", 100), pod("y", "a", 100)], &mut memory, 9).held, 2, "not yet in the cache");
    let mut unseen = pod("x", "a", 120);
    unseen.1.version = "2".to_owned();
    unseen.1.unobserved = true;
    assert_eq!(plan(12, vec![unseen, pod("y", "a", 100)], &mut memory, 9).held, 1, "not yet seen by the kubelet");
    let mut seen = pod("x", "a", 120);
    seen.1.version = "2".to_owned();
    assert_eq!(names(&plan(12, vec![seen, pod("y", "a", 100)], &mut memory, 9)), ["y-a"]);
    memory.sent.insert("x-a".to_owned(), sent("1"));
    tokio::time::advance(SILENCE).await;
    assert_eq!(names(&plan(12, vec![pod("x", "a", 100)], &mut memory, 9)), ["x-a"]);
}

#[tokio::test(start_paused = true)]
async fn a_refused_size_is_asked_for_again_later_and_another_at_once() {
    let mut memory = Memory::default();
    let wish = plan(12, vec![pod("x", "a", 100)], &mut memory, 9).jobs.remove(0).changes;
    let not_before = Instant::now() + Duration::from_secs(60);
    let refusal = Refusal { changes: wish, reason: Reason::Refused, tries: 1, not_before };
    memory.refused.insert("x-a".to_owned(), refusal);
    let held = plan(12, vec![pod("x", "a", 100)], &mut memory, 9);
    assert!(held.jobs.is_empty());
    assert_eq!(held.templates["t"].restart_reasons.get("Refused"), Some(&1));
    assert_eq!(names(&plan(15, vec![pod("x", "a", 100)], &mut memory, 9)), ["x-a"]);
    tokio::time::advance(Duration::from_secs(60)).await;
    assert_eq!(names(&plan(12, vec![pod("x", "a", 100)], &mut memory, 9)), ["x-a"]);
    plan(12, vec![], &mut memory, 9);
    assert!(memory.refused.is_empty(), "pods that are gone are forgotten");
}

#[tokio::test]
async fn with_resizing_off_pods_are_counted_only() {
    let pods = Cache::of("pods", four());
    let off = Settings { resize: false, warn_share: 50 };
    let plan = sweep(&facts(12), &pods, &mut Memory::default(), &off, 9, Instant::now());
    assert!(plan.jobs.is_empty());
    assert_eq!(plan.templates["t"].restart_reasons.get("ResizeDisabled"), Some(&4));
}

#[tokio::test]
async fn failures_are_the_daemon_sets_and_a_lost_node_is_none() {
    let mut facts = facts(10);
    facts.daemon_sets = Cache::of("sets", [set("x", "t"), set("lost", "missing")]);
    let mut unsized_pod = pod("x", "gone", 100);
    let vanished = Cache::of("pods", [pod("x", "gone", 100)]);
    let quiet = sweep(&facts, &vanished, &mut Memory::default(), &SETTINGS, 9, Instant::now());
    let failing: Vec<_> = quiet.failures.keys().map(|key| key.name.as_str()).collect();
    assert_eq!(failing, ["lost"]);
    unsized_pod.1.qos = Some(Qos::BestEffort);
    let pods = Cache::of("pods", [unsized_pod]);
    let loud = sweep(&facts, &pods, &mut Memory::default(), &SETTINGS, 9, Instant::now());
    assert_eq!(loud.failures.get(&key("ns", "x")), Some(&Why::NodeMissing("gone".to_owned())));
    assert!(!loud.templates["t"].ready.holds);
}

#[tokio::test]
async fn a_crowded_node_is_counted_for_each_of_its_templates() {
    let pods = vec![pod("x", "a", 300), pod("y", "a", 301), pod("x", "b", 300)];
    let plan = plan(30, pods, &mut Memory::default(), 9);
    let crowd = Crowd { nodes: 1, worst: (60, "a".to_owned(), "cpu") };
    assert_eq!(plan.crowded.into_iter().collect::<Vec<_>>(), [("t".to_owned(), crowd)]);
}

#[tokio::test]
async fn a_pod_of_an_earlier_daemon_set_of_that_name_is_not_its_own() {
    let mut foreign = pod("x", "a", 700);
    foreign.1.owner_uid = "another".to_owned();
    let plan = plan(10, vec![foreign], &mut Memory::default(), 9);
    assert_eq!((plan.jobs.len(), plan.templates["t"].pods), (0, 0));
}
