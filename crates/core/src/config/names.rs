//! Names and addresses that end up in objects: what the API server would refuse there is refused here, before a pod
//! pays for it.

use std::net::{IpAddr, Ipv6Addr};

use serde_json::Value;

use super::reader::{Parsed, text, texts};
use crate::names::{is_dns_label, is_domain, is_qualified, is_word};

/// Where a server outside the cluster is reached; paths are added to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseUrl {
    pub base: String,
    /// As a certificate names it: lower case, an address without brackets.
    pub host: String,
}

/// `https://host` or `https://host:port`.
pub fn https_url(value: &Value) -> Parsed<BaseUrl> {
    let spelled = text(value)?;
    match spelled.strip_prefix("https://").and_then(host) {
        Some(host) => Ok(BaseUrl { base: spelled, host }),
        None => {
            Err((format!("expected https://host:port, got {spelled:?}"), "the path is added by groundcrew".to_owned()))
        }
    }
}

/// `http` or `https`, perhaps with a path.
pub fn http_url(value: &Value) -> Parsed<String> {
    let spelled = text(value)?;
    let rest = spelled.strip_prefix("https://").or_else(|| spelled.strip_prefix("http://"));
    let (authority, path) = rest.map_or(("", ""), |rest| rest.split_once('/').unwrap_or((rest, "")));
    if host(authority).is_some() && path.chars().all(|c| c.is_ascii_graphic() && !"?#".contains(c)) {
        return Ok(spelled);
    }
    Err((format!("expected a URL, got {spelled:?}"), "write it like http://collector:4318".to_owned()))
}

/// The host of `host` or `host:port`.
fn host(authority: &str) -> Option<String> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (address, port) = rest.split_once(']')?;
            (address.parse::<Ipv6Addr>().ok()?.to_string(), port)
        }
        None => {
            let at = authority.find(':').unwrap_or(authority.len());
            let (name, port) = authority.split_at_checked(at)?;
            // A dot at the end keeps a resolver from its search list.
            let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
            (name.parse::<IpAddr>().is_ok() || is_domain(&name)).then_some((name, port))?
        }
    };
    match port.strip_prefix(':') {
        Some(port) => port.parse::<u16>().is_ok_and(|port| port > 0).then_some(host),
        None => port.is_empty().then_some(host),
    }
}

/// The name of a namespace or of a Service.
pub fn dns_label(value: &Value) -> Parsed<String> {
    let spelled = text(value)?;
    if is_dns_label(&spelled) {
        return Ok(spelled);
    }
    Err((format!("expected a name, got {spelled:?}"), "names are made of a-z, 0-9 and -".to_owned()))
}

pub fn dns_labels(value: &Value) -> Parsed<Vec<String>> {
    texts(value)?.into_iter().map(|name| dns_label(&Value::String(name))).collect()
}

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
