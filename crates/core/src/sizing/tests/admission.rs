use proptest::prelude::*;
use rstest::rstest;

use super::*;

#[rstest]
#[case("4", "16Gi", "100Gi", sizes("400m", "2576980377", "5Gi"))]
#[case("3920m", "7484420Ki", "18242267924", sizes("392m", "1149606912", "1Gi"))]
#[case("940m", "512Mi", "20Gi", sizes("100m", "128Mi", "1Gi"))]
fn the_contracts_nodes_give_the_contracts_sizes(
    #[case] cpu: &str,
    #[case] memory: &str,
    #[case] storage: &str,
    #[case] expected: Value,
) {
    let map = [("cpu", cpu), ("memory", memory), ("ephemeral-storage", storage)];
    let map: std::collections::BTreeMap<String, String> = map.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    let after = admitted(&contract(), &Amounts::allocatable(&map).unwrap(), &pod(&[json!({"name": "a"})], &[]));
    assert_eq!(both(&after, "containers", 0), expected);
    assert_eq!(after["spec"]["future"], json!({"kept": 1}));
}

#[test]
fn one_container_without_resources_is_one_operation() {
    let (_, operations) = patched(&contract(), &node(4000, 16 * GI, 100 * GI), &pod(&[json!({"name": "a"})], &[]));
    assert_eq!(operations, 1);
}

#[test]
fn containers_share_in_proportion_to_their_requests_resource_by_resource() {
    let a = container("a", &json!({"cpu": "300m", "memory": "64Mi"}));
    let b = container("b", &json!({"cpu": "100m"}));
    let after = admitted(&percent(10, 10, 10), &node(4001, GI, 100), &pod(&[a, b], &[]));
    // 400m as 3:1; memory and storage equally, because b (and both) declare none.
    assert_eq!(both(&after, "containers", 0), sizes("300m", "53687091", "5"));
    assert_eq!(both(&after, "containers", 1), sizes("100m", "53687091", "5"));
}

#[test]
fn the_remainder_goes_to_the_first_container() {
    let containers = ["a", "b", "c"].map(|name| json!({"name": name}));
    let after = admitted(&percent(10, 10, 10), &node(1010, 1010, 1010), &pod(&containers, &[]));
    let cpu: Vec<_> = (0..3).map(|index| both(&after, "containers", index)["cpu"].clone()).collect();
    assert_eq!(cpu, ["35m", "33m", "33m"]);
}

#[test]
fn limits_alone_count_as_requests() {
    let a = json!({"name": "a", "resources": {"limits": {"cpu": "300m"}}});
    let b = json!({"name": "b", "resources": {"requests": {"cpu": "100m"}}});
    let after = admitted(&percent(10, 10, 10), &node(4000, GI, GI), &pod(&[a, b], &[]));
    assert_eq!(both(&after, "containers", 0)["cpu"], "300m");
    assert_eq!(both(&after, "containers", 1)["cpu"], "100m");
}

#[test]
fn sidecars_count_as_containers_and_plain_init_containers_get_the_total_each() {
    let mains = [container("main", &json!({"cpu": "300m"}))];
    let init = [json!({"name": "setup"}), sidecar("proxy", &json!({"cpu": "100m"})), json!({"name": "migrate"})];
    let after = admitted(&percent(10, 10, 10), &node(4000, 10 * GI, 10 * GI), &pod(&mains, &init));
    assert_eq!(both(&after, "containers", 0), sizes("300m", "512Mi", "512Mi"));
    assert_eq!(both(&after, "initContainers", 1), sizes("100m", "512Mi", "512Mi"));
    for plain in [0, 2] {
        assert_eq!(both(&after, "initContainers", plain), sizes("400m", "1Gi", "1Gi"));
    }
}

#[test]
fn an_init_container_beside_a_sidecar_still_fits_the_node() {
    let init = [sidecar("proxy", &json!({"cpu": "100m"})), json!({"name": "migrate"})];
    let mains = [container("main", &json!({"cpu": "300m"}))];
    let after = admitted(&percent(100, 100, 100), &node(4000, GI, GI), &pod(&mains, &init));
    assert_eq!(both(&after, "initContainers", 0)["cpu"], "1");
    assert_eq!(both(&after, "initContainers", 1)["cpu"], "3");
    assert_eq!(shape(&after).reserves(Resource::Cpu), 4000);
}

#[test]
fn per_container_gives_each_its_own_share_within_the_node() {
    let template = Template { distribution: Distribution::PerContainer, ..percent(10, 60, 10) };
    let containers = [container("a", &json!({"cpu": "1"})), container("b", &json!({"cpu": "2"}))];
    let after = admitted(&template, &node(4000, 10 * GI, 10 * GI), &pod(&containers, &[json!({"name": "setup"})]));
    assert_eq!(both(&after, "containers", 0), sizes("400m", "5Gi", "1Gi"));
    assert_eq!(both(&after, "containers", 1), sizes("400m", "5Gi", "1Gi"));
    assert_eq!(both(&after, "initContainers", 0), sizes("400m", "6Gi", "1Gi"));
}

#[test]
fn other_resources_are_kept() {
    let mut gpu = container("a", &json!({"nvidia.com/gpu": "1", "hugepages-2Mi": "4Mi", "cpu": "8"}));
    gpu["resources"]["claims"] = json!([{"name": "c"}]);
    let after = admitted(&percent(10, 10, 10), &node(4000, 10 * GI, 10 * GI), &pod(&[gpu], &[]));
    let expected = json!({"cpu": "400m", "memory": "1Gi", "ephemeral-storage": "1Gi", "nvidia.com/gpu": "1", "hugepages-2Mi": "4Mi"});
    assert_eq!(both(&after, "containers", 0), expected);
    assert_eq!(resources(&after, "containers", 0)["claims"], json!([{"name": "c"}]));
}

#[test]
fn a_resource_the_node_does_not_report_gets_its_minimum_or_nothing() {
    let no_storage = Amounts { storage: None, ..node(4000, 16 * GI, 0) };
    let bare = pod(&[json!({"name": "a"})], &[]);
    assert_eq!(both(&admitted(&contract(), &no_storage, &bare), "containers", 0)["ephemeral-storage"], "1Gi");
    let after = admitted(&percent(10, 15, 5), &no_storage, &bare);
    assert_eq!(both(&after, "containers", 0), json!({"cpu": "400m", "memory": "2576980377"}));
}

#[test]
fn a_resource_that_comes_to_nothing_keeps_what_the_container_declares() {
    let declared = container("a", &json!({"ephemeral-storage": "1Gi"}));
    let after = admitted(&percent(10, 15, 5), &node(4000, GI, 0), &pod(&[declared], &[]));
    assert_eq!(both(&after, "containers", 0)["ephemeral-storage"], "1Gi");
}

#[test]
fn pod_level_resources_are_left_alone() {
    let mut own = pod(&[json!({"name": "a"})], &[]);
    own["spec"]["resources"] = json!({"requests": {"cpu": "1"}});
    let verdict = verdict_for(&contract(), &node(4000, GI, GI), &own);
    assert_eq!((&verdict, verdict.warning()), (&Verdict::Leave(Why::PodLevel), None));
    own["spec"]["resources"] = json!({"requests": {}});
    assert!(matches!(verdict_for(&contract(), &node(4000, GI, GI), &own), Verdict::Size(_)));
}

#[test]
fn a_node_below_the_minimum_is_taken_whole_and_the_user_hears_of_it() {
    let template = Template {
        shares: PerResource { cpu: Share { percent: 10, min: Some(2000), max: None }, ..percent(1, 10, 10).shares },
        distribution: Distribution::Pod,
    };
    let verdict = verdict_for(&template, &node(940, GI, GI), &pod(&[json!({"name": "a"})], &[]));
    let Verdict::Size(sizing) = &verdict else { panic!("{verdict:?}") };
    assert_eq!((sizing.totals.cpu, sizing.short.as_slice()), (Some(940), &[Resource::Cpu][..]));
    let warning = verdict.warning().unwrap();
    assert_eq!(
        warning,
        "flexdaemonsets.xai/resource-template: node \"n\" has less cpu than template \"t\" asks at least"
    );
}

fn left(
    asked: Asked<'_>,
    template: Option<&Result<Template, Problem>>,
    node: Option<&str>,
    all: Option<&Result<Amounts, Problem>>,
) -> Why {
    let shape = shape(&pod(&[json!({"name": "a"})], &[]));
    match decide(Seen { shape: &shape, declared: None, asked, template, node, allocatable: all }) {
        Verdict::Leave(why) => why,
        Verdict::Size(sizing) => panic!("{sizing:?}"),
    }
}

#[test]
fn what_is_missing_or_broken_is_named_and_the_pod_left() {
    let good = Ok(contract());
    let all = Ok(node(4000, GI, GI));
    let asked = Asked::Template("t");
    assert_eq!(left(Asked::NotDaemonSet, Some(&good), Some("n"), Some(&all)), Why::NotDaemonSet);
    assert_eq!(left(Asked::Nothing, None, Some("n"), Some(&all)), Why::NotAsked);
    assert_eq!(left(Asked::Unknown("d"), None, Some("n"), Some(&all)), Why::DaemonSetUnseen("d".to_owned()));
    assert_eq!(left(asked, None, Some("n"), Some(&all)), Why::TemplateMissing("t".to_owned()));
    assert_eq!(left(asked, Some(&good), None, None), Why::NodeOpen);
    assert_eq!(left(asked, Some(&good), Some("n"), None), Why::NodeMissing("n".to_owned()));
    assert_eq!(left(asked, Some(&good), Some("n"), Some(&Ok(node(0, 0, 0)))), Why::NothingToGive);
    let broken = Template::read(&Raw::default());
    let why = left(asked, Some(&broken), Some("n"), Some(&all));
    assert_eq!(why.to_string(), "FlexDaemonsetTemplate \"t\": cpuPercentage must be between 1 and 100, got 0");
    let map = std::collections::BTreeMap::from([("cpu".to_owned(), "abc".to_owned())]);
    let why = left(asked, Some(&good), Some("n"), Some(&Amounts::allocatable(&map)));
    assert!(why.to_string().starts_with("allocatable of node \"n\": invalid cpu value \"abc\": "), "{why}");
}

#[test]
fn only_broken_wishes_are_worth_a_warning() {
    let warns = |why: Why| Verdict::Leave(why).warning().is_some();
    assert!(!warns(Why::NotDaemonSet) && !warns(Why::NotAsked) && !warns(Why::PodLevel));
    assert!(warns(Why::TemplateMissing("t".to_owned())) && warns(Why::NodeMissing("n".to_owned())));
}

#[test]
fn the_daemon_sets_word_counts_before_its_pods() {
    let owner = Some(Owner { name: "d", uid: "u" });
    assert_eq!(Asked::by(None, Some(Some("a")), Some("b")), Asked::NotDaemonSet);
    assert_eq!(Asked::by(owner, Some(Some("a")), Some("b")), Asked::Template("a"));
    assert_eq!(Asked::by(owner, Some(None), Some("b")), Asked::Template("b"));
    assert_eq!(Asked::by(owner, None, Some("b")), Asked::Template("b"));
    assert_eq!(Asked::by(owner, Some(None), None), Asked::Nothing);
    assert_eq!(Asked::by(owner, None, None), Asked::Unknown("d"));
}

#[rstest]
#[case("apps/v1", "DaemonSet", true, true)]
#[case("apps/v1", "ReplicaSet", true, false)]
#[case("apps.example.com/v1", "DaemonSet", true, false)]
#[case("apps/v1", "DaemonSet", false, false)]
fn only_a_controlling_daemon_set_owns(
    #[case] version: &str,
    #[case] kind: &str,
    #[case] controls: bool,
    #[case] owns: bool,
) {
    let owner = json!({"apiVersion": version, "kind": kind, "name": "d", "uid": "u", "controller": controls});
    let text =
        json!({"metadata": {"ownerReferences": [owner], "annotations": {keys::RESOURCE_TEMPLATE: ""}}}).to_string();
    let pod: PodView<'_> = serde_json::from_str(&text).unwrap();
    assert_eq!(Owner::of(&pod).is_some(), owns);
    assert_eq!(own_template(&pod), None, "an empty name is no name");
}

fn amount() -> impl Strategy<Value = Option<String>> {
    prop::option::weighted(
        0.7,
        prop_oneof![(0..=8000u64).prop_map(|m| format!("{m}m")), (1..=64u64).prop_map(|g| format!("{g}Gi"))],
    )
}

fn any_container() -> impl Strategy<Value = Value> {
    (amount(), amount(), amount(), any::<bool>()).prop_map(|(cpu, memory, storage, gpu)| {
        let mut map = serde_json::Map::new();
        for (name, text) in [("cpu", cpu), ("memory", memory), ("ephemeral-storage", storage)] {
            map.extend(text.map(|text| (name.to_owned(), json!(text))));
        }
        map.extend(gpu.then(|| ("nvidia.com/gpu".to_owned(), json!("1"))));
        if map.is_empty() { json!({"name": "c"}) } else { container("c", &Value::Object(map)) }
    })
}

fn named(mut containers: Vec<Value>, prefix: &str, sidecars: &[bool]) -> Vec<Value> {
    for (index, container) in containers.iter_mut().enumerate() {
        container["name"] = json!(format!("{prefix}{index}"));
        if sidecars.get(index) == Some(&true) {
            container["restartPolicy"] = json!("Always");
        }
    }
    containers
}

proptest! {
    /// min ≤ request = limit ≤ max ≤ allocatable, for the pod as the scheduler counts it.
    #[test]
    fn sizes_stay_within_bounds_and_settle_at_once(
        mains in prop::collection::vec(any_container(), 1..4),
        inits in prop::collection::vec(any_container(), 0..4),
        sidecars in prop::collection::vec(any::<bool>(), 4),
        cpu in 0..=128_000u64, memory in 0..=512 * GI, storage in 0..=4096 * GI,
        percents in (1..=100u8, 1..=100u8, 1..=100u8),
        min in prop::option::of(0..=4000u64), max in prop::option::of(1..=9000u64),
        each in any::<bool>(),
    ) {
        let mut template = percent(percents.0, percents.1, percents.2);
        template.shares.cpu.min = min;
        template.shares.cpu.max = max.map(|max| max.max(min.unwrap_or(1)));
        if each { template.distribution = Distribution::PerContainer; }
        let allocatable = node(cpu, memory, storage);
        let before = pod(&named(mains, "m", &[]), &named(inits, "i", &sidecars));
        let after = admitted(&template, &allocatable, &before);
        let totals = template.totals(&allocatable);
        let shape = shape(&after);
        let running = shape.containers.iter().filter(|c| c.runs()).count() as u64;
        for resource in Resource::ALL {
            let Some(total) = totals.of(resource) else { continue };
            let Some(all) = allocatable.of(resource) else { continue };
            if total < running { continue; }
            prop_assert!(shape.reserves(resource) <= all, "{} of {all}", shape.reserves(resource));
            let sum: u64 = shape.containers.iter().filter(|c| c.runs()).filter_map(|c| c.requests.of(resource)).sum();
            if !each { prop_assert_eq!(sum, total); }
            for container in &shape.containers {
                prop_assert_eq!(container.requests.of(resource), container.limits.of(resource));
            }
        }
    }
}

#[test]
fn defaults_of_a_limit_range_do_not_change_how_containers_share() {
    let template = pod(&[container("a", &json!({"cpu": "300m"})), json!({"name": "b"})], &[]);
    let with_defaults = pod(&[container("a", &json!({"cpu": "300m"})), container("b", &json!({"cpu": "100m"}))], &[]);
    let born = |pod: &Value| {
        let (shape, declared) = (shape(pod), shape(&template));
        let allocatable = Ok(node(1000, GI, GI));
        let verdict = decide(Seen {
            shape: &shape,
            declared: Some(&declared),
            asked: Asked::Template("t"),
            template: Some(&Ok(percent(10, 10, 10))),
            node: Some("n"),
            allocatable: Some(&allocatable),
        });
        let Verdict::Size(sizing) = verdict else { panic!("{verdict:?}") };
        sizing.containers.into_iter().map(|(_, amounts)| amounts.cpu).collect::<Vec<_>>()
    };
    assert_eq!(born(&with_defaults), [Some(50), Some(50)]);
    assert_eq!(born(&template), born(&with_defaults));
}
