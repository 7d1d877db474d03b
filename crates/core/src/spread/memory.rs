//! What must outlive a leader: when a workload was last moved, whether moves help, and whether spot ran dry.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Kept in the cluster, one entry per workload that has anything to remember.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Memory {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moved: Option<Timestamp>,
    /// The move that is not judged yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moving: Option<Moving>,
    /// Moves in a row that did not help.
    #[serde(skip_serializing_if = "none")]
    pub futile: u32,
    /// What things looked like when moving was given up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub given_up: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drought: Option<Drought>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn none(count: &u32) -> bool {
    *count == 0
}

/// A pod was told to make way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moving {
    /// Its uid: while it is there and does not end, the eviction did not happen.
    pub pod: String,
    /// How far off the split was before.
    pub excess: u32,
}

/// Spot capacity could not be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Drought {
    pub since: Timestamp,
    /// In a trial no more pods than this go to spot; otherwise none does.
    pub cap: u32,
    /// How often it was met: each time the return waits twice as long.
    pub times: u32,
    /// One pod is being tried on spot again.
    #[serde(default)]
    pub trial: bool,
}

impl Memory {
    /// Nothing a later decision would miss.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// New pods go to spot only while fewer of their peers are there.
    ///
    /// Without a trial that is none at all: pods on spot may be lost one after the other, and those of another revision
    /// say nothing about the next.
    #[must_use]
    pub fn spot_cap(&self) -> Option<u32> {
        self.drought.map(|drought| if drought.trial { drought.cap } else { 0 })
    }
}

/// A hash that is the same in every process and version.
#[must_use]
pub fn fingerprint<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for part in parts {
        for byte in part.bytes().chain([0xff]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_reads_back_and_an_empty_one_is_short() {
        assert_eq!(serde_json::to_string(&Memory::default()).unwrap(), "{}");
        let full = Memory {
            moved: Some(Timestamp::constant(1_800_000_000, 0)),
            moving: Some(Moving { pod: "u".into(), excess: 3 }),
            futile: 1,
            given_up: Some(fingerprint(["a", "b"])),
            drought: Some(Drought { since: Timestamp::UNIX_EPOCH, cap: 2, times: 1, trial: true }),
        };
        let text = serde_json::to_string(&full).unwrap();
        assert_eq!(serde_json::from_str::<Memory>(&text).unwrap(), full);
    }

    #[test]
    fn parts_do_not_run_into_each_other() {
        assert_ne!(fingerprint(["ab", "c"]), fingerprint(["a", "bc"]));
    }
}
