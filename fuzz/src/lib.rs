//! What must hold for any input. The fuzzer finds inputs by coverage, `cargo test -p groundcrew-core` by mutation.

use groundcrew_core::warmup::endpoint::{Endpoint, MAX_LEN};

/// Whatever an annotation says, what is taken as an endpoint is a path on the pod.
pub fn endpoint(text: &str) {
    let Ok(endpoint) = Endpoint::parse(text) else { return };
    let sent = endpoint.as_str();
    assert!(sent.starts_with('/') && !sent.starts_with("//"), "{text:?} names a host: {sent:?}");
    assert!(sent.len() <= MAX_LEN, "{} bytes", sent.len());
    assert!(sent.bytes().all(|b| (0x21..0x7f).contains(&b)), "{text:?} leaves the line: {sent:?}");
    assert!(!sent.contains(['@', '\\', '#']), "{text:?}: {sent:?}");
    assert_eq!(Endpoint::parse(sent).as_ref(), Ok(&endpoint), "{text:?} reads differently a second time");
}
