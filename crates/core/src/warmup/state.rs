//! What is written on the pod: one condition for the kubelet and people, one annotation for whoever comes next.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::facts::Seen;
use crate::keys;
use crate::timestamp;

/// Conditions are read in a terminal; what a server says about itself may be long.
const MAX_MESSAGE: usize = 1024;

/// How far the warm-up of these containers got. Survives agent, leader and kubelet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct State {
    /// Container IDs, sorted. With others, all of this is history.
    pub containers: Vec<String>,
    pub phase: Phase,
    /// From 1.
    pub attempt: u32,
    /// How often this attempt was begun; more than once only when an agent died in it.
    pub starts: u32,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub sent: u32,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub succeeded: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<Timestamp>,
    /// Since when it waits for a place; only while it is queued. Written by one node's clock and read by the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_zero(n: &u32) -> bool {
    *n == 0
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Phase {
    Queued,
    Running,
    /// Put down by an agent on its way out, with the requests counted.
    HandedOver,
    Failed,
    Done,
}

/// The condition's reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Reason {
    WarmupQueued,
    WarmupRunning,
    WarmupStale,
    WarmupComplete,
    WarmupFailed,
    WarmupFailedOpen,
    AgentUnavailable,
}

impl Reason {
    pub const ALL: &'static [Self] = &[
        Self::WarmupQueued,
        Self::WarmupRunning,
        Self::WarmupStale,
        Self::WarmupComplete,
        Self::WarmupFailed,
        Self::WarmupFailedOpen,
        Self::AgentUnavailable,
    ];

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::WarmupQueued => "WarmupQueued",
            Self::WarmupRunning => "WarmupRunning",
            Self::WarmupStale => "WarmupStale",
            Self::WarmupComplete => "WarmupComplete",
            Self::WarmupFailed => "WarmupFailed",
            Self::WarmupFailedOpen => "WarmupFailedOpen",
            Self::AgentUnavailable => "AgentUnavailable",
        }
    }

    /// Whether the gate is open with it.
    #[must_use]
    pub const fn opens(self) -> bool {
        matches!(self, Self::WarmupComplete | Self::WarmupFailedOpen | Self::AgentUnavailable)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One write: the condition and the memory go together or not at all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Write {
    pub reason: Reason,
    pub message: String,
    pub state: State,
}

impl Write {
    pub(super) fn new(reason: Reason, message: &str, state: State) -> Self {
        Self { reason, message: one_line(message), state }
    }

    /// Whether the pod says all of this already.
    #[must_use]
    pub fn is_known(&self, seen: &Seen<'_>) -> bool {
        seen.state().as_ref() == Some(&self.state)
            && seen.condition().is_some_and(|c| {
                c.reason.as_deref() == Some(self.reason.name())
                    && c.message.as_deref() == Some(&self.message)
                    && (c.status == "True") == self.reason.opens()
            })
    }

    /// A strategic merge patch of `pods/status`: conditions merge by type, so nobody else's is touched, and the uid
    /// makes it fail on a pod of the same name. Without `resource_version` it cannot conflict with other writers.
    #[must_use]
    pub fn patch(&self, uid: &str, resource_version: Option<&str>, open_now: Option<bool>, now: Timestamp) -> Value {
        let opens = self.reason.opens();
        let mut condition = json!({
            "type": keys::WARMUP_READY,
            "status": if opens { "True" } else { "False" },
            "reason": self.reason.name(),
            "message": self.message,
        });
        // A transition is a change of status; without one the old time stays.
        if let Some(fields) = condition.as_object_mut().filter(|_| open_now != Some(opens)) {
            fields.insert("lastTransitionTime".to_owned(), json!(timestamp::text(now)));
        }
        let state = serde_json::to_string(&self.state).unwrap_or_default();
        let mut metadata = json!({"uid": uid, "annotations": {keys::WARMUP_STATE: state}});
        if let (Some(fields), Some(version)) = (metadata.as_object_mut(), resource_version) {
            fields.insert("resourceVersion".to_owned(), json!(version));
        }
        json!({"metadata": metadata, "status": {"conditions": [condition]}})
    }
}

/// What servers send must not break lines or terminals.
fn one_line(text: &str) -> String {
    let mut line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_MESSAGE).collect();
    if text.chars().nth(MAX_MESSAGE).is_some() {
        line.pop();
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::constant(1_763_000_000, 0);

    fn write(reason: Reason, message: &str) -> Write {
        let state = State {
            containers: vec!["containerd://a".to_owned()],
            phase: Phase::Done,
            attempt: 1,
            starts: 1,
            sent: 0,
            succeeded: 0,
            next: None,
            since: None,
        };
        Write::new(reason, message, state)
    }

    #[test]
    fn only_our_condition_and_our_annotation_are_written() {
        let patch = write(Reason::WarmupComplete, "done").patch("u1", None, Some(false), NOW);
        assert_eq!(
            patch,
            json!({
                "metadata": {"uid": "u1", "annotations": {"kube-booster.io/warmup-state":
                    r#"{"containers":["containerd://a"],"phase":"done","attempt":1,"starts":1}"#}},
                "status": {"conditions": [{"type": "kube-booster.io/warmup-ready", "status": "True",
                    "reason": "WarmupComplete", "message": "done", "lastTransitionTime": "2025-11-13T02:13:20Z"}]},
            })
        );
    }

    #[test]
    fn the_transition_time_moves_with_the_status_only() {
        let time = |reason, open| {
            let patch = write(reason, "").patch("u", Some("7"), open, NOW);
            assert_eq!(patch["metadata"]["resourceVersion"], "7");
            patch["status"]["conditions"][0].get("lastTransitionTime").is_some()
        };
        assert!(time(Reason::WarmupRunning, None));
        assert!(!time(Reason::WarmupRunning, Some(false)));
        assert!(time(Reason::WarmupComplete, Some(false)));
        assert!(time(Reason::WarmupStale, Some(true)));
        assert!(!time(Reason::AgentUnavailable, Some(true)));
    }

    #[test]
    fn a_message_is_one_line_of_bounded_length() {
        assert_eq!(write(Reason::WarmupFailed, "a\r\n\u{1b}[31mb").message, "a   [31mb");
        let long = write(Reason::WarmupFailed, &"é".repeat(5000)).message;
        assert_eq!(long.chars().count(), MAX_MESSAGE);
        assert!(long.ends_with('…'));
    }
}
