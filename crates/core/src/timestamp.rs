//! Pods that ask for it carry the time, written exactly once.

use jiff::Timestamp;
use serde::Serialize;

use crate::keys::{self, Lookup};
use crate::patch::PodPatch;

/// What the decision may look at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub asked: bool,
    pub stamped: bool,
    /// Being deleted, or Succeeded/Failed: nobody reads a stamp there any more.
    pub ending: bool,
}

impl Seen {
    pub fn in_annotations(annotations: &impl Lookup) -> Self {
        Self { asked: annotations.has(keys::ADDTIME), stamped: annotations.has(keys::TIMESTAMP), ending: false }
    }
}

/// What should happen to the pod, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Verdict {
    Leave(Why),
    Stamp { at: Timestamp },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Why {
    NotAsked,
    AlreadyStamped,
    Ending,
}

#[must_use]
pub fn decide(seen: Seen, now: Timestamp) -> Verdict {
    match seen {
        Seen { asked: false, .. } => Verdict::Leave(Why::NotAsked),
        Seen { stamped: true, .. } => Verdict::Leave(Why::AlreadyStamped),
        Seen { ending: true, .. } => Verdict::Leave(Why::Ending),
        _ => Verdict::Stamp { at: now },
    }
}

impl Verdict {
    /// The verdict as admission carries it out.
    pub fn contribute(&self, patch: &mut PodPatch) {
        if let Verdict::Stamp { at } = self {
            patch.annotate(keys::TIMESTAMP, text(*at));
        }
    }
}

/// RFC 3339, UTC, whole seconds.
#[must_use]
pub fn text(at: Timestamp) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const NOW: Timestamp = Timestamp::constant(1_763_000_000, 999_000_000);

    #[rstest]
    #[case::asked_with_a_value(&[("addtime", "true")], Verdict::Stamp { at: NOW })]
    #[case::asked_with_nothing(&[("addtime", "")], Verdict::Stamp { at: NOW })]
    #[case::asked_with_false(&[("addtime", "false")], Verdict::Stamp { at: NOW })]
    #[case::keys_are_case_exact(&[("AddTime", "true")], Verdict::Leave(Why::NotAsked))]
    #[case::own_timestamp_stays(&[("addtime", ""), ("timestamp", "mine")], Verdict::Leave(Why::AlreadyStamped))]
    #[case::own_empty_timestamp_stays(&[("addtime", ""), ("timestamp", "")], Verdict::Leave(Why::AlreadyStamped))]
    #[case::nothing_asked(&[], Verdict::Leave(Why::NotAsked))]
    fn annotations_decide(#[case] annotations: &[(&str, &str)], #[case] verdict: Verdict) {
        let annotations: std::collections::BTreeMap<String, String> =
            annotations.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        assert_eq!(decide(Seen::in_annotations(&annotations), NOW), verdict);
    }

    #[test]
    fn ending_pods_are_left_alone() {
        let seen = Seen { asked: true, stamped: false, ending: true };
        assert_eq!(decide(seen, NOW), Verdict::Leave(Why::Ending));
    }

    #[test]
    fn the_time_is_written_in_whole_utc_seconds() {
        assert_eq!(text(NOW), "2025-11-13T02:13:20Z");
    }
}
