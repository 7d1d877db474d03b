//! What a pod's annotations ask for: read once, every value checked, the first problem wins.

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use super::endpoint::Endpoint;
use super::port::{self, Asked};
use crate::duration;
use crate::keys::{self, Lookup};
use crate::pod::Container;

pub const MAX_REQUESTS: u32 = 12_000;
pub const MAX_DURATION: Duration = Duration::from_secs(300);
const MIN_DURATION: Duration = Duration::from_secs(1);
const DEFAULT_DURATION: Duration = Duration::from_secs(30);
/// What the last response of a paced warm-up may take beyond its duration.
const TIMEOUT_SLACK: Duration = Duration::from_secs(5);
const MAX_RETRIES: i64 = 10;
/// Values are quoted in messages; nobody needs all of an 8 KiB one.
const QUOTED: usize = 80;

/// One pod's warm-up, every value in range.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rules {
    pub endpoint: Endpoint,
    pub requests: u32,
    pub duration: Duration,
    /// Caps one attempt from its first request on.
    pub timeout: Duration,
    pub port: u16,
    pub protocol: Protocol,
    pub grpc_method: Option<GrpcMethod>,
    pub grpc_payload: String,
    /// The `WarmupConfig` that replaces endpoint, requests and duration.
    pub config: Option<String>,
    pub mode: Mode,
    pub failure_policy: FailurePolicy,
    pub retries: u32,
}

/// One annotation that does not say what it must.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    pub key: &'static str,
    pub text: String,
}

/// Every problem of a pod, in the order in which they are reported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.first().map_or("", |problem| problem.text.as_str()))
    }
}

impl std::error::Error for Problems {}

/// An enum whose spellings are its annotation values.
macro_rules! spelled {
    ($(#[$meta:meta])* $name:ident { $($(#[$vmeta:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
        #[serde(rename_all = "lowercase")]
        pub enum $name { $($(#[$vmeta])* $variant),+ }

        impl $name {
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }

            /// Exactly one of the spellings.
            pub fn parse(text: &str) -> Result<Self, String> {
                let found = Self::ALL.iter().find(|one| one.name() == text);
                found.copied().ok_or_else(|| one_of(Self::ALL.iter().map(|one| one.name())))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

fn one_of(names: impl Iterator<Item = &'static str>) -> String {
    format!("must be one of {}", names.collect::<Vec<_>>().join(", "))
}

spelled!(Protocol { #[default] Http = "http", Https = "https", H2c = "h2c", Grpc = "grpc" });
spelled!(Mode {
    /// Request k of N starts at k·D/N.
    #[default] Paced = "paced",
    /// Back to back.
    Asap = "asap",
    /// Back to back until latency has flattened.
    Converge = "converge",
});
spelled!(FailurePolicy { #[default] Open = "open", Closed = "closed" });

/// `package.Service/Method`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GrpcMethod {
    pub service: String,
    pub method: String,
}

impl GrpcMethod {
    pub fn parse(text: &str) -> Result<Self, String> {
        let word = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        match text.split_once('/') {
            Some((service, method)) if service.split('.').all(word) && word(method) => {
                Ok(Self { service: service.to_owned(), method: method.to_owned() })
            }
            _ => Err("must look like package.Service/Method".to_owned()),
        }
    }
}

impl fmt::Display for GrpcMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.service, self.method)
    }
}

impl Rules {
    /// Reads all annotations; the order of the reads is the order in which problems are reported.
    pub fn read<S: AsRef<str>>(annotations: &impl Lookup, containers: &[Container<S>]) -> Result<Self, Problems> {
        let mut r = Reader { annotations, problems: Vec::new() };
        let requests = r.read(keys::WARMUP_REQUESTS, requests);
        let duration =
            r.read(keys::WARMUP_DURATION, |text| bounded("warmup-duration", text)).unwrap_or(DEFAULT_DURATION);
        let timeout = r.read(keys::WARMUP_TIMEOUT, |text| bounded("warmup-timeout", text));
        let protocol = r.read(keys::WARMUP_PROTOCOL, |text| named("warmup-protocol", text, Protocol::parse));
        let grpc_method = r.read(keys::WARMUP_GRPC_METHOD, |text| named("warmup-grpc-method", text, GrpcMethod::parse));
        let grpc_payload = r.read(keys::WARMUP_GRPC_PAYLOAD, |text| named("warmup-grpc-payload", text, json_object));
        let probe = Probed::read(&mut r, containers);
        let port = r.keep(keys::WARMUP_PORT, port_of(annotations, containers, &probe));
        let endpoint = r.read(keys::WARMUP_ENDPOINT, |text| {
            named("warmup-endpoint", text, |t| Endpoint::parse(t).map_err(|e| e.to_string()))
        });
        r.problems.extend(probe.problem);
        let mode = r.read(keys::WARMUP_MODE, |text| named("warmup-mode", text, Mode::parse)).unwrap_or_default();
        let failure_policy =
            r.read(keys::WARMUP_FAILURE_POLICY, |text| named("warmup-failure-policy", text, FailurePolicy::parse));
        let retries = r.read(keys::WARMUP_RETRIES, retries);
        let config = r.read(keys::WARMUP_CONFIG, |text| named("warmup-config", text, object_name));
        if !r.problems.is_empty() {
            return Err(Problems(r.problems));
        }
        Ok(Self {
            endpoint: endpoint.or(probe.endpoint).unwrap_or_default(),
            // Three requests cannot show a curve: converging takes what fits into the duration.
            requests: requests.unwrap_or(if mode == Mode::Converge { MAX_REQUESTS } else { 3 }),
            duration,
            timeout: timeout.unwrap_or(duration + TIMEOUT_SLACK),
            port: port.unwrap_or_default(),
            protocol: protocol.or(probe.protocol).unwrap_or_default(),
            grpc_method,
            grpc_payload: grpc_payload.unwrap_or_else(|| "{}".to_owned()),
            config,
            mode,
            failure_policy: failure_policy.unwrap_or_default(),
            retries: retries.unwrap_or_default(),
        })
    }

    /// How long one request may take.
    #[must_use]
    pub fn request_timeout(&self) -> Duration {
        let (least, most) = (Duration::from_secs(1), Duration::from_secs(10));
        // "As many as fit" says nothing about how long one takes, and the cold ones are the slow ones.
        if self.mode == Mode::Converge && self.requests == MAX_REQUESTS {
            return most;
        }
        (self.duration / self.requests.max(1)).clamp(least, most)
    }
}

/// What a pod whose other annotations do not parse still says about failing; a bad value means the default.
#[must_use]
pub fn failure_policy(annotations: &impl Lookup) -> FailurePolicy {
    annotations.setting(keys::WARMUP_FAILURE_POLICY).and_then(|t| FailurePolicy::parse(t).ok()).unwrap_or_default()
}

struct Reader<'a, L> {
    annotations: &'a L,
    problems: Vec<Problem>,
}

impl<L: Lookup> Reader<'_, L> {
    fn read<T>(&mut self, key: &'static str, parse: impl Fn(&str) -> Result<T, String>) -> Option<T> {
        let parsed = parse(self.annotations.setting(key)?);
        self.keep(key, parsed)
    }

    fn keep<T>(&mut self, key: &'static str, parsed: Result<T, String>) -> Option<T> {
        parsed.map_err(|text| self.problems.push(Problem { key, text })).ok()
    }
}

/// What `warmup-endpoint-from` adds; its problem is reported behind the port's.
#[derive(Default)]
struct Probed {
    endpoint: Option<Endpoint>,
    protocol: Option<Protocol>,
    port: Option<u16>,
    problem: Option<Problem>,
}

impl Probed {
    fn read<S: AsRef<str>, L: Lookup>(r: &mut Reader<'_, L>, containers: &[Container<S>]) -> Self {
        let Some(text) = r.annotations.setting(keys::WARMUP_ENDPOINT_FROM) else { return Self::default() };
        Self::of(text, containers).unwrap_or_else(|why| {
            let text = format!("invalid warmup-endpoint-from value {}: {why}", quoted(text));
            Self { problem: Some(Problem { key: keys::WARMUP_ENDPOINT_FROM, text }), ..Self::default() }
        })
    }

    fn of<S: AsRef<str>>(text: &str, containers: &[Container<S>]) -> Result<Self, String> {
        if text != "readinessProbe" {
            return Err(one_of(["readinessProbe"].into_iter()));
        }
        let (container, probe) = port::probe(containers)?;
        let path = probe.path.as_ref().map_or("/", AsRef::as_ref);
        let https = probe.scheme.as_ref().is_some_and(|scheme| scheme.as_ref() == "HTTPS");
        Ok(Self {
            endpoint: Some(Endpoint::parse(path).map_err(|e| format!("the probe's path {}: {e}", quoted(path)))?),
            protocol: Some(if https { Protocol::Https } else { Protocol::Http }),
            port: Some(port::of_probe(container, probe)?),
            problem: None,
        })
    }
}

fn port_of<S: AsRef<str>>(
    annotations: &impl Lookup,
    containers: &[Container<S>],
    probe: &Probed,
) -> Result<u16, String> {
    match (port::asked(annotations.setting(keys::WARMUP_PORT))?, probe) {
        (Asked::Number(number), _) => Ok(number),
        (Asked::Name(name), _) => port::named(containers, name),
        (Asked::Nothing, Probed { port: Some(port), .. }) => Ok(*port),
        // The probe's own problem says more than a failed detection would.
        (Asked::Nothing, Probed { problem: Some(_), .. }) => Ok(0),
        (Asked::Nothing, _) => port::detected(containers),
    }
}

fn quoted(text: &str) -> String {
    match text.char_indices().nth(QUOTED) {
        Some((end, _)) => format!("{:?}…", text.get(..end).unwrap_or_default()),
        None => format!("{text:?}"),
    }
}

fn named<T>(name: &str, text: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<T, String> {
    parse(text).map_err(|why| format!("invalid {name} value {}: {why}", quoted(text)))
}

fn whole(name: &str, text: &str) -> Result<i64, String> {
    named(name, text, |t| {
        t.parse::<i64>().map_err(|e| match e.kind() {
            std::num::IntErrorKind::PosOverflow | std::num::IntErrorKind::NegOverflow => "out of range".to_owned(),
            _ => "not a whole number".to_owned(),
        })
    })
}

fn requests(text: &str) -> Result<u32, String> {
    match whole("warmup-requests", text)? {
        n if n < 1 => Err(format!("warmup-requests must be at least 1, got {n}")),
        n => u32::try_from(n)
            .ok()
            .filter(|n| *n <= MAX_REQUESTS)
            .ok_or_else(|| format!("warmup-requests must not exceed {MAX_REQUESTS}, got {n}")),
    }
}

fn retries(text: &str) -> Result<u32, String> {
    let n = whole("warmup-retries", text)?;
    let fits = u32::try_from(n).ok().filter(|_| n <= MAX_RETRIES);
    fits.ok_or_else(|| format!("warmup-retries must be between 0 and {MAX_RETRIES}, got {n}"))
}

fn bounded(name: &str, text: &str) -> Result<Duration, String> {
    let parsed = named(name, text, |t| duration::parse(t).map_err(|e| e.to_string()))?;
    if parsed < MIN_DURATION {
        return Err(format!("{name} must be at least 1s, got {}", duration::text(parsed)));
    }
    if parsed > MAX_DURATION {
        return Err(format!("{name} must not exceed 5m, got {}", duration::text(parsed)));
    }
    Ok(parsed)
}

fn json_object(text: &str) -> Result<String, String> {
    match serde_json::from_str::<Value>(text) {
        Ok(Value::Object(_)) => Ok(text.to_owned()),
        Ok(_) => Err("must be a JSON object".to_owned()),
        Err(e) => Err(format!("not JSON: {e}")),
    }
}

/// What an object may be called, so that the name is a path segment of the API and nothing else.
fn object_name(text: &str) -> Result<String, String> {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    let edge = |b: Option<&u8>| b.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    let bytes = text.as_bytes();
    if text.len() <= 253 && bytes.iter().all(|b| inner(*b)) && edge(bytes.first()) && edge(bytes.last()) {
        return Ok(text.to_owned());
    }
    Err("must be the name of a WarmupConfig in the pod's namespace".to_owned())
}

#[cfg(test)]
mod tests;
