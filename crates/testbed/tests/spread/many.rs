//! Many pods and many workloads at once.

use futures::{StreamExt, TryStreamExt, stream};
use groundcrew_testbed::{Proxy, free_ports};

use super::*;

/// Requests of a test at once.
const HANDS: usize = 16;

async fn roomy_cluster() -> anyhow::Result<Cluster> {
    let cluster = Cluster::start(Layer::Controllers).await?;
    for (prefix, class) in [("spot", "spot"), ("od", "on-demand")] {
        for i in 0..4 {
            let node = KwokNode::new(&format!("{prefix}-{i}"))
                .label("karpenter.sh/capacity-type", class)
                .allocatable("pods", "1000");
            cluster.add_kwok_node(node).await?;
        }
    }
    nodes_are_ready(&cluster, 8).await?;
    Ok(cluster)
}

/// The value of a metric that has no more labels than given.
async fn counted(groundcrew: &Groundcrew, metric: &str) -> anyhow::Result<usize> {
    let text = groundcrew.metrics().await?;
    let value = text.lines().find_map(|line| line.strip_prefix(metric)?.trim().parse().ok());
    Ok(value.unwrap_or(0))
}

/// Few reviews per connection, so that the API server opens several and they reach all three replicas at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_pods_at_once_are_split_by_three_replicas() -> anyhow::Result<()> {
    const WORKLOADS: usize = 10;
    const PODS: usize = 100;
    let cluster = roomy_cluster().await?;
    let ports = free_ports(3)?;
    let proxy = Proxy::balance(ports.iter().map(|port| ([127, 0, 0, 1], *port).into())).await?;
    let url = format!("https://{}", proxy.addr());
    let config = format!("{QUICK}webhook: {{maxStreams: 2}}\n");
    let mut replicas = Vec::new();
    for (i, port) in ports.iter().enumerate() {
        let builder = Groundcrew::builder(&cluster).name(&format!("r{i}")).webhook_port(*port).webhook_url(&url);
        replicas.push(builder.config_yaml(&config).start().await?);
    }
    cluster.webhook_answers().await?;
    let namespace = cluster.namespace("burst").await?;
    let groundcrew = replicas.remove(0);
    let scene = Scene { cluster, groundcrew, namespace };
    let rule = [("spot-percentage", "70"), ("min-on-demand", "5")];
    for i in 0..WORKLOADS {
        scene.create(&workload::<Deployment>("Deployment", &format!("w{i}"), u32::try_from(PODS)?, &rule)).await?;
    }
    let pods: Api<Pod> = scene.namespace.api();
    let all_ready = |pods: &[&Pod]| pods.len() == PODS && pods.iter().all(|p| is_ready(p));
    for i in 0..WORKLOADS {
        let config = watcher::Config::default().labels(&format!("app=w{i}"));
        scene.cluster.wait_for_list(&pods, config, "all ready", 4 * SOON, all_ready).await?;
    }
    // Moves in the midst of the burst, whose replacements nobody admitted, may have been given up as futile: a new
    // generation is new hope.
    for i in 0..WORKLOADS {
        scene.patch(&format!("w{i}"), json!({"spec": {"revisionHistoryLimit": 9}})).await?;
    }
    for i in 0..WORKLOADS {
        scene.settles_within(&format!("w{i}"), (70, 30), 4 * SOON).await?;
    }
    let mut shares = Vec::new();
    for replica in std::iter::once(&scene.groundcrew).chain(&replicas) {
        shares.push(counted(replica, "spotalis_webhook_requests_total{result=\"patched\"}").await?);
    }
    let evictions = scene.committed_evictions().await?;
    // A machine that is busy enough makes the API server give up on us after its second and go on.
    let events = scene.cluster.audit_events().await?;
    let ours = |e: &&AuditEvent| e.object_ref.as_ref().is_some_and(|o| o.namespace == scene.namespace.name());
    let created = events.iter().filter(|e| e.verb == "create" && e.is_about("pods", "") && e.is_committed_write());
    let missed = created.filter(ours).filter(|e| e.response_annotation("groundcrew.io/spread-rank").is_none()).count();
    println!("reviews by replica {shares:?}, {missed} pods not admitted by us, {evictions} evictions");
    assert!(shares.iter().all(|share| *share >= WORKLOADS * PODS / 50), "not shared: {shares:?}");
    assert!(evictions <= missed + 2 * WORKLOADS, "{evictions} evictions, {missed} pods not admitted by us");
    Ok(())
}

/// When a move began and when its replacement was ready, from the API server's record.
fn moves(events: &[AuditEvent]) -> Vec<(Timestamp, Timestamp, String)> {
    let mut begun: BTreeMap<String, Timestamp> = BTreeMap::new();
    let mut done: BTreeMap<String, Timestamp> = BTreeMap::new();
    for event in events.iter().filter(|e| e.is_committed_write()) {
        let Some(about) = &event.object_ref else { continue };
        let app = about.name.split('-').next().unwrap_or_default().to_owned();
        if event.is_about("pods", "eviction") {
            begun.insert(app, event.stage_timestamp);
        } else if event.is_about("pods", "status") {
            let conditions = event.response_at("/status/conditions").and_then(Value::as_array);
            let is = |c: &Value, key: &str, value: &str| c.get(key).and_then(Value::as_str) == Some(value);
            let ready = conditions.into_iter().flatten().any(|c| is(c, "type", "Ready") && is(c, "status", "True"));
            let on_spot =
                event.response_at("/spec/nodeName").and_then(Value::as_str).is_some_and(|n| n.starts_with("spot-"));
            if ready && on_spot {
                done.entry(app).or_insert(event.stage_timestamp);
            }
        }
    }
    let mut moves: Vec<_> = begun.into_iter().filter_map(|(app, from)| Some((from, *done.get(&app)?, app))).collect();
    moves.sort();
    moves
}

#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_workloads_are_moved_in_turn_within_the_cap() -> anyhow::Result<()> {
    const OLD: usize = 450;
    const YOUNG: usize = 50;
    // Fewer than the workers, who must not pass it together.
    const CAP: usize = 8;
    let cluster = roomy_cluster().await?;
    let namespace = cluster.namespace("many").await?;
    let deployments: Api<Deployment> = namespace.api();
    // Nobody admits these pods: all stay where their template sends them.
    let on_demand = |name: String, percentage: &str| {
        let mut object: Deployment = workload("Deployment", &name, 1, &[("spot-percentage", percentage)]);
        let template = object.spec.as_mut().and_then(|s| s.template.spec.as_mut()).expect("a template");
        template.node_selector = Some([("karpenter.sh/capacity-type".to_owned(), "on-demand".to_owned())].into());
        object
    };
    let old = (0..OLD).map(|i| on_demand(format!("old{i}"), "100"));
    let young = (0..YOUNG).map(|i| on_demand(format!("young{i}"), "0"));
    stream::iter(old.chain(young))
        .map(|object| {
            let deployments = deployments.clone();
            async move { deployments.create(&PostParams::default(), &object).await }
        })
        .buffer_unordered(HANDS)
        .try_collect::<Vec<_>>()
        .await?;
    let pods: Api<Pod> = namespace.api();
    let on = |prefix: &'static str| {
        move |pods: &[&Pod]| {
            let there =
                |p: &Pod| p.spec.as_ref().and_then(|s| s.node_name.as_deref()).is_some_and(|n| n.starts_with(prefix));
            pods.len() == OLD + YOUNG && pods.iter().all(|p| is_ready(p) && there(p))
        }
    };
    cluster.wait_for_list(&pods, watcher::Config::default(), "all on on-demand", 5 * SOON, on("od-")).await?;

    let config =
        format!("controller: {{workers: 16}}\nspread: {{cooldown: 1s, maxMoves: {CAP}, movesPerSecond: 40}}\n");
    let groundcrew = Groundcrew::builder(&cluster).config_yaml(&config).start().await?;
    let scene = Scene { cluster, groundcrew, namespace };
    // Those that come later have to wait for those that were wrong before them.
    let events: Api<Event> = scene.namespace.api();
    let some_moved = |events: &[&Event]| events.iter().any(|e| e.reason.as_deref() == Some("PodRescheduled"));
    scene.cluster.wait_for_list(&events, watcher::Config::default(), "a first move", SOON, some_moved).await?;
    stream::iter((0..YOUNG).map(|i| format!("young{i}")))
        .map(async |name| {
            let upset = json!({"metadata": {"annotations": {"spotalis.io/spot-percentage": "100"}}});
            scene.patch(&name, upset).await
        })
        .buffer_unordered(HANDS)
        .try_collect::<Vec<_>>()
        .await?;
    scene.cluster.wait_for_list(&pods, watcher::Config::default(), "all on spot", 6 * SOON, on("spot-")).await?;

    let events = scene.cluster.audit_events().await?;
    let evicted = events.iter().filter(|e| e.is_about("pods", "eviction") && e.is_committed_write()).count();
    let moves = moves(&events);
    assert_eq!(moves.len(), OLD + YOUNG, "each is moved");
    // Nobody admitted the first pod of each. Another one that came without us went to on-demand and was moved again.
    let unplaced = events
        .iter()
        .filter(|e| e.verb == "create" && e.is_about("pods", "") && e.is_committed_write())
        .filter(|e| e.object_ref.as_ref().is_some_and(|o| o.namespace == scene.namespace.name()))
        .filter(|e| e.response_annotation("groundcrew.io/spread-rank").is_none())
        .count();
    assert!((OLD + YOUNG..=unplaced).contains(&evicted), "{evicted} moves, {unplaced} pods not admitted by us");
    let most = moves.iter().map(|(at, _, _)| moves.iter().filter(|(from, to, _)| from <= at && at < to).count()).max();
    assert!(most.is_some_and(|most| most <= CAP), "{most:?} moves under way at once");
    let first_young = moves.iter().position(|(_, _, app)| app.starts_with("young")).context("no young ones")?;
    assert!(first_young >= OLD - CAP, "a younger imbalance went before {} older ones", OLD - first_young);
    // Watches and leases are renewed as time goes by, whether pods are moved or not.
    let by_the_clock = |e: &AuditEvent| e.verb == "watch" || e.is_about("leases", "");
    let requests = events.iter().filter(|e| e.user_agent.starts_with("groundcrew/") && !by_the_clock(e)).count();
    println!("{requests} requests for {evicted} moves, at most {most:?} under way");
    assert!(requests <= 15 * evicted, "{requests} requests for {evicted} moves");
    Ok(())
}
