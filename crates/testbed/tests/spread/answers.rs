//! What an eviction is answered, and what becomes of it when nobody waits for the answer any more.

use groundcrew_testbed::Proxy;
use kube::api::DeleteParams;

use super::gate::{Answer, Gate};
use super::*;

/// More than the five seconds in which an eviction must end.
const TOO_LATE: Duration = Duration::from_secs(6);

impl Scene {
    /// One replica on on-demand; [`Scene::upset`] makes it want one move.
    async fn one_replica(&self, name: &str) -> anyhow::Result<String> {
        self.create(&workload::<Deployment>("Deployment", name, 1, &[("spot-percentage", "0")])).await?;
        self.settles(name, (0, 1)).await?;
        let pods = self.namespace.api::<Pod>().list(&ListParams::default().labels(&format!("app={name}"))).await?;
        Ok(pods.items.first().context("no pod")?.name_any())
    }

    async fn upset(&self, name: &str) -> anyhow::Result<()> {
        self.patch(name, json!({"metadata": {"annotations": {"spotalis.io/spot-percentage": "100"}}})).await
    }

    /// The answers to evictions of this workload's pods in earnest.
    async fn answers(&self, name: &str) -> anyhow::Result<Vec<u16>> {
        let of = |e: &&AuditEvent| e.object_ref.as_ref().is_some_and(|o| o.name.starts_with(&format!("{name}-")));
        Ok(self.evictions().await?.iter().filter(of).map(AuditEvent::code).collect())
    }

    async fn allow(&self, budget: &str, unavailable: u32) -> anyhow::Result<()> {
        let patch = Patch::Merge(json!({"spec": {"maxUnavailable": unavailable}}));
        self.namespace.api::<PodDisruptionBudget>().patch(budget, &PatchParams::default(), &patch).await?;
        Ok(())
    }

    async fn disruptions_allowed(&self, budget: &str, count: i32) -> anyhow::Result<()> {
        let budgets: Api<PodDisruptionBudget> = self.namespace.api();
        let holds = |b: &PodDisruptionBudget| {
            let observed = |s: &k8s_openapi::api::policy::v1::PodDisruptionBudgetStatus| {
                s.observed_generation == b.metadata.generation && s.disruptions_allowed == Some(count)
            };
            b.status.as_ref().is_some_and(observed)
        };
        self.cluster.wait_for(&budgets, budget, &format!("{count} disruptions allowed"), SOON, holds).await?;
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_answer_to_an_eviction_is_taken_for_what_it_is() -> anyhow::Result<()> {
    let scene = scene(QUICK).await?;
    let gate = Gate::put_up(&scene.cluster).await?;

    // A server in trouble: tried again, later and later, and never counted as a move that did not help.
    scene.one_replica("busy").await?;
    for code in [500, 429] {
        // In this order: whatever is counted below was asked after the answer was set.
        gate.answer(Answer::Allow, Answer::Refuse(code));
        let before = gate.asked().earnest;
        scene.upset("busy").await?;
        gate.wait_asked("again after a failure", |asked| asked.earnest >= before + 2).await?;
    }
    gate.answer(Answer::Allow, Answer::Allow);
    scene.settles("busy", (1, 0)).await?;
    let answers = scene.answers("busy").await?;
    assert!(answers.contains(&500) && answers.contains(&429) && answers.ends_with(&[201]), "{answers:?}");
    assert!(answers.len() <= 12, "no backoff: {answers:?}");

    // Gone in between: somebody else's deletion does the work.
    let pod = scene.one_replica("gone").await?;
    let before = gate.asked().earnest;
    gate.answer(Answer::Allow, Answer::Hold);
    scene.upset("gone").await?;
    gate.wait_asked("an eviction in earnest", |asked| asked.earnest > before).await?;
    scene.namespace.api::<Pod>().delete(&pod, &DeleteParams::default().grace_period(0)).await?;
    gate.answer(Answer::Allow, Answer::Allow);
    scene.settles("gone", (1, 0)).await?;
    let answers = scene.answers("gone").await?;
    assert!(answers == [404] || scene.missed("gone").await? > 0, "{answers:?}");

    // A budget that closes in between: one answer, one event, and nothing before it opens.
    scene.one_replica("closed").await?;
    scene.create(&budget("closed", "closed", 1)).await?;
    scene.disruptions_allowed("closed", 1).await?;
    let before = gate.asked().earnest;
    gate.answer(Answer::Allow, Answer::Hold);
    scene.upset("closed").await?;
    gate.wait_asked("an eviction in earnest", |asked| asked.earnest > before).await?;
    scene.allow("closed", 0).await?;
    gate.answer(Answer::Allow, Answer::Allow);
    scene.wait_event("closed", "RebalanceBlocked").await?;
    assert_eq!(scene.answers("closed").await?, [429]);
    scene.allow("closed", 1).await?;
    scene.settles("closed", (1, 0)).await?;
    let answers = scene.answers("closed").await?;
    assert!(answers == [429, 201] || scene.missed("closed").await? > 0, "{answers:?}");

    // A pod that changes in between is asked about in vain, and its budget is as it was.
    let pod = scene.one_replica("changed").await?;
    scene.create(&budget("changed", "changed", 1)).await?;
    scene.disruptions_allowed("changed", 1).await?;
    let before = gate.asked().dry;
    gate.answer(Answer::Hold, Answer::Allow);
    scene.upset("changed").await?;
    gate.wait_asked("a dry run", |asked| asked.dry > before).await?;
    let exempt = Patch::Merge(json!({"metadata": {"annotations": {"karpenter.sh/do-not-disrupt": "true"}}}));
    scene.namespace.api::<Pod>().patch(&pod, &PatchParams::default(), &exempt).await?;
    gate.answer(Answer::Allow, Answer::Allow);
    scene.wait_event("changed", "RebalanceBlocked").await?;
    assert_eq!(scene.answers("changed").await?, [0_u16; 0], "decided on another state of the pod");
    scene.disruptions_allowed("changed", 1).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_eviction_whose_leader_is_lost_does_not_land_later() -> anyhow::Result<()> {
    let mut scene = scene(QUICK).await?;
    scene.groundcrew.terminate().await?;
    // Its successor is cut off from the API server with an eviction under way.
    let proxy = Proxy::to(scene.cluster.api_addr()).await?;
    let kubeconfig = proxy.kubeconfig(&scene.cluster)?;
    let mut lost =
        Groundcrew::builder(&scene.cluster).name("lost").kubeconfig(&kubeconfig).config_yaml(QUICK).start().await?;
    lost.wait_metric("groundcrew_leader 1", SOON).await?;
    scene.cluster.webhook_answers().await?;
    scene.create(&budget("web", "web", 1)).await?;
    scene.create(&workload::<Deployment>("Deployment", "web", 3, &[("spot-percentage", "0")])).await?;
    scene.settles("web", (0, 3)).await?;
    scene.disruptions_allowed("web", 1).await?;
    let gate = Gate::put_up(&scene.cluster).await?;
    let before = gate.asked().earnest;
    gate.answer(Answer::Allow, Answer::Hold);
    scene.upset("web").await?;
    gate.wait_asked("an eviction in earnest", |asked| asked.earnest > before).await?;
    proxy.freeze();
    scene.allow("web", 0).await?;
    scene.disruptions_allowed("web", 0).await?;
    lost.kill().await?;
    // Its connections stay open through the proxy: the API server has no reason to think that nobody waits.
    tokio::time::sleep(TOO_LATE).await;
    scene.allow("web", 1).await?;
    scene.disruptions_allowed("web", 1).await?;
    gate.answer(Answer::Allow, Answer::Allow);
    tokio::time::sleep(TOO_LATE).await;
    assert_eq!(scene.committed_evictions().await?, 0, "landed after its leader was gone");

    // The next leader starts from what is written down, and makes each move once.
    scene.groundcrew = Groundcrew::builder(&scene.cluster).name("next").config_yaml(QUICK).start().await?;
    scene.groundcrew.wait_metric("groundcrew_leader 1", SOON).await?;
    scene.cluster.webhook_answers().await?;
    scene.settles_within("web", (3, 0), 2 * SOON).await?;
    let most = 3 + scene.missed("web").await?;
    let moves = scene.committed_evictions().await?;
    assert!((3..=most).contains(&moves), "{moves} moves, at most {most} expected");
    for eviction in scene.evictions().await?.iter().filter(|e| e.is_committed_write()) {
        let took = eviction.request_received_timestamp.duration_until(eviction.stage_timestamp);
        assert!(took.as_secs() < 5, "{took:?}");
    }
    Ok(())
}
