//! What a stolen agent token is worth.

use groundcrew::warmup::manifests;
use groundcrew_testbed::{Cluster, Layer, client_for};
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Namespace, Pod, ServiceAccount};
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::support::{GATE, NODE, Server, add_node, apply, asking, up};

const HOME: &str = "groundcrew-system";

/// A client with the token that a kubelet would mount into the agent's pod.
async fn agent_client(cluster: &Cluster) -> anyhow::Result<Client> {
    let namespace = Namespace {
        metadata: kube::api::ObjectMeta { name: Some(HOME.to_owned()), ..Default::default() },
        ..Default::default()
    };
    Api::<Namespace>::all(cluster.client()).create(&PostParams::default(), &namespace).await?;
    let accounts: Api<ServiceAccount> = Api::namespaced(cluster.client(), HOME);
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": manifests::AGENT}});
    accounts.create(&PostParams::default(), &serde_json::from_value(account)?).await?;
    let pods: Api<Pod> = Api::namespaced(cluster.client(), HOME);
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "agent"}, "spec": {
        "nodeName": NODE, "serviceAccountName": manifests::AGENT, "containers": [{"name": "agent", "image": "none"}]}});
    let pod = pods.create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
    let bound = BoundObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: pod.metadata.name,
        uid: pod.metadata.uid,
    };
    let spec = TokenRequestSpec { bound_object_ref: Some(bound), expiration_seconds: Some(3600), ..Default::default() };
    let request = TokenRequest { spec: Some(spec), ..Default::default() };
    let issued = accounts.create_token_request(manifests::AGENT, &PostParams::default(), &request).await?;
    let token = issued.status.and_then(|status| status.token).unwrap_or_default();
    client_for(&cluster.kubeconfig_for_token("agent", &token)?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stolen_token_opens_gates_of_its_own_node_and_does_nothing_else() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    add_node(&cluster, NODE).await?;
    add_node(&cluster, "node-b").await?;
    let client = agent_client(&cluster).await?;
    apply(&cluster, HOME, manifests::rights(HOME)).await?;
    apply(&cluster, HOME, manifests::policies(HOME)).await?;
    let namespace = cluster.namespace("stolen").await?;
    let server = Server::start().await?;
    let admin: Api<Pod> = namespace.api();
    up(&admin, asking("here", &server, &[])).await?;
    let mut there = asking("there", &server, &[]);
    there.spec.as_mut().unwrap().node_name = Some("node-b".to_owned());
    up(&admin, there).await?;

    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace.name());
    let patch = async |name: &str, body: &Value| {
        pods.patch_status(name, &PatchParams::default(), &Patch::Strategic(body)).await
    };
    let open = json!({"metadata": {"annotations": {"kube-booster.io/warmup-state": "{}"}},
        "status": {"conditions": [{"type": GATE, "status": "True", "reason": "WarmupComplete"}]}});
    // Rights and policies take a moment to be in force; until both are, others or all say no or yes.
    let deadline = tokio::time::Instant::now() + crate::support::SOON;
    while !patch("there", &open).await.is_err_and(|refused| refused.to_string().contains("own node")) {
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "the policy is never in force");
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
    let forged =
        json!({"status": {"podIP": "169.254.169.254", "podIPs": [{"$patch": "replace"}, {"ip": "169.254.169.254"}]}});
    crate::support::make_ready(&admin, "here", "here-1").await?;

    patch("here", &open).await?;
    for (name, body, why) in [
        ("there", open.clone(), "own node"),
        ("here", forged, "own condition"),
        ("here", json!({"status": {"phase": "Failed"}}), "own condition"),
        ("here", json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}), "own condition"),
        ("here", json!({"status": {"conditions": [{"type": "ContainersReady", "status": "False"}]}}), "own condition"),
        ("here", json!({"metadata": {"annotations": {"other": "x"}}}), "own annotation"),
        ("here", json!({"metadata": {"annotations": {"kube-booster.io/warmup": null}}}), "own annotation"),
        ("here", json!({"metadata": {"labels": {"a": "b"}}}), "own annotation"),
    ] {
        let refused = patch(name, &body).await.expect_err(&body.to_string()).to_string();
        assert!(refused.contains(why), "{body}: {refused}");
    }
    // What RBAC alone keeps from it.
    assert!(
        pods.patch("here", &PatchParams::default(), &Patch::Merge(json!({"metadata": {"labels": {"a": "b"}}})))
            .await
            .is_err()
    );
    assert!(pods.delete("here", &kube::api::DeleteParams::default()).await.is_err());

    let leases: Api<k8s_openapi::api::coordination::v1::Lease> = Api::namespaced(client, HOME);
    let lease = |name: &str| serde_json::from_value(json!({"metadata": {"name": name}, "spec": {}}));
    // The policy for leases is one of its own and comes into force in its own time, as does the right to write them.
    let rehearsal = PostParams { dry_run: true, ..Default::default() };
    let deadline = tokio::time::Instant::now() + crate::support::SOON;
    let is_own = |refused: kube::Error| refused.to_string().contains("lease of its own node");
    while !leases.create(&rehearsal, &lease("groundcrew")?).await.is_err_and(is_own) {
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "the policy for leases is never in force");
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
    leases.create(&PostParams::default(), &lease("groundcrew-agent.node-a")?).await?;
    for name in ["groundcrew-agent.node-b", "groundcrew"] {
        let refused = leases.create(&PostParams::default(), &lease(name)?).await.expect_err(name).to_string();
        assert!(refused.contains("lease of its own node"), "{name}: {refused}");
    }
    Ok(())
}
