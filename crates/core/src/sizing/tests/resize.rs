use std::time::Duration;

use super::super::resize::{
    Change, Kubelet, Leave, Reason, Seen, Verdict, decide, now, retry_after, retry_soon, shrinks, spec,
};
use super::*;

/// A pod as admission left it, and what a later look at it sees.
struct Running {
    born: Value,
    pod: Value,
    allocatable: Amounts,
    qos: Option<Qos>,
    kubelet: Kubelet,
    allocated: Vec<Amounts>,
    ending: bool,
}

fn running(template: &Template, allocatable: Amounts, born: Value) -> Running {
    let pod = admitted(template, &allocatable, &born);
    Running { born, pod, allocatable, qos: None, kubelet: Kubelet::Idle, allocated: vec![], ending: false }
}

impl Running {
    fn verdict(&self, template: &Template) -> Verdict {
        decide(Seen {
            shape: &shape(&self.pod),
            declared: Some(&shape(&self.born)),
            asked: Asked::Template("t"),
            template: Some(&Ok(*template)),
            node: Some("n"),
            allocatable: Some(&Ok(self.allocatable)),
            qos: self.qos,
            kubelet: self.kubelet,
            allocated: &self.allocated,
            ending: self.ending,
        })
    }
}

fn one() -> Value {
    pod(&[json!({"name": "a"})], &[])
}

fn big() -> Amounts {
    node(4000, 16 * GI, 100 * GI)
}

fn cpu_and_memory(cpu: u64, memory: u64) -> Amounts {
    Amounts { cpu: Some(cpu), memory: Some(memory), storage: None }
}

#[test]
fn a_pod_of_the_right_size_is_left_alone() {
    assert_eq!(running(&contract(), big(), one()).verdict(&contract()), Verdict::Leave(Leave::Right));
}

#[test]
fn a_changed_template_resizes_cpu_and_memory_and_leaves_storage_for_later() {
    let verdict = running(&percent(10, 15, 5), big(), one()).verdict(&percent(12, 15, 5));
    let to = Amounts { cpu: Some(480), ..Amounts::default() };
    let change = Change { container: "a".into(), place: Place::Container(0), to };
    assert_eq!(verdict, Verdict::Resize(vec![change], vec![]));
    let verdict = running(&percent(10, 10, 5), big(), one()).verdict(&percent(10, 20, 6));
    let Verdict::Resize(changes, later) = verdict else { panic!("{verdict:?}") };
    assert_eq!((changes[0].to.memory, changes[0].to.storage), (Some(3_435_973_836), None));
    assert_eq!(later, [Reason::Storage]);
}

#[test]
fn only_storage_changed_is_only_counted() {
    let verdict = running(&percent(10, 10, 5), big(), one()).verdict(&percent(10, 10, 6));
    assert_eq!(verdict, Verdict::Restart(vec![Reason::Storage]));
}

#[test]
fn a_changed_node_is_followed() {
    let mut seen = running(&contract(), big(), one());
    seen.allocatable = node(8000, 32 * GI, 100 * GI);
    let Verdict::Resize(changes, _) = seen.verdict(&contract()) else { panic!() };
    assert_eq!(changes[0].to, cpu_and_memory(800, 5_153_960_755));
}

#[test]
fn shares_follow_the_daemon_sets_proportions_not_the_last_sizes() {
    let born = pod(&[json!({"name": "a"}), json!({"name": "b"}), json!({"name": "c"})], &[]);
    let seen = running(&percent(10, 10, 10), node(1010, 1010, 1010), born.clone());
    let Verdict::Resize(changes, _) = seen.verdict(&percent(100, 10, 10)) else { panic!() };
    let cpu: Vec<_> = changes.iter().map(|change| change.to.cpu).collect();
    assert_eq!(cpu, [Some(338), Some(336), Some(336)], "as admission would give them");
    let mut injected = seen;
    injected.pod["spec"]["containers"][2]["name"] = json!("injected");
    let Verdict::Resize(changes, _) = injected.verdict(&percent(100, 10, 10)) else { panic!() };
    assert_eq!(changes.iter().filter_map(|change| change.to.cpu).sum::<u64>(), 1010);
}

#[test]
fn a_pod_that_was_never_sized_would_change_its_class_and_waits() {
    let mut unsized_pod = running(&contract(), big(), one());
    unsized_pod.pod = one();
    assert_eq!(unsized_pod.verdict(&contract()), Verdict::Restart(vec![Reason::Qos, Reason::Storage]));
    unsized_pod.pod = pod(&[container("a", &json!({"cpu": "1"}))], &[]);
    let Verdict::Restart(later) = unsized_pod.verdict(&contract()) else { panic!() };
    assert!(later.contains(&Reason::Qos));
}

#[test]
fn a_pod_missed_by_admission_is_mended_inside_its_class() {
    let guaranteed = pod(&[container("a", &json!({"cpu": "1", "memory": "1Gi"}))], &[]);
    let mut missed = running(&contract(), big(), guaranteed.clone());
    missed.pod = guaranteed;
    let Verdict::Resize(changes, later) = missed.verdict(&contract()) else { panic!() };
    assert_eq!(changes[0].to, cpu_and_memory(400, 2_576_980_377));
    assert_eq!(later, [Reason::Storage]);
}

#[test]
fn the_class_a_pod_was_born_with_counts() {
    let mut seen = running(&percent(10, 10, 10), big(), one());
    seen.qos = Some(Qos::Burstable);
    assert_eq!(seen.verdict(&percent(12, 10, 10)), Verdict::Restart(vec![Reason::Qos]));
}

#[test]
fn sidecars_are_resized_and_init_containers_wait() {
    let born = pod(&[json!({"name": "a"})], &[json!({"name": "setup"}), sidecar("proxy", &json!({}))]);
    let Verdict::Resize(changes, later) = running(&percent(10, 10, 5), big(), born).verdict(&percent(20, 10, 5)) else {
        panic!()
    };
    let places: Vec<_> = changes.iter().map(|change| change.place).collect();
    assert_eq!(places, [Place::Container(0), Place::Init(1)]);
    assert_eq!(later, [Reason::InitContainer]);
}

#[test]
fn a_container_that_would_be_restarted_waits() {
    let mut born = one();
    born["spec"]["containers"][0]["resizePolicy"] = json!([
        {"resourceName": "cpu", "restartPolicy": "NotRequired"},
        {"resourceName": "memory", "restartPolicy": "RestartContainer"},
    ]);
    let seen = running(&percent(10, 10, 5), big(), born);
    assert_eq!(seen.verdict(&percent(10, 20, 5)), Verdict::Restart(vec![Reason::ResizePolicy]));
    let Verdict::Resize(changes, later) = seen.verdict(&percent(20, 20, 5)) else { panic!() };
    assert_eq!((changes[0].to.cpu, changes[0].to.memory), (Some(800), None));
    assert_eq!(later, [Reason::ResizePolicy]);
}

#[test]
fn a_resize_the_kubelet_works_on_is_waited_for() {
    let mut seen = running(&percent(10, 10, 5), big(), one());
    for state in [Kubelet::InProgress, Kubelet::Deferred] {
        seen.kubelet = state;
        assert_eq!(seen.verdict(&percent(10, 10, 5)), Verdict::Wait(state, vec![]));
        assert!(matches!(seen.verdict(&percent(9, 10, 5)), Verdict::Resize(..)), "a new wish replaces the old");
    }
}

#[test]
fn an_infeasible_resize_is_taken_back_to_what_runs() {
    let mut seen = running(&percent(20, 10, 5), big(), one());
    seen.kubelet = Kubelet::Infeasible;
    assert_eq!(
        seen.verdict(&percent(20, 10, 5)),
        Verdict::Restart(vec![Reason::Infeasible]),
        "nothing known to go back to"
    );
    seen.allocated = vec![cpu_and_memory(400, 1_717_986_918)];
    let Verdict::TakeBack(changes, later) = seen.verdict(&percent(20, 10, 5)) else { panic!() };
    assert_eq!((changes[0].to, later), (Amounts { cpu: Some(400), ..Amounts::default() }, vec![Reason::Infeasible]));
    assert!(shrinks(&shape(&seen.pod), &changes));
    let wish = now(&shape(&seen.pod), &changes);
    assert_eq!(wish[0].to, Amounts { cpu: Some(800), ..Amounts::default() }, "what a later try will ask for again");
    assert!(!shrinks(&shape(&one()), &wish));
}

#[test]
fn ending_and_unsized_pods_are_left_alone() {
    let mut seen = running(&percent(10, 10, 5), big(), one());
    seen.ending = true;
    assert_eq!(seen.verdict(&percent(20, 10, 5)), Verdict::Leave(Leave::Ending));
    let verdict = decide(Seen {
        shape: &shape(&one()),
        declared: None,
        asked: Asked::Template("gone"),
        template: None,
        node: Some("n"),
        allocatable: Some(&Ok(big())),
        qos: None,
        kubelet: Kubelet::Idle,
        allocated: &[],
        ending: false,
    });
    assert_eq!(verdict, Verdict::Leave(Leave::Unsized(Why::TemplateMissing("gone".to_owned()))));
}

#[test]
fn the_patch_names_containers_and_nothing_else() {
    let changes = [
        Change { container: "a".into(), place: Place::Container(0), to: cpu_and_memory(480, GI) },
        Change {
            container: "proxy".into(),
            place: Place::Init(1),
            to: Amounts { cpu: Some(20), ..Amounts::default() },
        },
    ];
    let both = |sizes: Value| json!({"requests": sizes, "limits": sizes});
    assert_eq!(
        spec(&changes),
        json!({
            "containers": [{"name": "a", "resources": both(json!({"cpu": "480m", "memory": "1Gi"}))}],
            "initContainers": [{"name": "proxy", "resources": both(json!({"cpu": "20m"}))}],
        })
    );
}

#[test]
fn a_resize_that_must_not_be_made_waits_for_the_next_start() {
    let verdict = running(&percent(10, 10, 5), big(), one()).verdict(&percent(20, 10, 6));
    let held = verdict.without_resize(Reason::Disabled);
    assert_eq!(held, Verdict::Restart(vec![Reason::Storage, Reason::Disabled]));
    assert_eq!(Verdict::Leave(Leave::Right).without_resize(Reason::Refused), Verdict::Leave(Leave::Right));
}

#[test]
fn retries_after_infeasible_slow_down_to_one_an_hour() {
    let minutes = [1, 2, 3, 4, 5, 6, 7, 50].map(|tries| retry_after(tries).as_secs() / 60);
    assert_eq!(minutes, [1, 2, 4, 8, 16, 32, 60, 60]);
    assert_eq!(retry_after(0), Duration::from_secs(60));
}

#[test]
fn what_the_node_does_not_report_is_left_as_it_is() {
    let mut pod = running(&contract(), big(), one());
    pod.allocatable = Amounts { memory: None, ..big() };
    assert_eq!(pod.verdict(&contract()), Verdict::Leave(Leave::Right), "not down to the minimum");
    pod.allocatable = Amounts::default();
    assert_eq!(pod.verdict(&contract()), Verdict::Leave(Leave::Right));
}

#[test]
fn a_resize_that_the_kubelet_cannot_make_is_not_waited_for_and_can_be_taken_back() {
    let mut pod = running(&contract(), big(), one());
    pod.kubelet = Kubelet::Failing;
    assert_eq!(pod.verdict(&contract()), Verdict::Restart(vec![Reason::Failing]));
    assert!(matches!(pod.verdict(&percent(20, 15, 5)), Verdict::Resize(..)));
}

#[test]
fn waits_after_failures_grow_from_seconds_to_a_minute() {
    let waits: Vec<u64> = [1, 2, 3, 9, u32::MAX].map(|tries| retry_soon(tries).as_secs()).into();
    assert_eq!(waits, [2, 4, 8, 60, 60]);
}
