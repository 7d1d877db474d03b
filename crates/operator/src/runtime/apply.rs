//! The one writer: every change a feature makes to an object goes through here.
//!
//! The keepers of the webhook configurations and of the certificates need the whole answer of a write and make their own,
//! under the same permits.
//!
//! # Guarantees
//! - A write starts only under a permit of the lease and has ended, or is given up, five seconds later.
//! - Once sent it is seen through, even if nobody waits for its outcome any more.
//! - It is sent once. Nothing below retries it: an eviction refused now must not land minutes later.
//! - It carries the uid and, where it was decided on a state, the resourceVersion or a `test` of it.
//! - The server is told the same deadline. It retries an eviction that meets a conflict for ten seconds on its own, and
//!   such a late success would be nobody's decision any more.
//!
//! # Caveats
//! A write that timed out may still have been made. Callers decide again from what they then see.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use groundcrew_core::feature::Feature;
use json_patch::Patch as JsonPatch;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Request};
use kube::core::Status;
use kube::core::response::StatusCause;
use kube::{Client, Resource};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::sleep;

pub use super::leadership::DEADLINE;
use super::leadership::Leadership;

/// Owner of the fields we apply.
pub const FIELD_MANAGER: &str = "groundcrew";
/// Retries after a conflict; the sixth loser waits for the next event.
const CONFLICT_RETRIES: usize = 5;

/// The object a write is for: its address, and which object under that name is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    collection: String,
    name: String,
    uid: String,
}

impl Target {
    #[must_use]
    pub fn of<K: Resource<DynamicType = ()>>(namespace: Option<&str>, name: &str, uid: &str) -> Self {
        Self { collection: K::url_path(&(), namespace), name: name.to_owned(), uid: uid.to_owned() }
    }
}

/// What is to be done to it.
#[derive(Clone, Debug)]
pub enum Write {
    /// JSON merge patch, refused by the server unless the object still is this version.
    Merge {
        version: String,
        patch: Value,
    },
    /// JSON merge patch of an object that is ours alone, where the last word counts.
    Record(Value),
    /// JSON Patch; its own `test` operations say which state it was decided on.
    Json(JsonPatch),
    /// JSON Patch of the `status` subresource; custom resources know no strategic merge.
    JsonStatus(JsonPatch),
    /// Strategic merge of `status`, which keeps the conditions of others.
    Status(Value),
    /// The same with metadata of its own, for what must be written together with the status.
    StatusPatch(Value),
    /// JSON merge patch of the `status` of a custom resource, which knows no strategic merge.
    MergeStatus(Value),
    /// In-place resize of a pod.
    Resize(Value),
    /// Server-side apply of the fields we own.
    Apply(Value),
    /// Through the eviction API, so that every PodDisruptionBudget is asked. A refused precondition has already taken
    /// its share of the budget for two minutes: a dry run before it takes nothing.
    Evict {
        version: Option<String>,
        dry_run: bool,
        /// What is left of the time in which the decision holds.
        within: Duration,
    },
    Delete {
        version: Option<String>,
    },
}

impl Write {
    const fn name(&self) -> &'static str {
        match self {
            Write::Merge { .. } => "merge",
            Write::Record(_) => "record",
            Write::Json(_) => "json_patch",
            Write::JsonStatus(_) | Write::Status(_) | Write::StatusPatch(_) | Write::MergeStatus(_) => "status",
            Write::Resize(_) => "resize",
            Write::Apply(_) => "apply",
            Write::Evict { .. } => "evict",
            Write::Delete { .. } => "delete",
        }
    }

    const fn deadline(&self) -> Duration {
        match self {
            Write::Evict { within, .. } => *within,
            _ => DEADLINE,
        }
    }
}

/// How a write ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Made; the object now has this resourceVersion, where the answer told.
    Done(Option<String>),
    /// The object is not there any more, or another one has its name.
    Gone,
    /// It is not what the decision saw: read it again and decide again.
    Conflict,
    /// A PodDisruptionBudget says no, for now.
    Blocked { retry_after: Option<Duration> },
    /// This replica does not lead, or not for long enough.
    NotLeader,
}

#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The same write will be refused again: a right is missing or the content is wrong.
    #[error("refused: {}", .0.message)]
    Refused(Box<Status>),
    #[error("failed: {0}")]
    Failed(#[source] Box<kube::Error>),
    #[error("no answer within {DEADLINE:?}")]
    Timeout,
    #[error("cannot be written as a request: {0}")]
    Request(String),
}

impl WriteError {
    #[must_use]
    pub const fn category(&self) -> &'static str {
        match self {
            WriteError::Refused(_) => "refused",
            WriteError::Failed(_) => "failed",
            WriteError::Timeout => "timeout",
            WriteError::Request(_) => "request",
        }
    }

    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        matches!(self, WriteError::Failed(_) | WriteError::Timeout)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    feature: &'static str,
    operation: &'static str,
    outcome: &'static str,
}

/// Counts writes.
#[derive(Clone, Debug, Default)]
pub struct Metrics(Family<Labels, Counter>);

impl Metrics {
    /// Registers `groundcrew_writes_total`.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register("groundcrew_writes", "Writes to the API server by how they ended", metrics.0.clone());
        metrics
    }

    fn count(&self, feature: Feature, operation: &'static str, result: &Result<Outcome, WriteError>) {
        let outcome = match result {
            Ok(Outcome::Done(_)) => "done",
            Ok(Outcome::Gone) => "gone",
            Ok(Outcome::Conflict) => "conflict",
            Ok(Outcome::Blocked { .. }) => "blocked",
            Ok(Outcome::NotLeader) => "not_leader",
            Err(error) => error.category(),
        };
        self.0.get_or_create(&Labels { feature: feature.name(), operation, outcome }).inc();
    }
}

/// Carries verdicts out; cheap to clone.
#[derive(Clone)]
pub struct Writer {
    client: Client,
    leadership: Leadership,
    metrics: Metrics,
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").field("leads", &self.leadership.is_leader()).finish_non_exhaustive()
    }
}

/// The only part of an answer that is read.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Written {
    metadata: WrittenMeta,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct WrittenMeta {
    resource_version: Option<String>,
}

impl Writer {
    /// `client` must not retry: [`super::client::Clients::write`].
    #[must_use]
    pub fn new(client: Client, leadership: Leadership, metrics: Metrics) -> Self {
        Self { client, leadership, metrics }
    }

    /// For writes that any replica may make, such as those of a node's own agent.
    #[must_use]
    pub fn for_any_replica(client: Client, metrics: Metrics) -> Self {
        Self::new(client, Leadership::always(), metrics)
    }

    pub async fn write(&self, feature: Feature, target: &Target, write: &Write) -> Result<Outcome, WriteError> {
        let result = self.attempt(target, write).await;
        self.metrics.count(feature, write.name(), &result);
        result
    }

    async fn attempt(&self, target: &Target, write: &Write) -> Result<Outcome, WriteError> {
        let Some(permit) = self.leadership.permit(write.deadline()) else { return Ok(Outcome::NotLeader) };
        let request = bounded(request(target, write)?, permit.left())?;
        let client = self.client.clone();
        let answer = permit.see_through(async move { client.request::<Written>(request).await }).await;
        match answer.map_err(|_| WriteError::Timeout)? {
            Ok(written) => Ok(Outcome::Done(written.metadata.resource_version)),
            Err(kube::Error::Api(status)) => judge(write, status),
            // The write was made; only its answer is of a form we do not know.
            Err(kube::Error::SerdeError(_)) => Ok(Outcome::Done(None)),
            Err(error) => Err(WriteError::Failed(Box::new(error))),
        }
    }
}

/// What a refusal of the server means for this write.
fn judge(write: &Write, status: Box<Status>) -> Result<Outcome, WriteError> {
    match (status.code, write) {
        (404, _) => Ok(Outcome::Gone),
        _ if is_another_object(&status) => Ok(Outcome::Gone),
        (409, _) => Ok(Outcome::Conflict),
        // Validation names its causes; a patch that does not apply, a failed `test` first of all, has none.
        (422, Write::Json(_) | Write::JsonStatus(_)) if causes(&status).next().is_none() => Ok(Outcome::Conflict),
        // Without this cause it is the API server itself that is busy.
        (429, Write::Evict { .. }) if causes(&status).any(|cause| cause.reason == "DisruptionBudget") => {
            let seconds = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
            let retry_after = (seconds > 0).then(|| Duration::from_secs(u64::from(seconds)));
            Ok(Outcome::Blocked { retry_after })
        }
        // Two budgets on one pod: no attempt will ever succeed.
        (500, Write::Evict { .. }) if status.message.contains("more than one PodDisruptionBudget") => {
            Err(WriteError::Refused(status))
        }
        (504, _) => Err(WriteError::Timeout),
        (code, _) if code == 429 || code >= 500 => Err(WriteError::Failed(Box::new(kube::Error::Api(status)))),
        _ => Err(WriteError::Refused(status)),
    }
}

fn causes(status: &Status) -> impl Iterator<Item = &StatusCause> {
    status.details.iter().flat_map(|details| &details.causes)
}

/// A wrong uid is a change of an immutable field to a patch, and a failed precondition to delete and evict.
fn is_another_object(status: &Status) -> bool {
    match status.code {
        409 => status.message.contains("the UID in the precondition"),
        422 => causes(status).any(|cause| cause.field == "metadata.uid"),
        _ => false,
    }
}

/// Tells the server how long we will wait, so that it does not go on after us.
fn bounded(mut request: http::Request<Vec<u8>>, left: Duration) -> Result<http::Request<Vec<u8>>, WriteError> {
    let uri = request.uri();
    let separator = if uri.query().is_some() { '&' } else { '?' };
    *request.uri_mut() = format!("{uri}{separator}timeout={}ms", left.as_millis().max(1))
        .parse()
        .map_err(|e: http::uri::InvalidUri| WriteError::Request(e.to_string()))?;
    Ok(request)
}

fn request(target: &Target, write: &Write) -> Result<http::Request<Vec<u8>>, WriteError> {
    let Target { collection, name, uid } = target;
    let address = Request::new(collection.as_str());
    let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
    let built = match write {
        Write::Merge { version, patch } => {
            let guard = json!({"metadata": {"uid": uid, "resourceVersion": version}});
            address.patch(name, &params, &Patch::Merge(merged(patch.clone(), &guard)))
        }
        Write::Record(patch) => address.patch(name, &params, &Patch::Merge(patch)),
        Write::Json(patch) => address.patch(name, &params, &Patch::<()>::Json(patch.clone())),
        Write::JsonStatus(patch) => {
            address.patch_subresource("status", name, &params, &Patch::<()>::Json(patch.clone()))
        }
        Write::Status(status) => {
            let body = json!({"metadata": {"uid": uid}, "status": status});
            address.patch_subresource("status", name, &params, &Patch::Strategic(body))
        }
        Write::StatusPatch(patch) => {
            let body = merged(patch.clone(), &json!({"metadata": {"uid": uid}}));
            address.patch_subresource("status", name, &params, &Patch::Strategic(body))
        }
        Write::MergeStatus(status) => {
            let body = json!({"metadata": {"uid": uid}, "status": status});
            address.patch_subresource("status", name, &params, &Patch::Merge(body))
        }
        Write::Resize(spec) => {
            let body = json!({"metadata": {"uid": uid}, "spec": spec});
            address.patch_subresource("resize", name, &params, &Patch::Strategic(body))
        }
        Write::Apply(object) => {
            let params = PatchParams { force: true, ..params };
            address.patch(name, &params, &Patch::Apply(object))
        }
        Write::Evict { version, dry_run, .. } => {
            let body = to_bytes(&eviction(target, version.as_deref(), *dry_run))?;
            let params = PostParams { dry_run: *dry_run, ..PostParams::default() };
            address.create_subresource("eviction", name, &params, body)
        }
        Write::Delete { version } => {
            let preconditions = kube::api::Preconditions { uid: Some(uid.clone()), resource_version: version.clone() };
            address.delete(name, &DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() })
        }
    };
    built.map_err(|e| WriteError::Request(e.to_string()))
}

fn to_bytes(body: &impl Serialize) -> Result<Vec<u8>, WriteError> {
    serde_json::to_vec(body).map_err(|e| WriteError::Request(e.to_string()))
}

/// Written by hand: kube's own helper spells `deleteOptions` in a way the server ignores, and then a wrong uid or a
/// dry run evicts for real.
fn eviction(target: &Target, version: Option<&str>, dry_run: bool) -> Value {
    let mut preconditions = json!({"uid": target.uid});
    if let (Some(version), Some(map)) = (version, preconditions.as_object_mut()) {
        map.insert("resourceVersion".to_owned(), json!(version));
    }
    let mut options = json!({"preconditions": preconditions});
    if let (true, Some(map)) = (dry_run, options.as_object_mut()) {
        map.insert("dryRun".to_owned(), json!(["All"]));
    }
    json!({
        "apiVersion": "policy/v1", "kind": "Eviction",
        "metadata": {"name": target.name}, "deleteOptions": options,
    })
}

fn merged(mut patch: Value, guard: &Value) -> Value {
    json_patch::merge(&mut patch, guard);
    patch
}

/// Writes, and after a conflict reads and writes again, but never repeats what came before the first write.
///
/// `write` returns `None` when the state read leaves nothing to do.
pub async fn settle<S, E, W, R>(
    first: S,
    mut write: impl FnMut(S) -> W,
    mut read: impl FnMut() -> R,
) -> Result<Option<Outcome>, E>
where
    W: Future<Output = Result<Option<Outcome>, E>>,
    R: Future<Output = Result<Option<S>, E>>,
{
    let delays = ExponentialBuilder::default()
        .with_min_delay(Duration::from_millis(20))
        .with_max_delay(Duration::from_secs(1))
        .with_max_times(CONFLICT_RETRIES)
        .with_jitter();
    let mut state = first;
    for delay in delays.build() {
        match write(state).await? {
            Some(Outcome::Conflict) => sleep(delay).await,
            settled => return Ok(settled),
        }
        match read().await? {
            Some(fresh) => state = fresh,
            None => return Ok(Some(Outcome::Gone)),
        }
    }
    write(state).await
}

/// A pod as the target of a write.
#[must_use]
pub fn pod(namespace: &str, name: &str, uid: &str) -> Target {
    Target::of::<Pod>(Some(namespace), name, uid)
}

#[cfg(test)]
mod tests;
