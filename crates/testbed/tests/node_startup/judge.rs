//! What the audit log says about our writes of nodes.

use std::collections::BTreeMap;
use std::time::Duration;

use groundcrew_testbed::{AuditEvent, Cluster};
use jiff::Timestamp;
use serde_json::Value;

use crate::support::{KEY, SOON};

/// A release as the API server committed it.
pub struct Release {
    pub node: String,
    pub version: u64,
    pub asked: Timestamp,
    pub done: Timestamp,
}

/// When a node's init pod was ready: in the order of commits, and on the clock.
pub struct Ready {
    version: u64,
    pub at: Timestamp,
}

fn text<'e>(event: &'e AuditEvent, pointer: &str) -> Option<&'e str> {
    event.response_at(pointer).and_then(Value::as_str)
}

/// One counter for all objects, so it tells which of two commits came first; times of answers do not.
fn version(event: &AuditEvent) -> u64 {
    text(event, "/metadata/resourceVersion").and_then(|v| v.parse().ok()).unwrap_or_default()
}

fn list(event: &AuditEvent) -> Vec<Value> {
    event.response_at("/spec/taints").and_then(Value::as_array).cloned().unwrap_or_default()
}

/// Every write of ours to a node. Each must differ from what was committed before by exactly our taint, which was there,
/// and no node object may be written twice.
pub fn releases(events: &[AuditEvent]) -> anyhow::Result<Vec<Release>> {
    let mut writes: Vec<&AuditEvent> =
        events.iter().filter(|e| e.is_committed_write() && e.is_about("nodes", "") && e.verb != "delete").collect();
    writes.sort_by_key(|e| version(e));
    let mut last: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
    let mut ours: BTreeMap<&str, Release> = BTreeMap::new();
    for event in writes {
        let (Some(uid), Some(node)) = (text(event, "/metadata/uid"), text(event, "/metadata/name")) else { continue };
        let now = list(event);
        if event.user_agent.starts_with("groundcrew/") {
            let before = last.get(uid).cloned().unwrap_or_default();
            let expected: Vec<Value> = before.iter().filter(|t| t["key"] != KEY).cloned().collect();
            anyhow::ensure!(before.len() == expected.len() + 1, "{node} was written without our taint: {before:?}");
            anyhow::ensure!(now == expected, "{node} should have {expected:?} and has {now:?}");
            let (asked, done) = (event.request_received_timestamp, event.stage_timestamp);
            let again = ours.insert(uid, Release { node: node.to_owned(), version: version(event), asked, done });
            anyhow::ensure!(again.is_none(), "{node} was written twice");
        }
        last.insert(uid, now);
    }
    Ok(ours.into_values().collect())
}

/// By node, when its release was asked for. A write whose answer came too late may be committed, but the log does not
/// call it a success: of a node that is free, and of whose release the log knows nothing better, it was that one.
pub fn let_go(events: &[AuditEvent], releases: &[Release]) -> BTreeMap<String, Timestamp> {
    let unanswered = |e: &&AuditEvent| {
        let open = e.code() == 0 || e.code() >= 500;
        e.user_agent.starts_with("groundcrew/") && e.verb == "patch" && e.is_about("nodes", "") && open
    };
    let mut asked = BTreeMap::new();
    for event in events.iter().filter(unanswered) {
        let node = event.object_ref.as_ref().map(|about| about.name.clone()).unwrap_or_default();
        asked.entry(node).or_insert(event.request_received_timestamp);
    }
    asked.extend(releases.iter().map(|release| (release.node.clone(), release.asked)));
    asked
}

/// Waits until the release of this node, which others have seen, is in the log.
pub async fn wait_answered(cluster: &Cluster, node: &str) -> anyhow::Result<()> {
    let deadline = tokio::time::Instant::now() + SOON;
    loop {
        let events = cluster.audit_events().await?;
        if let_go(&events, &releases(&events)?).contains_key(node) {
            return Ok(());
        }
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "the log knows of no release of {node}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// When each node's init pod was first committed as Ready.
pub fn first_ready(events: &[AuditEvent]) -> BTreeMap<String, Ready> {
    let mut ready: BTreeMap<String, Ready> = BTreeMap::new();
    for event in events.iter().filter(|e| e.is_committed_write() && e.is_about("pods", "status")) {
        let init = event.response_at("/metadata/labels/startup.k8s.io~1component").is_some();
        let conditions = event.response_at("/status/conditions").and_then(Value::as_array).into_iter().flatten();
        let is_ready = conditions.into_iter().any(|c| c["type"] == "Ready" && c["status"] == "True");
        if let (true, true, Some(node)) = (init, is_ready, text(event, "/spec/nodeName")) {
            let seen = Ready { version: version(event), at: event.stage_timestamp };
            if ready.get(node).is_none_or(|first| seen.version < first.version) {
                ready.insert(node.to_owned(), seen);
            }
        }
    }
    ready
}

/// No node was let go before its init pod was ready.
pub fn released_only_when_ready(events: &[AuditEvent], releases: &[Release]) -> anyhow::Result<()> {
    let ready = first_ready(events);
    for Release { node, version, .. } in releases {
        let before = ready.get(node).is_some_and(|ready| ready.version < *version);
        anyhow::ensure!(before, "{node} was released without a ready init pod");
    }
    Ok(())
}
