use std::time::Duration;

use groundcrew_core::certificates::{Why, decide};
use jiff::SignedDuration;

use super::*;

fn rules() -> Rules {
    Rules::new(Duration::from_secs(90), Duration::from_secs(30), Duration::from_secs(5)).unwrap()
}

fn names() -> Vec<String> {
    vec!["hook.ns.svc".to_owned(), "127.0.0.1".to_owned()]
}

/// Whole seconds, like the dates in a certificate.
fn start() -> Timestamp {
    Timestamp::from_second(Timestamp::now().as_second()).unwrap()
}

fn later(seconds: i64) -> Timestamp {
    start() + SignedDuration::from_secs(seconds)
}

fn decision(contents: &Contents, now: Timestamp, published_for: Option<u64>) -> Verdict {
    let view = View::of(contents);
    decide(&rules(), view.seen(&names(), published_for.map(Duration::from_secs)), now)
}

fn step(contents: &Contents, verdict: Verdict, now: Timestamp) -> Contents {
    let after = contents.after(verdict, &rules(), &names(), now).unwrap();
    assert_eq!(Contents::from_data(&after.to_data()), after, "what is written is what is read");
    after
}

fn minted() -> Contents {
    step(&Contents::default(), Verdict::MintAll(Why::Unusable), start())
}

/// CAs in the bundle.
fn cas(contents: &Contents) -> usize {
    tls::certificates(contents.bundle().as_bytes()).unwrap().len()
}

#[test]
fn fresh_contents_need_nothing() {
    let contents = minted();
    assert!(matches!(decision(&contents, start(), None), Verdict::Keep { .. }));
    assert!(View::of(&contents).trustworthy());
    assert_eq!(View::of(&contents).leaf.unwrap().facts().names, names());
}

#[test]
fn a_whole_rotation_keeps_every_leaf_trusted() {
    let first = minted();
    let published = step(&first, Verdict::PublishNextCa(Why::Due), later(60));
    assert_eq!((cas(&published), published.leaf.clone()), (2, first.leaf.clone()));
    assert_eq!(decision(&published, later(20), Some(5)), Verdict::PromoteNextCa(Why::Published));
    let promoted = step(&published, Verdict::PromoteNextCa(Why::Published), later(65));
    assert_eq!((cas(&promoted), promoted.next.clone(), promoted.active.clone()), (2, None, published.next.clone()));
    let bundle = tls::certificates(promoted.bundle().as_bytes()).unwrap();
    for contents in [&first, &published, &promoted] {
        assert!(View::of(contents).leaf.unwrap().trusted_by(&bundle));
    }
    assert!(matches!(decision(&promoted, later(66), None), Verdict::Keep { .. }));
    let until = promoted.retired.keys().copied().next().unwrap();
    assert_eq!(until, later(90).as_second() + 1, "as long as the first CA lives, and a second for rounding");
    let dropped = step(&promoted, Verdict::DropRetired, later(92));
    assert_eq!(cas(&dropped), 1);
}

#[test]
fn a_patch_names_only_what_changes_and_guards_the_version() {
    let first = minted();
    let published = step(&first, Verdict::PublishNextCa(Why::Due), later(60));
    let promoted = step(&published, Verdict::PromoteNextCa(Why::Published), later(65));
    let patch = published.patch(&first.to_data(), "7");
    let keys = |patch: &Value| patch["data"].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(patch["metadata"], json!({ "resourceVersion": "7" }));
    assert_eq!(keys(&patch), ["ca-next.crt", "ca-next.key", "ca.crt"]);
    let mut data = published.to_data();
    data.insert("someone-elses".to_owned(), bytes("x"));
    let patch = promoted.patch(&data, "8");
    assert_eq!(patch["data"]["ca-next.key"], Value::Null);
    assert!(patch["data"].get("someone-elses").is_none());
}

#[test]
fn garbage_is_replaced_and_what_callers_trust_is_kept_where_it_can() {
    let good = minted().to_data();
    let spoil = |keys: &[&str]| {
        let mut data = good.clone();
        for key in keys {
            data.insert((*key).to_owned(), bytes("garbage"));
        }
        Contents::from_data(&data)
    };
    assert_eq!(decision(&spoil(&["tls.key"]), start(), None), Verdict::RenewLeaf(Why::Unusable));
    assert_eq!(decision(&spoil(&["tls.crt"]), start(), None), Verdict::RenewLeaf(Why::Unusable));
    assert_eq!(decision(&spoil(&["ca.crt"]), start(), None), Verdict::RewriteBundle);
    assert!(matches!(decision(&spoil(&["ca-next.crt", "ca-retired-x.crt"]), start(), None), Verdict::Keep { .. }));

    let keyless = spoil(&["ca-active.key"]);
    assert_eq!(decision(&keyless, start(), None), Verdict::MintAll(Why::Unusable));
    let mended = step(&keyless, Verdict::MintAll(Why::Unusable), start());
    assert_eq!(cas(&mended), 2, "the old CA stays trusted: its leaf may still be served");

    let lost = spoil(&["ca-active.crt", "ca-active.key", "tls.crt", "tls.key", "ca.crt"]);
    assert!(!View::of(&lost).trustworthy());
    assert_eq!(decision(&lost, start(), None), Verdict::MintAll(Why::Unusable));
    assert_eq!(cas(&step(&lost, Verdict::MintAll(Why::Unusable), start())), 1);
}

#[test]
fn bytes_that_are_no_text_do_no_harm() {
    let mut data = minted().to_data();
    for value in data.values_mut() {
        *value = ByteString(vec![0xff, 0xfe, 0]);
    }
    assert_eq!(decision(&Contents::from_data(&data), start(), None), Verdict::MintAll(Why::Unusable));
}

#[test]
fn a_leaf_of_another_name_is_renewed() {
    let contents = minted();
    let wanted = vec!["other.ns.svc".to_owned()];
    let view = View::of(&contents);
    assert_eq!(decide(&rules(), view.seen(&wanted, None), start()), Verdict::RenewLeaf(Why::NamesChanged));
}
