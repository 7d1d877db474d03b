//! Whatever an annotation says, what is taken as an endpoint is a path on the pod.
#![no_main]

use groundcrew_core::warmup::endpoint::{Endpoint, MAX_LEN};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(endpoint) = Endpoint::parse(text) {
        let sent = endpoint.as_str();
        assert!(sent.starts_with('/') && !sent.starts_with("//"));
        assert!(sent.len() <= MAX_LEN && sent.bytes().all(|b| (0x21..0x7f).contains(&b)));
        assert!(!sent.contains(['@', '\\', '#']));
        assert_eq!(Endpoint::parse(sent).as_ref(), Ok(&endpoint));
    }
});
