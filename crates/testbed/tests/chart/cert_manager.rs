//! The chart with a real cert-manager: it issues and renews the webhook's certificate, and may keep the trust as well.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context;
use groundcrew_testbed::objects::stamped;
use groundcrew_testbed::{CertManager, Cluster, Layer, TestNamespace, handshake};
use jiff::Timestamp;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Resource, ResourceExt};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::cluster::{Installation, PATIENCE, assert_calm, wait_ready};
use crate::support::HOME;

const CONFIGURATION: &str = "groundcrew";
const CONFIGURATIONS: [&str; 2] = ["mutatingwebhookconfigurations", "validatingwebhookconfigurations"];
const LEAF: &str = "groundcrew-webhook-cert";
const CA: &str = "groundcrew-ca";
const SERVER: &str = "groundcrew-webhook.groundcrew-system.svc";
const WEBHOOK_PORT: u16 = 9443;

#[tokio::test(flavor = "multi_thread")]
async fn cert_manager_issues_renews_and_injects_without_a_failed_create() -> anyhow::Result<()> {
    if !Layer::Nodes.available_or_skip()? {
        return Ok(());
    }
    let cluster = Cluster::start(Layer::Nodes).await?;
    let _cert_manager = CertManager::start(&cluster).await?;
    let installation = Installation::prepare(&cluster).await?;
    let result = lifetime(&installation).await;
    installation.explain(result).await
}

async fn lifetime(installation: &Installation<'_>) -> anyhow::Result<()> {
    let cluster = installation.cluster;
    installation.apply("1", &json!({"certificates": {"certManager": {"enabled": true}}})).await?;
    wait_ready(installation).await?;
    cluster.webhook_answers().await?;
    let namespace = cluster.namespace("user").await?;

    // Issued: what cert-manager made is served and trusted, and we made nothing of our own.
    let issued = secret(installation, LEAF, |_| true).await?;
    trusted(cluster, &issued["ca.crt"]).await?;
    served(installation, &namespace, &issued).await?;
    let own = installation.api::<Secret>().get_opt("groundcrew-webhook-tls").await?;
    assert!(own.is_none(), "a Secret that nobody needs");

    // Renewed by the same CA: nobody notices.
    renew(installation, "groundcrew-webhook").await?;
    let renewed = secret(installation, LEAF, |data| data["tls.crt"] != issued["tls.crt"]).await?;
    assert_eq!(renewed["ca.crt"], issued["ca.crt"]);
    served(installation, &namespace, &renewed).await?;

    // A new CA, and somebody who wants cert-manager to keep the bundles.
    let asked = inject(cluster).await?;
    let ca = secret(installation, CA, |_| true).await?;
    renew(installation, "groundcrew-ca").await?;
    secret(installation, CA, |data| data["tls.crt"] != ca["tls.crt"]).await?;
    renew(installation, "groundcrew-webhook").await?;
    let replaced = secret(installation, LEAF, |data| data["ca.crt"] != renewed["ca.crt"]).await?;
    trusted(cluster, &replaced["ca.crt"]).await?;
    served(installation, &namespace, &replaced).await?;
    // Time enough for two who disagree: each would write twice a second.
    for _ in 0..20 {
        assert!(stamped(&namespace.api()).await?, "a pod went past the webhook");
        sleep(Duration::from_millis(100)).await;
    }
    let writers = writers(cluster, asked).await?;
    let injector = "cert-manager-cainjector".to_owned();
    let expected = BTreeSet::from(CONFIGURATIONS.map(|kind| (kind.to_owned(), injector.clone())));
    assert_eq!(writers, expected, "who is asked to keep the bundles keeps them, alone");
    assert_calm(installation).await
}

type Data = BTreeMap<String, Vec<u8>>;

/// A Secret's contents, once they are as wanted.
async fn secret(installation: &Installation<'_>, name: &str, wanted: impl Fn(&Data) -> bool) -> anyhow::Result<Data> {
    let data = |secret: &Secret| -> Data {
        secret.data.iter().flatten().map(|(key, value)| (key.clone(), value.0.clone())).collect()
    };
    let complete = |data: &Data| ["ca.crt", "tls.crt", "tls.key"].iter().all(|key| data.contains_key(*key));
    let ready = |secret: &Secret| complete(&data(secret)) && wanted(&data(secret));
    let secrets: Api<Secret> = installation.api();
    Ok(data(&installation.cluster.wait_for(&secrets, name, "as wanted", PATIENCE, ready).await?))
}

/// Both configurations trust this CA.
async fn trusted(cluster: &Cluster, ca: &[u8]) -> anyhow::Result<()> {
    let ca = first_certificate(ca)?;
    let trusts = |config: &WebhookClientConfig| {
        let bundle = config.ca_bundle.as_ref().map(|bundle| bundle.0.as_slice()).unwrap_or_default();
        CertificateDer::pem_slice_iter(bundle).flatten().any(|found| found == ca)
    };
    let all = |entries: Vec<&WebhookClientConfig>| !entries.is_empty() && entries.into_iter().all(trusts);
    let mutating = |found: &MutatingWebhookConfiguration| {
        all(found.webhooks.iter().flatten().map(|entry| &entry.client_config).collect())
    };
    let validating = |found: &ValidatingWebhookConfiguration| {
        all(found.webhooks.iter().flatten().map(|entry| &entry.client_config).collect())
    };
    let client = cluster.client();
    cluster.wait_for(&Api::all(client.clone()), CONFIGURATION, "trusts the CA", PATIENCE, mutating).await?;
    cluster.wait_for(&Api::all(client), CONFIGURATION, "trusts the CA", PATIENCE, validating).await?;
    Ok(())
}

fn first_certificate(pem: &[u8]) -> anyhow::Result<CertificateDer<'static>> {
    Ok(CertificateDer::pem_slice_iter(pem).next().context("no certificate")??)
}

/// Creates pods until every replica shows the Secret's certificate; the webhook answers for each of them.
async fn served(installation: &Installation<'_>, namespace: &TestNamespace, data: &Data) -> anyhow::Result<()> {
    let leaf = first_certificate(&data["tls.crt"])?;
    let own: Api<Pod> = installation.api();
    let mut waiting = own.list(&ListParams::default().labels("app.kubernetes.io/component=operator")).await?.items;
    assert_eq!(waiting.len(), 2);
    let began = Instant::now();
    while !waiting.is_empty() {
        assert!(stamped(&namespace.api()).await?, "a pod went past the webhook after {:?}", began.elapsed());
        let mut left = Vec::new();
        for replica in waiting {
            let ip = replica.status.as_ref().and_then(|status| status.pod_ip.as_ref()).context("no address")?;
            let shown = handshake(SocketAddr::new(ip.parse()?, WEBHOOK_PORT), SERVER, &data["ca.crt"]).await;
            if !shown.as_ref().is_ok_and(|shown| *shown == leaf.as_ref()) {
                anyhow::ensure!(began.elapsed() < PATIENCE, "{}: {shown:?}", replica.name_any());
                // A kubelet looks into Secrets once a minute, and whenever a pod is changed.
                let touch = json!({"metadata": {"annotations": {"touched": Timestamp::now().to_string()}}});
                own.patch(&replica.name_any(), &PatchParams::default(), &Patch::Merge(touch)).await?;
                left.push(replica);
            }
        }
        waiting = left;
        sleep(Duration::from_millis(250)).await;
    }
    Ok(())
}

/// As `cmctl renew` does.
async fn renew(installation: &Installation<'_>, name: &str) -> anyhow::Result<()> {
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("cert-manager.io", "v1", "Certificate"));
    let certificates: Api<DynamicObject> = Api::namespaced_with(installation.cluster.client(), HOME, &kind);
    let deadline = Instant::now() + PATIENCE;
    // One that is being issued has no conditions to add to, or is about to change them.
    loop {
        let condition = json!({
            "type": "Issuing", "status": "True", "reason": "ManuallyTriggered", "message": "a test wants it",
            "lastTransitionTime": Timestamp::now().round(jiff::Unit::Second)?,
        });
        let certificate = certificates.get(name).await?;
        let conditions = certificate.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let has = |kind: &str| conditions.iter().any(|found| found["type"] == kind && found["status"] == "True");
        if has("Ready") && !has("Issuing") {
            let patch = json!({
                "metadata": {"resourceVersion": certificate.resource_version()},
                "status": {"conditions": conditions.iter().cloned().chain([condition]).collect::<Vec<_>>()},
            });
            match certificates.patch_status(name, &PatchParams::default(), &Patch::Merge(patch)).await {
                Err(kube::Error::Api(status)) if status.is_conflict() => {}
                done => return done.map(drop).with_context(|| format!("cannot renew {name}")),
            }
        }
        anyhow::ensure!(Instant::now() < deadline, "{name} is never ready: {conditions:?}");
        sleep(Duration::from_millis(200)).await;
    }
}

/// Asks cert-manager to keep the bundles; since when.
async fn inject(cluster: &Cluster) -> anyhow::Result<Timestamp> {
    async fn annotate<K>(api: Api<K>) -> anyhow::Result<()>
    where
        K: Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
    {
        let from = format!("{HOME}/groundcrew-webhook");
        let patch = json!({"metadata": {"annotations": {"cert-manager.io/inject-ca-from": from}}});
        Ok(api.patch(CONFIGURATION, &PatchParams::default(), &Patch::Merge(patch)).await.map(drop)?)
    }
    annotate(Api::<MutatingWebhookConfiguration>::all(cluster.client())).await?;
    annotate(Api::<ValidatingWebhookConfiguration>::all(cluster.client())).await?;
    Ok(Timestamp::now())
}

/// Who changed the webhook configurations since then: which, and the name of the program.
async fn writers(cluster: &Cluster, since: Timestamp) -> anyhow::Result<BTreeSet<(String, String)>> {
    let events = cluster.audit_events().await?.into_iter();
    let writes = events.filter(|event| event.is_committed_write() && event.request_received_timestamp > since);
    let program = |agent: String| agent.split(['/', ' ']).next().unwrap_or_default().to_owned();
    let who = writes.filter_map(|event| Some((event.object_ref?.resource, program(event.user_agent))));
    Ok(who.filter(|(resource, _)| CONFIGURATIONS.contains(&resource.as_str())).collect())
}
