//! One way to say what a template, a node and a pod look like.

use serde_json::{Value, json};

use super::*;

mod admission;
mod resize;
mod status;

const GI: u64 = 1 << 30;

/// The contract's template: 10/15/5 % with minima.
fn contract() -> Template {
    let min = PerResource { cpu: Some("100m"), memory: Some("128Mi"), storage: Some("1Gi") };
    let percent = PerResource { cpu: 10, memory: 15, storage: 5 };
    Template::read(&Raw { percent, min, ..Raw::default() }).unwrap()
}

fn percent(cpu: u8, memory: u8, storage: u8) -> Template {
    let share = |percent| Share { percent, min: None, max: None };
    Template {
        shares: PerResource { cpu: share(cpu), memory: share(memory), storage: share(storage) },
        distribution: Distribution::Pod,
    }
}

fn node(cpu: u64, memory: u64, storage: u64) -> Amounts {
    Amounts { cpu: Some(cpu), memory: Some(memory), storage: Some(storage) }
}

/// A container named by its place, with the same requests and limits.
fn container(name: &str, resources: &Value) -> Value {
    json!({"name": name, "resources": {"requests": resources, "limits": resources}})
}

fn sidecar(name: &str, resources: &Value) -> Value {
    let mut container = container(name, resources);
    container["restartPolicy"] = json!("Always");
    container
}

fn pod(containers: &[Value], init: &[Value]) -> Value {
    json!({"metadata": {"name": "p"}, "spec": {"containers": containers, "initContainers": init, "future": {"kept": 1}}})
}

fn shape(pod: &Value) -> Shape {
    let spec = serde_json::from_value(pod["spec"].clone()).unwrap();
    let text = pod.to_string();
    let from_view = Shape::of_view(&serde_json::from_str(&text).unwrap());
    let from_spec = Shape::of_spec(&spec);
    let without_policy = |shape: &Shape| {
        let mut shape = shape.clone();
        shape.containers.iter_mut().for_each(|c| c.restarts = PerResource::default());
        shape
    };
    assert_eq!(without_policy(&from_spec), from_view, "the two readers agree");
    from_spec
}

fn verdict_for(template: &Template, allocatable: &Amounts, pod: &Value) -> Verdict {
    decide(Seen {
        shape: &shape(pod),
        declared: None,
        asked: Asked::Template("t"),
        template: Some(&Ok(*template)),
        node: Some("n"),
        allocatable: Some(&Ok(*allocatable)),
    })
}

/// The pod after admission; asking once more must change nothing.
fn admitted(template: &Template, allocatable: &Amounts, pod: &Value) -> Value {
    let once = patched(template, allocatable, pod).0;
    let (twice, operations) = patched(template, allocatable, &once);
    assert_eq!((&twice, operations), (&once, 0), "asking twice changes nothing");
    once
}

fn patched(template: &Template, allocatable: &Amounts, pod: &Value) -> (Value, usize) {
    let verdict = verdict_for(template, allocatable, pod);
    let text = pod.to_string();
    let mut patch = PodPatch::default();
    verdict.contribute(&mut patch);
    let patch = patch.against(&serde_json::from_str(&text).unwrap());
    crate::patch::check(&text, &patch).unwrap();
    let mut after = pod.clone();
    json_patch::patch(&mut after, &patch).unwrap();
    (after, patch.0.len())
}

fn sizes(cpu: &str, memory: &str, storage: &str) -> Value {
    json!({"cpu": cpu, "memory": memory, "ephemeral-storage": storage})
}

fn resources(pod: &Value, list: &str, index: usize) -> Value {
    pod["spec"][list][index]["resources"].clone()
}

/// Requests of a container that must equal its limits.
fn both(pod: &Value, list: &str, index: usize) -> Value {
    let resources = resources(pod, list, index);
    assert_eq!(resources["requests"], resources["limits"]);
    resources["requests"].clone()
}
