//! Whether an object in the API server is what we want, looking only at what is ours.
//!
//! What others add (labels, annotations, conditions, their own `caBundle` where we have none) is theirs and stays.

use serde_json::{Map, Value};

/// cert-manager injects a CA into objects that carry one of its annotations of this kind.
const INJECTED: &str = "cert-manager.io/inject-";

/// Where somebody was asked to inject `caBundle`, what is there is wanted: the injector hears of a new CA before our
/// files change and keeps replaced ones in its own way, so the two of us would overwrite each other without end.
pub(super) fn concede_injected(wanted: &mut Value, live: &Value) {
    let annotations = live.pointer("/metadata/annotations").and_then(Value::as_object);
    if !annotations.is_some_and(|annotations| annotations.keys().any(|key| key.starts_with(INJECTED))) {
        return;
    }
    let Some(live) = live.get("webhooks").and_then(Value::as_array) else { return };
    for entry in wanted.get_mut("webhooks").and_then(Value::as_array_mut).into_iter().flatten() {
        let found = live.iter().find(|live| live.get("name") == entry.get("name"));
        let injected = found.and_then(|live| live.pointer("/clientConfig/caBundle"));
        if let (Some(injected), Some(bundle)) = (injected, entry.pointer_mut("/clientConfig/caBundle")) {
            bundle.clone_from(injected);
        }
    }
}

/// The first place where `live` differs from `desired`, or where we own what we no longer want.
pub(super) fn difference(live: &Value, desired: &Value, manager: &str) -> Option<String> {
    // Items of a list come without `apiVersion` and `kind`.
    let parts = ["metadata", "webhooks"].into_iter().filter_map(|part| Some((part, desired.get(part)?)));
    let missing =
        parts.into_iter().find_map(|(part, desired)| missing(live.get(part).unwrap_or(&Value::Null), desired, part));
    missing.or_else(|| match owned(live, manager) {
        Some(fields) => leftover(fields, desired, ""),
        None => Some("ownership".to_owned()),
    })
}

/// The first value of `desired` that `live` does not have.
fn missing(live: &Value, desired: &Value, path: &str) -> Option<String> {
    match (live, desired) {
        (Value::Object(live), Value::Object(desired)) => desired.iter().find_map(|(key, desired)| {
            let path = format!("{path}.{key}");
            match live.get(key) {
                Some(live) => missing(live, desired, &path),
                // The API server drops what is empty.
                None => (!blank(desired)).then_some(path),
            }
        }),
        (Value::Array(live), Value::Array(desired)) if named(desired) => desired.iter().find_map(|desired| {
            let name = desired.get("name")?.as_str()?;
            let path = format!("{path}[{name}]");
            match live.iter().find(|live| live.get("name") == desired.get("name")) {
                Some(live) => missing(live, desired, &path),
                None => Some(path),
            }
        }),
        _ => (live != desired).then(|| path.to_owned()),
    }
}

fn blank(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Object(fields) => fields.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    }
}

/// Lists that the API merges by name, as opposed to those it replaces whole.
fn named(list: &[Value]) -> bool {
    !list.is_empty() && list.iter().all(|item| item.get("name").is_some_and(Value::is_string))
}

/// What the API server has noted as applied by `manager`.
fn owned<'a>(live: &'a Value, manager: &str) -> Option<&'a Value> {
    let entries = live.pointer("/metadata/managedFields")?.as_array()?;
    let text = |entry: &'a Value, key| entry.get(key).and_then(Value::as_str);
    entries
        .iter()
        .find(|entry| text(entry, "manager") == Some(manager) && text(entry, "operation") == Some("Apply"))?
        .get("fieldsV1")
}

/// The first field in a managed-fields set that `desired` does not have: `f:` names a field, `k:` a list item by key.
fn leftover(fields: &Value, desired: &Value, path: &str) -> Option<String> {
    fields.as_object()?.iter().find_map(|(key, below)| {
        let (found, step) = if let Some(field) = key.strip_prefix("f:") {
            (desired.get(field), format!(".{field}"))
        } else if let Some(item) = key.strip_prefix("k:") {
            let item: Map<String, Value> = serde_json::from_str(item).ok()?;
            (desired.as_array()?.iter().find(|desired| has(desired, &item)), format!("[{key}]"))
        } else {
            return None;
        };
        let path = format!("{path}{step}");
        match found {
            Some(found) => leftover(below, found, &path),
            None => Some(path),
        }
    })
}

fn has(item: &Value, key: &Map<String, Value>) -> bool {
    key.iter().all(|(field, value)| item.get(field) == Some(value))
}
