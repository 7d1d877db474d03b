//! What the audit log says about our writes of nodes.

use std::collections::BTreeMap;

use groundcrew_testbed::AuditEvent;
use jiff::Timestamp;
use serde_json::Value;

use crate::support::KEY;

/// A release as the API server committed it.
pub struct Release {
    pub node: String,
    pub asked: Timestamp,
    pub done: Timestamp,
}

fn text<'e>(event: &'e AuditEvent, pointer: &str) -> Option<&'e str> {
    event.response_at(pointer).and_then(Value::as_str)
}

fn list(event: &AuditEvent) -> Vec<Value> {
    event.response_at("/spec/taints").and_then(Value::as_array).cloned().unwrap_or_default()
}

/// Every write of ours to a node. Each must differ from what was committed before by exactly our taint, which was there,
/// and no node object may be written twice.
pub fn releases(events: &[AuditEvent]) -> anyhow::Result<Vec<Release>> {
    let mut writes: Vec<&AuditEvent> =
        events.iter().filter(|e| e.is_committed_write() && e.is_about("nodes", "") && e.verb != "delete").collect();
    writes.sort_by_key(|e| text(e, "/metadata/resourceVersion").and_then(|v| v.parse::<u64>().ok()));
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
            let again = ours.insert(uid, Release { node: node.to_owned(), asked, done });
            anyhow::ensure!(again.is_none(), "{node} was written twice");
        }
        last.insert(uid, now);
    }
    Ok(ours.into_values().collect())
}

/// When each node's init pod was first committed as Ready.
pub fn first_ready(events: &[AuditEvent]) -> BTreeMap<String, Timestamp> {
    let mut ready = BTreeMap::new();
    for event in events.iter().filter(|e| e.is_committed_write() && e.is_about("pods", "status")) {
        let init = event.response_at("/metadata/labels/startup.k8s.io~1component").is_some();
        let conditions = event.response_at("/status/conditions").and_then(Value::as_array).into_iter().flatten();
        let is_ready = conditions.into_iter().any(|c| c["type"] == "Ready" && c["status"] == "True");
        if let (true, true, Some(node)) = (init, is_ready, text(event, "/spec/nodeName")) {
            ready.entry(node.to_owned()).or_insert(event.stage_timestamp);
        }
    }
    ready
}

/// No node was let go before its init pod was ready.
pub fn released_only_when_ready(events: &[AuditEvent], releases: &[Release]) -> anyhow::Result<()> {
    let ready = first_ready(events);
    for Release { node, done, .. } in releases {
        anyhow::ensure!(ready.get(node).is_some_and(|at| at < done), "{node} was released without a ready init pod");
    }
    Ok(())
}

/// What groundcrew wrote from the `from`-th event on, leases aside.
pub fn our_writes(events: &[AuditEvent], from: usize) -> Vec<String> {
    let ours = |e: &&AuditEvent| {
        e.user_agent.starts_with("groundcrew/") && e.is_committed_write() && !e.is_about("leases", "")
    };
    events.iter().skip(from).filter(ours).map(|e| format!("{} {}", e.verb, e.request_uri)).collect()
}
