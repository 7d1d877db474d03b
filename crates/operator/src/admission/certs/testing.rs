//! Certificates for tests.

use std::time::Duration;

use groundcrew_core::certificates::Validity;
use jiff::{SignedDuration, Timestamp};

use super::mint::{self, Minted};
use crate::admission::tls::Pair;

/// Dates around now.
pub(in crate::admission) fn valid_for(seconds: i64) -> Validity {
    let now = Timestamp::now();
    Validity { not_before: now - SignedDuration::from_secs(3600), not_after: now + SignedDuration::from_secs(seconds) }
}

pub(in crate::admission) fn ca() -> Minted {
    mint::ca(valid_for(3600)).unwrap()
}

pub(in crate::admission) fn leaf(ca: &Minted, seconds: i64) -> Minted {
    mint::leaf(ca, &["localhost".to_owned(), "127.0.0.1".to_owned()], valid_for(seconds)).unwrap()
}

pub(in crate::admission) fn pair(minted: &Minted) -> Pair {
    Pair::from_pem(minted.cert.as_bytes(), minted.key.as_bytes()).unwrap()
}

/// Waits for something that happens soon, or fails with what it waited for.
pub(in crate::admission) async fn eventually(what: &str, mut happened: impl FnMut() -> bool) {
    for _ in 0..500 {
        if happened() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("waited in vain: {what}");
}
