//! The API server's own record of who did what: what tests judge by, never groundcrew's logs.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::cluster::{Cluster, unique};

/// So long without a write is rest.
const CALM: Duration = Duration::from_secs(3);
const RESTLESS: Duration = Duration::from_secs(120);

/// One finished request. Bodies are recorded for changes of pods and nodes.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AuditEvent {
    /// `create`, `patch`, `watch`, …
    pub verb: String,
    /// Path and query.
    #[serde(rename = "requestURI")]
    pub request_uri: String,
    /// Who asked.
    pub user: AuditUser,
    /// With which program.
    #[serde(default)]
    pub user_agent: String,
    /// About which object; absent for requests that are not about one.
    pub object_ref: Option<AuditObject>,
    response_status: Option<ResponseStatus>,
    /// The body of the request: for a patch, the patch itself.
    pub request_object: Option<Value>,
    /// The object as committed.
    pub response_object: Option<Value>,
    /// When the request came in.
    pub request_received_timestamp: Timestamp,
    /// When it was answered.
    pub stage_timestamp: Timestamp,
    /// Notes of the API server: authorisation, webhooks that changed the object.
    #[serde(default)]
    pub annotations: std::collections::BTreeMap<String, String>,
}

/// Who sent a request.
#[derive(Clone, Debug, Deserialize)]
pub struct AuditUser {
    /// Service accounts are `system:serviceaccount:<namespace>:<name>`.
    pub username: String,
    /// Memberships.
    #[serde(default)]
    pub groups: Vec<String>,
    /// Of a service account's token: which pod it was made for.
    #[serde(default)]
    extra: std::collections::BTreeMap<String, Vec<String>>,
}

impl AuditUser {
    /// The pod whose token it is, if it is a pod's.
    #[must_use]
    pub fn pod(&self) -> Option<&str> {
        self.extra.get("authentication.kubernetes.io/pod-name")?.first().map(String::as_str)
    }
}

/// The object a request is about, as far as its path tells; a create's generated name is in the response only.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct AuditObject {
    /// Plural, for example `pods`.
    pub resource: String,
    /// For example `status` or `eviction`.
    pub subresource: String,
    /// Empty for kinds without.
    pub namespace: String,
    /// Empty for lists.
    pub name: String,
    /// Empty for the core group.
    pub api_group: String,
}

#[derive(Clone, Debug, Deserialize)]
struct ResponseStatus {
    #[serde(default)]
    code: u16,
}

impl AuditEvent {
    /// The HTTP status; 0 when the request ended without one.
    #[must_use]
    pub fn code(&self) -> u16 {
        self.response_status.as_ref().map_or(0, |status| status.code)
    }

    /// Whether it changed something.
    #[must_use]
    pub fn is_committed_write(&self) -> bool {
        let writes = ["create", "update", "patch", "delete", "deletecollection"];
        writes.contains(&self.verb.as_str())
            && (200..300).contains(&self.code())
            && !self.request_uri.contains("dryRun=")
    }

    /// Whether it is about this resource, for example `("pods", "")` or `("pods", "eviction")`.
    #[must_use]
    pub fn is_about(&self, resource: &str, subresource: &str) -> bool {
        self.object_ref.as_ref().is_some_and(|about| about.resource == resource && about.subresource == subresource)
    }

    /// `namespace/name` of the object, from the response where the request did not know it.
    #[must_use]
    pub fn object_key(&self) -> Option<String> {
        let about = self.object_ref.as_ref()?;
        let named = self.response_at("/metadata/name").and_then(Value::as_str);
        let name = if about.name.is_empty() { named? } else { &about.name };
        Some(format!("{}/{name}", about.namespace))
    }

    /// A value of the committed object by JSON pointer.
    #[must_use]
    pub fn response_at(&self, pointer: &str) -> Option<&Value> {
        self.response_object.as_ref()?.pointer(pointer)
    }

    /// An annotation of the committed object.
    #[must_use]
    pub fn response_annotation(&self, key: &str) -> Option<&str> {
        self.response_at("/metadata/annotations")?.get(key)?.as_str()
    }
}

impl Cluster {
    /// Every request that was answered before this call, in the order in which the server answered.
    ///
    /// # Guarantees
    /// A marked request of our own is sent and awaited in the log, so nothing answered earlier is still unwritten.
    ///
    /// # Errors
    /// The API server does not answer or its log cannot be read.
    pub async fn audit_events(&self) -> anyhow::Result<Vec<AuditEvent>> {
        let marker = unique("audit-marker");
        let request = http::Request::get(format!("/version?{marker}")).body(Vec::new())?;
        self.client().request_text(request).await?;
        let began = Instant::now();
        loop {
            let text = read(&self.info().audit_log).await?;
            if text.contains(&marker) {
                return text.lines().filter(|line| !line.contains(&marker)).map(parse).collect();
            }
            anyhow::ensure!(began.elapsed() < Duration::from_secs(10), "the audit log does not follow");
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until groundcrew rests: what a new leader does once may still be under way. How many events came before.
    ///
    /// # Errors
    /// After two minutes, with what it last wrote.
    pub async fn rest(&self) -> anyhow::Result<usize> {
        let began = Instant::now();
        let mut before = self.audit_events().await?.len();
        loop {
            sleep(CALM).await;
            let events = self.audit_events().await?;
            let writes = our_writes(&events, before);
            if writes.is_empty() {
                return Ok(events.len());
            }
            anyhow::ensure!(began.elapsed() < RESTLESS, "no rest: {writes:?}");
            before = events.len();
        }
    }
}

/// What groundcrew wrote from the `from`-th event on, leases aside.
#[must_use]
pub fn our_writes(events: &[AuditEvent], from: usize) -> Vec<String> {
    let ours = |e: &&AuditEvent| {
        e.user_agent.starts_with("groundcrew/") && e.is_committed_write() && !e.is_about("leases", "")
    };
    events.iter().skip(from).filter(ours).map(|e| format!("{} {}", e.verb, e.request_uri)).collect()
}

async fn read(path: &Path) -> anyhow::Result<String> {
    let bytes = tokio::fs::read(path).await;
    let bytes = bytes.with_context(|| format!("cannot read the audit log {}", path.display()))?;
    Ok(String::from_utf8(whole_lines(bytes))?)
}

/// The server may be in the midst of the last one, even of a character of it.
fn whole_lines(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
    bytes.truncate(end);
    bytes
}

fn parse(line: &str) -> anyhow::Result<AuditEvent> {
    serde_json::from_str(line).with_context(|| format!("not an audit event: {line}"))
}

#[cfg(test)]
mod tests {
    use super::{parse, whole_lines};

    const PATCH: &str = r#"{"kind":"Event","apiVersion":"audit.k8s.io/v1","level":"RequestResponse","auditID":"1",
        "stage":"ResponseComplete","requestURI":"/api/v1/namespaces/a/pods/b?fieldManager=x","verb":"patch",
        "user":{"username":"u","groups":["g"]},"sourceIPs":["127.0.0.1"],"userAgent":"agent/1",
        "objectRef":{"resource":"pods","namespace":"a","name":"b","apiVersion":"v1"},
        "responseStatus":{"metadata":{},"code":200},"requestObject":[{"op":"add"}],
        "responseObject":{"metadata":{"name":"b","annotations":{"k":"v"}}},
        "requestReceivedTimestamp":"2026-01-01T00:00:00.000001Z","stageTimestamp":"2026-01-01T00:00:00.000002Z"}"#;

    #[test]
    fn committed_patch_tells_who_what_and_the_result() {
        let event = parse(PATCH).unwrap();
        assert!(event.is_committed_write() && event.is_about("pods", ""));
        assert_eq!((event.code(), event.object_key().as_deref()), (200, Some("a/b")));
        assert_eq!(event.response_annotation("k"), Some("v"));
    }

    #[test]
    fn dry_run_is_no_write() {
        let event = parse(&PATCH.replace("fieldManager=x", "dryRun=All")).unwrap();
        assert!(!event.is_committed_write());
    }

    #[test]
    fn a_line_that_is_still_being_written_is_not_read() {
        let log = "{\"a\":1}\n{\"b\":\"ü\"}\n";
        for length in 0..log.len() {
            let read = whole_lines(log.as_bytes()[..length].to_vec());
            assert!(read.is_empty() || read == b"{\"a\":1}\n", "{length}: {read:?}");
        }
        assert_eq!(whole_lines(log.into()), log.as_bytes());
    }
}
