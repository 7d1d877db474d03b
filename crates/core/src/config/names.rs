//! Names that end up in objects: what the API server would refuse there is refused here, before a pod pays for it.

use serde_json::Value;

use super::reader::{Parsed, text};

/// A key of a label or a taint: a name, perhaps with a domain and a slash before it.
pub fn qualified_name(value: &Value) -> Parsed<String> {
    let spelled = text(value)?;
    if is_qualified(&spelled) {
        return Ok(spelled);
    }
    Err((
        format!("expected a key as labels and taints have it, got {spelled:?}"),
        "write it like example.com/name or name".to_owned(),
    ))
}

/// A label with its value; an empty one would select nodes that nobody labelled on purpose.
pub fn label(value: &Value) -> Parsed<(String, String)> {
    let spelled = text(value)?;
    match spelled.split_once('=') {
        Some((key, value)) if is_qualified(key) && is_word(value) => Ok((key.to_owned(), value.to_owned())),
        _ => Err((format!("expected a label, got {spelled:?}"), "write it like example.com/name=value".to_owned())),
    }
}

fn is_qualified(text: &str) -> bool {
    let (domain, name) = text.split_once('/').map_or((None, text), |(domain, name)| (Some(domain), name));
    domain.is_none_or(is_domain) && is_word(name)
}

/// What follows a key's slash, and the value of a label.
fn is_word(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    text.len() <= 63 && text.chars().all(inner) && edge(text.chars().next()) && edge(text.chars().last())
}

fn is_domain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_dns_label)
}

fn is_dns_label(text: &str) -> bool {
    is_word(text) && !text.contains(|c: char| c.is_ascii_uppercase() || "_.".contains(c))
}
