//! Certificates on a real API server: rotated, replaced, lost and spoiled while pods are created.
//!
//! The webhook fails open, so a create alone proves little: a pod counts only if its creation was answered with the
//! time on it. Next to the API server a strict client does handshakes that trust the published bundle and nothing else.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use groundcrew_testbed::objects::stamped;
use groundcrew_testbed::{Cluster, Groundcrew, Layer, Proxy, free_ports};
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use serde_json::json;
use tokio::time::{sleep, timeout};

const SOON: Duration = Duration::from_secs(30);

type Configurations = Api<MutatingWebhookConfiguration>;

/// The bundle in every entry, if they agree on one.
fn bundle(configuration: &MutatingWebhookConfiguration) -> Option<Vec<u8>> {
    let mut bundles = configuration.webhooks.iter().flatten().map(|entry| entry.client_config.ca_bundle.clone());
    let first = bundles.next()??;
    bundles.all(|other| other.as_ref() == Some(&first)).then_some(first.0)
}

async fn published(configurations: &Configurations) -> anyhow::Result<Vec<u8>> {
    bundle(&configurations.get("groundcrew").await?).context("no bundle")
}

async fn registered(cluster: &Cluster) -> anyhow::Result<Configurations> {
    let configurations = Api::all(cluster.client());
    let has_bundle = |configuration: &MutatingWebhookConfiguration| bundle(configuration).is_some();
    cluster.wait_for(&configurations, "groundcrew", "the webhook is registered", SOON, has_bundle).await?;
    Ok(configurations)
}

/// One handshake that trusts `bundle` alone; the certificate that was shown.
async fn handshake(address: SocketAddr, bundle: &[u8]) -> anyhow::Result<Vec<u8>> {
    groundcrew_testbed::handshake(address, &address.ip().to_string(), bundle).await
}

/// Until the webhook answers, at the start or after a deliberate outage.
async fn stamped_within(limit: Duration, pods: &Api<Pod>) -> anyhow::Result<()> {
    let began = Instant::now();
    while !stamped(pods).await? {
        anyhow::ensure!(began.elapsed() < limit, "no stamp after {limit:?}");
        sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

/// What a strict client saw until that was enough.
#[derive(Default)]
struct Watch {
    handshakes: usize,
    leaves: BTreeSet<Vec<u8>>,
    bundles: BTreeSet<Vec<u8>>,
}

async fn be_strict(
    configurations: Configurations,
    servers: Vec<SocketAddr>,
    mut watch: Watch,
    seen_enough: impl Fn(&Watch) -> bool,
) -> anyhow::Result<Watch> {
    for server in servers.iter().cycle() {
        if seen_enough(&watch) {
            break;
        }
        let bundle = published(&configurations).await?;
        let leaf = handshake(*server, &bundle).await;
        let leaf = leaf.with_context(|| format!("handshake {} with {server}", watch.handshakes))?;
        watch.handshakes += 1;
        watch.leaves.insert(leaf);
        watch.bundles.insert(bundle);
        sleep(Duration::from_millis(20)).await;
    }
    Ok(watch)
}

/// Leaves of 15 s are renewed every 10 s, CAs of 45 s every 30 s: each step is taken more than once in 90 s, and a
/// machine that stands still for some seconds has time left.
#[tokio::test(flavor = "multi_thread")]
async fn leaves_and_cas_rotate_under_load_without_one_failed_call() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let ports = free_ports(2)?;
    let servers: Vec<SocketAddr> = ports.iter().map(|port| SocketAddr::from(([127, 0, 0, 1], *port))).collect();
    let service = Proxy::balance(servers.clone()).await?;
    let config = "webhook: {certificates: {caLifetime: 45s, leafLifetime: 15s, overlap: 5s}}";
    let mut replicas = Vec::new();
    for (name, port) in ["a", "b"].into_iter().zip(ports) {
        let replica = Groundcrew::builder(&cluster).name(name).config_yaml(config).webhook_port(port);
        replicas.push(replica.webhook_url(&format!("https://{}", service.addr())).start().await?);
    }
    let configurations = registered(&cluster).await?;
    let namespace = cluster.namespace("rotation").await?;
    let pods = namespace.api::<Pod>();
    stamped_within(SOON, &pods).await?;

    // Two rotations: each shows three bundles, with the next CA, with the retired one, and without it.
    let rotations = |seen: &Watch| seen.handshakes > 200 && seen.leaves.len() >= 8 && seen.bundles.len() >= 7;
    let strict = tokio::spawn(be_strict(configurations, servers, Watch::default(), rotations));
    let (began, mut created, mut late) = (Instant::now(), 0, 0);
    while !strict.is_finished() {
        assert!(began.elapsed() < Duration::from_secs(300), "two rotations are not seen");
        let asked = Instant::now();
        let stamped = stamped(&pods).await?;
        assert!(stamped, "pod {created} went past the webhook {:?} after the start", began.elapsed());
        created += 1;
        late += usize::from(asked.elapsed() >= Duration::from_secs(1));
        sleep(Duration::from_millis(10)).await;
    }
    let seen = cluster.explain(strict.await?)?;
    println!(
        "{created} pods, {late} of them late, {} handshakes, {} leaves, {} bundles",
        seen.handshakes,
        seen.leaves.len(),
        seen.bundles.len()
    );
    assert!(created > 200, "too little load to mean anything");
    // Now and then the machine is too busy; a rotation that held answers up would show in every one of them.
    assert!(late * 100 <= created, "{late} of {created} pods were late");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_or_spoiled_secret_is_mended() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    // A client that stands still for some seconds must not miss the bundle of both CAs.
    let config = "webhook: {certificates: {overlap: 6s}}";
    let groundcrew = Groundcrew::builder(&cluster).config_yaml(config).start().await?;
    let configurations = registered(&cluster).await?;
    let namespace = cluster.namespace("secret").await?;
    let pods = namespace.api::<Pod>();
    stamped_within(SOON, &pods).await?;
    let secrets: Api<Secret> = Api::namespaced(cluster.client(), "groundcrew-system");
    let name = "groundcrew-webhook-tls";
    let value = |secret: &Secret, key: &str| secret.data.as_ref().and_then(|data| data.get(key)).cloned();

    // Deleted: the same leaf at once, then a new CA, and nobody is refused on the way.
    let rotation = |seen: &Watch| seen.leaves.len() == 2 && seen.bundles.len() >= 3;
    let servers = vec![groundcrew.webhook_addr()];
    // The first bundle is seen for certain while it is still there.
    let first =
        be_strict(configurations.clone(), servers.clone(), Watch::default(), |seen| seen.handshakes > 0).await?;
    let strict = tokio::spawn(be_strict(configurations.clone(), servers, first, rotation));
    let before = secrets.get(name).await?;
    secrets.delete(name, &DeleteParams::default()).await?;
    let rotated = |secret: &Secret| {
        let active = value(secret, "ca-active.crt");
        secret.uid() != before.uid() && active.is_some() && active != value(&before, "ca-active.crt")
    };
    cluster.wait_for(&secrets, name, "the Secret is back with a CA of its own", SOON, rotated).await?;
    assert!(stamped(&pods).await?);
    let seen = timeout(SOON, strict).await.context("two leaves and three bundles are not seen");
    cluster.explain(seen.and_then(|ended| ended?))?;

    // Spoiled: everything is made anew, and works again as soon as the API server knows.
    let garbage = json!({"data": {"tls.crt": "eA==", "tls.key": "eA==", "ca-active.crt": "eA==", "ca.crt": "eA=="}});
    secrets.patch(name, &PatchParams::default(), &Patch::Merge(&garbage)).await?;
    let mended = |secret: &Secret| value(secret, "tls.crt").is_some_and(|pem| pem.0.len() > 100);
    cluster.wait_for(&secrets, name, "the garbage is gone", SOON, mended).await?;
    // The API server may still hold a connection from before, so its stamp alone would not show that trust followed.
    let (server, began) = (groundcrew.webhook_addr(), Instant::now());
    while let Err(refused) = handshake(server, &published(&configurations).await?).await {
        cluster.explain((began.elapsed() < SOON).then_some(()).ok_or(refused))?;
        sleep(Duration::from_millis(100)).await;
    }
    stamped_within(SOON, &pods).await?;
    Ok(())
}

/// A CA and a leaf for loopback whose last day was the first of January of `until`.
fn handmade(until: i32) -> anyhow::Result<[(&'static str, String); 3]> {
    let mut ca = CertificateParams::default();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.distinguished_name.push(rcgen::DnType::CommonName, format!("handmade until {until}"));
    let ca = CertifiedIssuer::self_signed(ca, KeyPair::generate()?)?;
    let mut leaf = CertificateParams::new(vec!["127.0.0.1".to_owned()])?;
    leaf.not_after = date_time_ymd(until, 1, 1);
    let key = KeyPair::generate()?;
    let leaf = leaf.signed_by(&key, &ca)?;
    Ok([("tls.crt", leaf.pem()), ("tls.key", key.serialize_pem()), ("ca.crt", ca.pem())])
}

/// As a kubelet does it: files are links to `..data/<file>`, and `..data` is swapped by a rename.
fn fill_volume(directory: &Path, version: &str, files: &[(&str, String)]) -> anyhow::Result<()> {
    fs::create_dir(directory.join(version))?;
    for (name, text) in files {
        fs::write(directory.join(version).join(name), text)?;
        let link = directory.join(name);
        if fs::symlink_metadata(&link).is_err() {
            symlink(format!("..data/{name}"), link)?;
        }
    }
    symlink(version, directory.join("..data_tmp"))?;
    Ok(fs::rename(directory.join("..data_tmp"), directory.join("..data"))?)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_pair_in_the_directory_is_replaced_in_under_ten_seconds() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let directory = tempfile::tempdir()?;
    fill_volume(directory.path(), "..one", &handmade(2020)?)?;
    let groundcrew = Groundcrew::builder(&cluster).arg("--cert-dir").arg(directory.path()).start().await?;
    let configurations = registered(&cluster).await?;
    let namespace = cluster.namespace("files").await?;
    let pods = namespace.api::<Pod>();
    assert!(!stamped(&pods).await?, "the API server must refuse an expired certificate");
    assert!(groundcrew.log()?.contains("expired"));

    // Half a pair first: it is not taken, whatever was there before.
    let [cert, _, ca] = handmade(2099)?;
    let [_, stranger, _] = handmade(2099)?;
    fill_volume(directory.path(), "..two", &[cert, stranger, ca])?;
    sleep(Duration::from_secs(3)).await;
    assert!(handshake(groundcrew.webhook_addr(), &published(&configurations).await?).await.is_err());

    let good = handmade(2099)?;
    let began = Instant::now();
    fill_volume(directory.path(), "..three", &good)?;
    stamped_within(Duration::from_secs(10), &pods).await?;
    println!("picked up after {:?}", began.elapsed());
    let bundle = published(&configurations).await?;
    assert!(bundle.starts_with(good[2].1.trim_end().as_bytes()), "the new ca.crt is what is published");
    handshake(groundcrew.webhook_addr(), &bundle).await?;
    a_new_ca_reaches_the_standby_first(&cluster, &groundcrew, directory.path(), &good).await
}

/// Kubelets refresh the volumes of replicas up to two minutes apart, and only the leader publishes a CA.
async fn a_new_ca_reaches_the_standby_first(
    cluster: &Cluster,
    leader: &Groundcrew,
    of_leader: &Path,
    old: &[(&str, String); 3],
) -> anyhow::Result<()> {
    let of_standby = tempfile::tempdir()?;
    fill_volume(of_standby.path(), "..one", old)?;
    let standby = Groundcrew::builder(cluster).name("standby").arg("--cert-dir").arg(of_standby.path());
    let standby = standby.start().await?;
    let configurations: Configurations = Api::all(cluster.client());
    let strict = [leader.webhook_addr(), standby.webhook_addr()].map(|server| {
        let both = |seen: &Watch| seen.leaves.len() == 2;
        tokio::spawn(be_strict(configurations.clone(), vec![server], Watch::default(), both))
    });

    let new = handmade(2098)?;
    fill_volume(of_standby.path(), "..two", &new)?;
    let began = Instant::now();
    while standby.log()?.matches("certificate files read").count() < 2 {
        anyhow::ensure!(began.elapsed() < SOON, "the standby does not see its files");
        sleep(Duration::from_millis(20)).await;
    }
    for _ in 0..5 {
        handshake(standby.webhook_addr(), old[2].1.as_bytes()).await.context("the new leaf is served too early")?;
        sleep(Duration::from_millis(50)).await;
    }
    fill_volume(of_leader, "..four", &new)?;
    for seen in strict {
        let seen = timeout(SOON, seen).await.context("the new leaf is not served");
        cluster.explain(seen.and_then(|ended| ended?))?;
    }
    Ok(())
}
