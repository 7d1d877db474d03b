use prometheus_client::registry::Registry;

use super::*;
use crate::admission::certs::mint;
use crate::admission::certs::testing::{ca, leaf, pair, valid_for};

#[test]
fn a_pair_tells_its_dates_and_names() {
    let validity = valid_for(60);
    let minted =
        mint::leaf(&ca(), &["a.ns.svc".to_owned(), "::1".to_owned(), "10.0.0.7".to_owned()], validity).unwrap();
    let facts = pair(&minted).facts().clone();
    assert_eq!(facts.names, ["a.ns.svc", "::1", "10.0.0.7"]);
    assert_eq!(facts.validity.not_after.as_second(), validity.not_after.as_second());
    assert_eq!(facts.validity.not_before.as_second(), validity.not_before.as_second());
}

#[test]
fn a_key_of_another_certificate_is_refused() {
    let ca = ca();
    let (one, other) = (leaf(&ca, 60), leaf(&ca, 60));
    let error = Pair::from_pem(one.cert.as_bytes(), other.key.as_bytes()).unwrap_err();
    assert!(matches!(error, PairError::Mismatch(_)), "{error}");
}

#[test]
fn half_written_files_are_refused() {
    let leaf = leaf(&ca(), 60);
    let half = &leaf.cert.as_bytes()[..leaf.cert.len() / 2];
    assert!(matches!(Pair::from_pem(half, leaf.key.as_bytes()), Err(PairError::Certificate(_))));
    let half = &leaf.key.as_bytes()[..leaf.key.len() / 2];
    assert!(matches!(Pair::from_pem(leaf.cert.as_bytes(), half), Err(PairError::Key(_))));
    assert!(matches!(Pair::from_pem(b"", b""), Err(PairError::Certificate(_))));
}

#[test]
fn an_expired_pair_is_refused_where_a_valid_one_is_asked_for() {
    let leaf = leaf(&ca(), -5);
    let now = Timestamp::now();
    let error = Pair::valid_from_pem(leaf.cert.as_bytes(), leaf.key.as_bytes(), now).unwrap_err();
    assert!(matches!(error, PairError::Expired(_)), "{error}");
    assert!(Pair::from_pem(leaf.cert.as_bytes(), leaf.key.as_bytes()).is_ok());
}

#[test]
fn trust_follows_the_signature() {
    let (one, other) = (ca(), ca());
    let pair = pair(&leaf(&one, 60));
    let roots = |ca: &mint::Minted| certificates(ca.cert.as_bytes()).unwrap();
    assert!(pair.trusted_by(&roots(&one)));
    assert!(!pair.trusted_by(&roots(&other)));
    assert!(pair.trusted_by(&[roots(&other), roots(&one)].concat()));
    assert!(!pair.trusted_by(&[]));
}

#[test]
fn a_private_key_is_never_shown() {
    let minted = leaf(&ca(), 60);
    assert!(!format!("{minted:?} {:?}", pair(&minted)).contains("PRIVATE"));
}

#[test]
fn loading_shows_in_readiness_and_metrics() {
    let mut registry = Registry::default();
    let serving = ServingCert::register(&mut registry);
    let loaded = serving.loaded();
    assert!(!*loaded.borrow());
    assert_eq!(serving.facts(), None);
    let pair = pair(&leaf(&ca(), 60));
    let facts = pair.facts().clone();
    serving.swap(pair);
    assert!(*loaded.borrow());
    assert_eq!(serving.facts(), Some(facts.clone()));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    let line = format!("groundcrew_certificate_expiry_timestamp_seconds {}", facts.validity.not_after.as_second());
    assert!(text.contains(&line), "{text}");
}
