use std::fs;
use std::os::unix::fs::symlink;

use jiff::Timestamp;
use prometheus_client::registry::Registry;
use tempfile::TempDir;
use tokio_util::task::AbortOnDropHandle;

use super::*;
use crate::admission::certs::mint::Minted;
use crate::admission::certs::testing::{ca, eventually, leaf, pair};

/// A directory being looked at.
struct Scene {
    directory: TempDir,
    serving: Arc<ServingCert>,
    source: Source,
    published: watch::Sender<Option<Published>>,
    _task: AbortOnDropHandle<()>,
}

impl Scene {
    fn start(prepare_files: impl FnOnce(&Path)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        prepare_files(directory.path());
        let serving = ServingCert::register(&mut Registry::default());
        let path = directory.path().to_owned();
        let (published, seen) = watch::channel(None);
        let (source, task) = prepare(path, Arc::clone(&serving), Timestamp::now, seen, CancellationToken::new());
        Self { directory, serving, source, published, _task: AbortOnDropHandle::new(tokio::spawn(task)) }
    }

    async fn serves(&self, minted: &Minted) {
        let facts = Some(pair(minted).facts().clone());
        eventually("the pair is served", || self.serving.facts() == facts).await;
    }

    fn publish(&self, bundle: &str) {
        let bundle = Arc::from(bundle.as_bytes());
        let since = Instant::now().checked_sub(HEARD_OF).unwrap();
        self.published.send_replace(Some(Published { bundle, since }));
    }

    fn trust(&self) -> Trust {
        self.source.trust.borrow().clone()
    }
}

fn write(directory: &Path, leaf: &Minted, ca: Option<&str>) {
    fs::write(directory.join("tls.crt"), &leaf.cert).unwrap();
    fs::write(directory.join("tls.key"), &leaf.key).unwrap();
    if let Some(ca) = ca {
        fs::write(directory.join("ca.crt"), ca).unwrap();
    }
}

/// As a kubelet does it: files are links to `..data/<file>`, and `..data` is swapped by a rename.
fn volume(directory: &Path, version: &str, leaf: &Minted, ca: &str) {
    let data = directory.join(version);
    fs::create_dir(&data).unwrap();
    write(&data, leaf, Some(ca));
    symlink(version, directory.join("..tmp")).unwrap();
    fs::rename(directory.join("..tmp"), directory.join("..data")).unwrap();
    for file in ["tls.crt", "tls.key", "ca.crt"] {
        let _ = symlink(format!("..data/{file}"), directory.join(file));
    }
}

fn text(trust: &Trust) -> String {
    let Trust::Offered(pem) = trust else { panic!("no bundle: {trust:?}") };
    String::from_utf8(pem.to_vec()).unwrap()
}

#[tokio::test]
async fn a_swapped_symlink_is_noticed_and_the_old_ca_stays_trusted_for_a_while() {
    let (one, two) = (ca(), ca());
    let (old, new) = (leaf(&one, 600), leaf(&two, 900));
    let scene = Scene::start(|directory| volume(directory, "..1", &old, &one.cert));
    scene.serves(&old).await;
    assert_eq!(text(&scene.trust()), one.cert);
    volume(scene.directory.path(), "..2", &new, &two.cert);
    scene.serves(&new).await;
    let bundle = text(&scene.trust());
    assert!(bundle.starts_with(two.cert.trim_end()) && bundle.contains(one.cert.trim_end()), "{bundle}");
}

#[tokio::test]
async fn a_leaf_of_a_new_ca_is_held_back_until_callers_trust_it() {
    let (one, two) = (ca(), ca());
    let (old, new) = (leaf(&one, 600), leaf(&two, 900));
    let scene = Scene::start(|directory| volume(directory, "..1", &old, &one.cert));
    scene.serves(&old).await;
    scene.publish(&one.cert);
    volume(scene.directory.path(), "..2", &new, &two.cert);
    eventually("its CA is offered", || text(&scene.trust()).contains(two.cert.trim_end())).await;
    // The two configurations do not agree for a moment.
    scene.published.send_replace(None);
    tokio::time::sleep(2 * LOOK_EVERY).await;
    scene.serves(&old).await;
    scene.publish(&format!("{}{}", one.cert, two.cert));
    scene.serves(&new).await;
}

#[tokio::test]
async fn nothing_is_held_back_for_a_pair_that_callers_do_not_trust_either() {
    let (one, two) = (ca(), ca());
    let (old, new) = (leaf(&one, 600), leaf(&two, 900));
    let scene = Scene::start(|directory| volume(directory, "..1", &old, &one.cert));
    scene.serves(&old).await;
    scene.publish(&ca().cert);
    volume(scene.directory.path(), "..2", &new, &two.cert);
    scene.serves(&new).await;
}

#[tokio::test]
async fn a_bad_pair_leaves_the_old_one_in_place() {
    let ca = ca();
    let (old, new, stranger) = (leaf(&ca, 600), leaf(&ca, 900), leaf(&ca, 700));
    let scene = Scene::start(|directory| write(directory, &old, Some(&ca.cert)));
    scene.serves(&old).await;
    let directory = scene.directory.path();
    for (cert, key) in [
        (new.cert.as_str(), stranger.key.as_str()),
        (&new.cert[..300], new.key.as_str()),
        ("", ""),
        (leaf(&ca, -5).cert.as_str(), new.key.as_str()),
    ] {
        fs::write(directory.join("tls.crt"), cert).unwrap();
        fs::write(directory.join("tls.key"), key).unwrap();
        tokio::time::sleep(Duration::from_millis(1200)).await;
        scene.serves(&old).await;
    }
    fs::remove_file(directory.join("tls.key")).unwrap();
    tokio::time::sleep(Duration::from_millis(1200)).await;
    scene.serves(&old).await;
    write(directory, &new, None);
    scene.serves(&new).await;
}

#[tokio::test]
async fn an_expired_pair_is_served_only_for_want_of_a_better_one() {
    let ca = ca();
    let (expired, good) = (leaf(&ca, -60), leaf(&ca, 600));
    let scene = Scene::start(|directory| write(directory, &expired, Some(&ca.cert)));
    scene.serves(&expired).await;
    write(scene.directory.path(), &good, None);
    scene.serves(&good).await;
    write(scene.directory.path(), &expired, None);
    tokio::time::sleep(Duration::from_millis(1200)).await;
    scene.serves(&good).await;
}

#[tokio::test]
async fn without_a_ca_file_trust_is_left_to_others() {
    let leaf = leaf(&ca(), 600);
    let scene = Scene::start(|directory| write(directory, &leaf, None));
    assert_eq!(scene.trust(), Trust::Unknown);
    scene.serves(&leaf).await;
    assert_eq!(scene.trust(), Trust::External);
    assert!(*scene.source.confirmed.borrow());
}

#[tokio::test]
async fn files_may_come_later() {
    let ca = ca();
    let leaf = leaf(&ca, 600);
    let scene = Scene::start(|_| {});
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(scene.trust(), Trust::Unknown);
    write(scene.directory.path(), &leaf, Some(&ca.cert));
    scene.serves(&leaf).await;
    assert_eq!(text(&scene.trust()), ca.cert);
}

#[tokio::test]
async fn a_broken_ca_file_is_never_published() {
    let ca = ca();
    let (old, new) = (leaf(&ca, 600), leaf(&ca, 900));
    let scene = Scene::start(|directory| write(directory, &old, Some(&ca.cert)));
    scene.serves(&old).await;
    write(scene.directory.path(), &new, Some(&ca.cert[..200]));
    tokio::time::sleep(Duration::from_millis(1200)).await;
    scene.serves(&old).await;
    assert_eq!(text(&scene.trust()), ca.cert);
}
