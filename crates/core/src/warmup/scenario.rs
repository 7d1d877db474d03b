//! What a `WarmupConfig` says: steps in order, with values carried from one response into later requests.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::endpoint::Endpoint;
use super::rules::{GrpcMethod, MAX_DURATION, MAX_REQUESTS, Protocol};
use crate::duration;

const MAX_HEADERS: usize = 50;
const MAX_BODY: usize = 65_536;
/// One extracted value: a token or an id, not a document.
const MAX_VALUE: usize = 8 * 1024;
/// All of them together.
const MAX_VALUES: usize = 256 * 1024;
/// A value can stand in many places, so what a request has grown to is limited as well: all its texts together.
const MAX_FILLED: usize = 2 * MAX_BODY;
/// A parsed response can take a hundred times its length in memory.
const MAX_PARSED: usize = 256 * 1024;
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(120);
const DEFAULT_STEP_TIMEOUT: Duration = Duration::from_secs(30);

/// `spec` of a WarmupConfig as it is written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<String>,
    pub steps: Vec<StepSpec>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StepSpec {
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<String>,
    pub requests: Vec<RequestSpec>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RequestSpec {
    pub name: String,
    pub protocol: Option<String>,
    pub endpoint: Option<String>,
    pub method: Option<String>,
    pub headers: BTreeMap<String, String>,
    pub body: Option<String>,
    pub grpc_method: Option<String>,
    pub grpc_payload: Option<String>,
    pub count: Option<u32>,
    pub extract: BTreeMap<String, String>,
    pub expected_status: Option<u16>,
}

/// A spec with every value checked that can be checked before variables are known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Scenario {
    pub timeout: Duration,
    pub steps: Vec<Step>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    pub name: String,
    pub timeout: Duration,
    pub requests: Vec<Request>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Request {
    pub name: String,
    /// Absent means the pod's own.
    pub protocol: Option<Protocol>,
    endpoint: String,
    pub method: String,
    headers: BTreeMap<String, String>,
    body: String,
    pub grpc_method: Option<GrpcMethod>,
    grpc_payload: String,
    pub count: u32,
    pub extract: BTreeMap<String, Path>,
    /// Absent means 200–399.
    pub expected_status: Option<u16>,
}

/// A request with its variables filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filled {
    pub endpoint: Endpoint,
    pub headers: Vec<(String, String)>,
    pub body: String,
    pub grpc_payload: String,
}

pub type Variables = BTreeMap<String, String>;

impl Scenario {
    /// Problems name the place in the spec.
    pub fn read(spec: &Spec) -> Result<Self, String> {
        let timeout = timeout(spec.timeout.as_deref(), DEFAULT_TIMEOUT).map_err(|e| format!("spec.timeout: {e}"))?;
        if spec.steps.is_empty() {
            return Err("spec.steps: at least one step is needed".to_owned());
        }
        let steps = spec.steps.iter().enumerate();
        let steps = steps.map(|(i, step)| Step::read(step).map_err(|e| format!("spec.steps[{i}].{e}")));
        let scenario = Self { timeout, steps: steps.collect::<Result<_, _>>()? };
        scenario.variables_come_from_earlier_requests()?;
        Ok(scenario)
    }

    /// How many requests it sends when nothing ends it early.
    #[must_use]
    pub fn planned(&self) -> u32 {
        self.steps.iter().flat_map(|step| &step.requests).fold(0, |sum, request| sum.saturating_add(request.count))
    }

    fn variables_come_from_earlier_requests(&self) -> Result<(), String> {
        let mut known = BTreeSet::new();
        for (s, step) in self.steps.iter().enumerate() {
            for (r, request) in step.requests.iter().enumerate() {
                if let Some(unknown) = request.variables().find(|name| !known.contains(name)) {
                    return Err(format!(
                        "spec.steps[{s}].requests[{r}]: {{{{{unknown}}}}} is not extracted by any request before it"
                    ));
                }
                known.extend(request.extract.keys().map(String::as_str));
            }
        }
        Ok(())
    }
}

impl Step {
    fn read(spec: &StepSpec) -> Result<Self, String> {
        let timeout = timeout(spec.timeout.as_deref(), DEFAULT_STEP_TIMEOUT).map_err(|e| format!("timeout: {e}"))?;
        if spec.requests.is_empty() {
            return Err("requests: at least one request is needed".to_owned());
        }
        let requests = spec.requests.iter().enumerate();
        let requests = requests.map(|(i, request)| Request::read(request).map_err(|e| format!("requests[{i}].{e}")));
        Ok(Self { name: spec.name.clone(), timeout, requests: requests.collect::<Result<_, _>>()? })
    }
}

fn timeout(text: Option<&str>, default: Duration) -> Result<Duration, String> {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(default) };
    let parsed = duration::parse(text).map_err(|e| format!("invalid value {text:?}: {e}"))?;
    if parsed.is_zero() || parsed > MAX_DURATION {
        return Err(format!("must be more than 0s and at most 5m, got {}", duration::text(parsed)));
    }
    Ok(parsed)
}

impl Request {
    fn read(spec: &RequestSpec) -> Result<Self, String> {
        let given = |value: &Option<String>| value.clone().filter(|text| !text.is_empty());
        let at = |place: &str, result: Result<(), String>| result.map_err(|e| format!("{place}: {e}"));
        let method = given(&spec.method).unwrap_or_else(|| "GET".to_owned());
        at("method", if is_token(&method) { Ok(()) } else { Err(format!("{method:?} is no HTTP method")) })?;
        at("headers", headers_fit(&spec.headers))?;
        let body = given(&spec.body).unwrap_or_default();
        at("body", if body.len() <= MAX_BODY { Ok(()) } else { Err(format!("is longer than {MAX_BODY} bytes")) })?;
        let count = spec.count.unwrap_or(1);
        at(
            "count",
            if (1..=MAX_REQUESTS).contains(&count) { Ok(()) } else { Err(format!("must be 1 to 12000, got {count}")) },
        )?;
        let expected_status = spec.expected_status.filter(|status| *status != 0);
        let status_fits = expected_status.is_none_or(|status| (100..=599).contains(&status));
        at("expectedStatus", if status_fits { Ok(()) } else { Err("must be 0 or 100 to 599".to_owned()) })?;
        let endpoint = given(&spec.endpoint).unwrap_or_else(|| "/".to_owned());
        if !endpoint.contains("{{") {
            Endpoint::parse(&endpoint).map_err(|e| format!("endpoint: {e}"))?;
        }
        let extract = spec.extract.iter().map(|(name, path)| {
            let path = Path::parse(path).map_err(|e| format!("extract.{name}: {e}"))?;
            if is_variable(name) {
                Ok((name.clone(), path))
            } else {
                Err(format!("extract: {name:?} is no variable name"))
            }
        });
        Ok(Self {
            name: spec.name.clone(),
            protocol: given(&spec.protocol)
                .map(|text| Protocol::parse(&text).map_err(|e| format!("protocol: {e}, got {text:?}")))
                .transpose()?,
            endpoint,
            method,
            headers: spec.headers.clone(),
            body,
            grpc_method: given(&spec.grpc_method)
                .map(|text| GrpcMethod::parse(&text).map_err(|e| format!("grpcMethod: {e}, got {text:?}")))
                .transpose()?,
            grpc_payload: given(&spec.grpc_payload).unwrap_or_else(|| "{}".to_owned()),
            count,
            extract: extract.collect::<Result<_, _>>()?,
            expected_status,
        })
    }

    /// Puts the variables in. The endpoint is judged again: a value must not lead to another host either.
    pub fn fill(&self, variables: &Variables) -> Result<Filled, String> {
        let mut room = MAX_FILLED;
        let mut substitute = |text: &str| substitute(text, variables, &mut room);
        let endpoint = substitute(&self.endpoint)?;
        let (body, grpc_payload) = (substitute(&self.body)?, substitute(&self.grpc_payload)?);
        let headers = self.headers.iter().map(|(name, value)| {
            let value = substitute(value)?;
            if is_header_value(&value) {
                Ok((name.clone(), value))
            } else {
                Err(format!("header {name}: a control character came in"))
            }
        });
        Ok(Filled {
            endpoint: Endpoint::parse(&endpoint).map_err(|e| format!("endpoint: {e}"))?,
            headers: headers.collect::<Result<_, _>>()?,
            body,
            grpc_payload,
        })
    }

    /// Takes what later requests need out of the last response.
    pub fn extract(&self, body: &[u8], variables: &mut Variables) -> Result<(), String> {
        if self.extract.is_empty() {
            return Ok(());
        }
        let failed = |e: String| format!("request {:?}: {e}", self.name);
        if body.len() > MAX_PARSED {
            return Err(failed(format!(
                "the response is longer than {MAX_PARSED} bytes, nothing is extracted from it"
            )));
        }
        let value: Value =
            serde_json::from_slice(body).map_err(|e| failed(format!("the response is not JSON: {e}")))?;
        let mut length: usize = variables.values().map(String::len).sum();
        for (name, path) in &self.extract {
            let text = path.text_in(&value).map_err(|e| failed(format!("cannot extract {name}: {e}")))?;
            length += text.len();
            if text.len() > MAX_VALUE || length > MAX_VALUES {
                let most = format!("{MAX_VALUE} bytes, and all values together {MAX_VALUES}");
                return Err(failed(format!("cannot extract {name}: a value may have {most}")));
            }
            variables.insert(name.clone(), text);
        }
        Ok(())
    }

    #[must_use]
    pub fn accepts(&self, status: u16) -> bool {
        self.expected_status.map_or((200..400).contains(&status), |expected| expected == status)
    }

    fn variables(&self) -> impl Iterator<Item = &str> {
        let texts = [&self.endpoint, &self.body, &self.grpc_payload].into_iter().chain(self.headers.values());
        texts.flat_map(|text| pieces(text)).filter_map(|piece| match piece {
            Piece::Variable(name) => Some(name),
            Piece::Text(_) => None,
        })
    }
}

enum Piece<'a> {
    Text(&'a str),
    Variable(&'a str),
}

/// `{{name}}` is a variable, spaces inside allowed; braces around anything else are text.
fn pieces(mut text: &str) -> Vec<Piece<'_>> {
    let mut pieces = Vec::new();
    while let Some((before, after)) = text.split_once("{{") {
        match after.split_once("}}").map(|(name, rest)| (name.trim(), rest)) {
            Some((name, rest)) if is_variable(name) => {
                pieces.extend([Piece::Text(before), Piece::Variable(name)]);
                text = rest;
            }
            _ => {
                let kept = before.len() + 2;
                pieces.push(Piece::Text(text.get(..kept).unwrap_or_default()));
                text = text.get(kept..).unwrap_or_default();
            }
        }
    }
    pieces.push(Piece::Text(text));
    pieces
}

/// `room` is what values may still add to the request's texts.
fn substitute(text: &str, variables: &Variables, room: &mut usize) -> Result<String, String> {
    let mut out = String::new();
    for piece in pieces(text) {
        let piece = match piece {
            Piece::Text(text) => text,
            Piece::Variable(name) => {
                let value = variables.get(name).ok_or_else(|| format!("{{{{{name}}}}} has no value"))?;
                *room = room
                    .checked_sub(value.len())
                    .ok_or_else(|| format!("the values filled in are longer than {MAX_FILLED} bytes"))?;
                value
            }
        };
        out.push_str(piece);
    }
    Ok(out)
}

fn is_variable(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
}

fn is_token(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b))
}

fn is_header_value(text: &str) -> bool {
    text.bytes().all(|b| b == b'\t' || (0x20..0x7f).contains(&b) || b >= 0x80)
}

/// What the engine itself decides about a connection.
const FRAMING: &[&str] =
    &["connection", "content-length", "keep-alive", "proxy-connection", "te", "transfer-encoding", "upgrade"];

fn headers_fit(headers: &BTreeMap<String, String>) -> Result<(), String> {
    if headers.len() > MAX_HEADERS {
        return Err(format!("at most {MAX_HEADERS} are allowed, got {}", headers.len()));
    }
    for (name, value) in headers {
        if !is_token(name) || FRAMING.contains(&name.to_ascii_lowercase().as_str()) {
            return Err(format!("{name:?} cannot be set"));
        }
        if !is_header_value(value) {
            return Err(format!("{name:?} has a control character in its value"));
        }
    }
    Ok(())
}

/// `$.a.b`, and `$.a[0].b` for lists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Path(Vec<Key>);

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
enum Key {
    Name(String),
    Index(usize),
}

impl Path {
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} must look like $.a.b or $.a[0].b");
        let mut rest = text.strip_prefix('$').ok_or_else(wrong)?;
        let mut keys = Vec::new();
        while !rest.is_empty() {
            if let Some(after) = rest.strip_prefix('[') {
                let (index, after) = after.split_once(']').ok_or_else(wrong)?;
                keys.push(Key::Index(index.parse().map_err(|_| wrong())?));
                rest = after;
            } else {
                let after = rest.strip_prefix('.').ok_or_else(wrong)?;
                let end = after.find(['.', '[']).unwrap_or(after.len());
                let (name, after) = after.split_at(end);
                if name.is_empty() {
                    return Err(wrong());
                }
                keys.push(Key::Name(name.to_owned()));
                rest = after;
            }
        }
        Ok(Self(keys))
    }

    fn text_in(&self, value: &Value) -> Result<String, &'static str> {
        let mut at = value;
        for key in &self.0 {
            let below = match key {
                Key::Name(name) => at.get(name),
                Key::Index(index) => at.get(index),
            };
            at = below.ok_or("nothing is there")?;
        }
        match at {
            Value::String(text) => Ok(text.clone()),
            Value::Number(number) => Ok(number.to_string()),
            Value::Bool(truth) => Ok(truth.to_string()),
            Value::Null | Value::Array(_) | Value::Object(_) => Err("it is no text, number or truth value"),
        }
    }
}

#[cfg(test)]
mod tests;
