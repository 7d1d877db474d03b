//! Reads settings out of three layers and collects every problem instead of stopping at the first.
//!
//! ```text
//! flags  ─┐
//! env    ─┼─► Section::get(key, parse) ─► value or default
//! file   ─┘                    └─► Problems: path, what is wrong, a hint
//! ```

use std::collections::BTreeSet;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value};

use crate::duration;

/// Where a setting came from, for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    File,
    Env(String),
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::File => f.write_str("the config file"),
            Origin::Env(name) | Origin::Flag(name) => f.write_str(name),
        }
    }
}

/// Everything that is wrong with a configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub path: String,
    pub message: String,
    pub hint: String,
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.0.len();
        write!(f, "the configuration has {count} problem{}:", if count == 1 { "" } else { "s" })?;
        for Problem { path, message, hint } in &self.0 {
            write!(f, "\n  {path}: {message}")?;
            if !hint.is_empty() {
                write!(f, "\n    hint: {hint}")?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// One overriding setting: `webhook.port` as path segments, with its text.
#[derive(Clone, Debug)]
pub struct Override {
    pub path: Vec<String>,
    pub text: String,
    pub origin: Origin,
}

impl Override {
    /// `GROUNDCREW_WEBHOOK__PORT=9443`; other variables, such as those of a Service named groundcrew, are not ours.
    #[must_use]
    pub fn from_env(name: &str, text: &str) -> Option<Self> {
        if let Some((path, text)) = seed_variable(name, text) {
            let path = path.split('.').map(str::to_owned).collect();
            return Some(Self { path, text: text.to_owned(), origin: Origin::Env(name.to_owned()) });
        }
        let path = name.strip_prefix("GROUNDCREW_")?;
        if !path.contains("__") {
            return None;
        }
        let path = path.split("__").map(str::to_owned).collect();
        Some(Self { path, text: text.to_owned(), origin: Origin::Env(name.to_owned()) })
    }

    #[must_use]
    pub fn from_flag(path: &str, text: impl Into<String>, flag: &str) -> Self {
        let path = path.split('.').map(str::to_owned).collect();
        Self { path, text: text.into(), origin: Origin::Flag(flag.to_owned()) }
    }
}

/// Variables that clusters set before groundcrew, with the values that counted there.
fn seed_variable(name: &str, text: &str) -> Option<(&'static str, &'static str)> {
    match (name, text) {
        (_, "") => None,
        ("STARTUP_WEBHOOK", "0") => Some(("nodeStartup.webhook", "false")),
        ("STARTUP_BACKFILL", "1") => Some(("nodeStartup.backfill", "true")),
        ("STARTUP_BACKFILL", _) => Some(("nodeStartup.backfill", "false")),
        _ => None,
    }
}

/// Env spells keys in capitals, with or without underscores between words.
fn same_key(spelled: &str, key: &str) -> bool {
    let plain = |s: &str| s.chars().filter(|c| *c != '_').flat_map(char::to_lowercase).collect::<String>();
    plain(spelled) == plain(key)
}

/// What reading comes to besides the values.
#[derive(Debug)]
pub struct Notes {
    pub problems: Problems,
    /// The file, with what overrides it in its place.
    pub given: Value,
}

impl Notes {
    pub fn of(file: &Value) -> Self {
        Self { problems: Problems::default(), given: file.clone() }
    }

    fn write(&mut self, path: &str, value: &Value) {
        let mut at = &mut self.given;
        for key in path.split('.') {
            if !at.is_object() {
                *at = Value::Object(Map::new());
            }
            let Value::Object(map) = at else { return };
            at = map.entry(key).or_insert(Value::Null);
        }
        *at = value.clone();
    }
}

/// One level of the tree, remembering which keys were asked for.
#[derive(Debug)]
pub struct Section<'p> {
    path: String,
    file: Map<String, Value>,
    /// Weakest first, so the last match wins.
    overrides: Vec<Override>,
    known: BTreeSet<&'static str>,
    notes: &'p mut Notes,
}

/// A parsed value, or what is wrong and what to write instead.
pub type Parsed<T> = Result<T, (String, String)>;

impl<'p> Section<'p> {
    pub fn root(file: Value, overrides: Vec<Override>, notes: &'p mut Notes) -> Self {
        Self::new(String::new(), Some((file, Origin::File)), overrides, notes)
    }

    fn new(path: String, found: Option<(Value, Origin)>, overrides: Vec<Override>, notes: &'p mut Notes) -> Self {
        let file = match found {
            None | Some((Value::Null, _)) => Map::new(),
            Some((Value::Object(map), _)) => map,
            Some((other, _)) => {
                let shown = if path.is_empty() { "the file" } else { path.as_str() };
                notes.problems.0.push(Problem {
                    path: shown.to_owned(),
                    message: format!("expected a section with keys, got {other}"),
                    hint: String::new(),
                });
                Map::new()
            }
        };
        Self { path, file, overrides, known: BTreeSet::new(), notes }
    }

    fn path_of(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// The section below this one.
    pub fn section(&mut self, key: &'static str) -> Section<'_> {
        self.known.insert(key);
        let path = self.path_of(key);
        let file = self.file.remove(key).map(|value| (value, Origin::File));
        let (below, rest) = std::mem::take(&mut self.overrides)
            .into_iter()
            .partition(|o: &Override| o.path.len() > 1 && o.path.first().is_some_and(|first| same_key(first, key)));
        self.overrides = rest;
        let strip = |mut o: Override| {
            o.path.remove(0);
            o
        };
        Section::new(path, file, Vec::into_iter(below).map(strip).collect(), self.notes)
    }

    /// The strongest layer's value, parsed; absent means `None`.
    pub fn optional<T>(&mut self, key: &'static str, parse: impl Fn(&Value) -> Parsed<T>) -> Option<T> {
        self.known.insert(key);
        // An empty text is how a file of values or a manifest's variable leaves a setting unset.
        let unset = |v: &Value| v.is_null() || v.as_str() == Some("");
        let mut found = self.file.remove(key).filter(|v| !unset(v)).map(|v| (v, Origin::File));
        self.overrides.retain(|o| match o.path.as_slice() {
            [only] if same_key(only, key) => {
                if !o.text.is_empty() {
                    found = Some((Value::String(o.text.clone()), o.origin.clone()));
                }
                false
            }
            _ => true,
        });
        let (value, origin) = found?;
        if origin != Origin::File {
            self.notes.write(&self.path_of(key), &value);
        }
        match parse(&value) {
            Ok(parsed) => Some(parsed),
            Err((message, hint)) => {
                let path = self.path_of(key);
                self.notes.problems.0.push(Problem { path, message: format!("{message} (from {origin})"), hint });
                None
            }
        }
    }

    pub fn get<T>(&mut self, key: &'static str, default: T, parse: impl Fn(&Value) -> Parsed<T>) -> T {
        self.optional(key, parse).unwrap_or(default)
    }

    pub fn reject(&mut self, key: &str, message: impl Into<String>, hint: impl Into<String>) {
        let path = self.path_of(key);
        self.notes.problems.0.push(Problem { path, message: message.into(), hint: hint.into() });
    }
}

/// Whatever nobody asked for is a typo or a key of another version.
impl Drop for Section<'_> {
    fn drop(&mut self) {
        let from_file = self.file.keys().map(|key| (self.path_of(key), key.clone(), Origin::File));
        let from_overrides = self.overrides.iter().map(|o| {
            let spelled = o.path.join(".").to_lowercase();
            (self.path_of(&spelled), o.path.first().cloned().unwrap_or_default(), o.origin.clone())
        });
        let unknown: Vec<_> = from_file.chain(from_overrides).collect();
        for (path, key, origin) in unknown {
            let hint = nearest(&key, &self.known);
            self.notes.problems.0.push(Problem { path, message: format!("unknown key (from {origin})"), hint });
        }
    }
}

fn nearest(key: &str, known: &BTreeSet<&'static str>) -> String {
    let best = known
        .iter()
        .map(|k| (strsim::jaro_winkler(&key.to_lowercase(), &k.to_lowercase()), *k))
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .filter(|(score, _)| *score > 0.8);
    match best {
        Some((_, k)) => format!("did you mean {k}?"),
        None => format!("known keys here: {}", known.iter().copied().collect::<Vec<_>>().join(", ")),
    }
}

fn wrong<T>(value: &Value, expected: &str, hint: &str) -> Parsed<T> {
    Err((format!("expected {expected}, got {value}"), hint.to_owned()))
}

pub fn boolean(value: &Value) -> Parsed<bool> {
    match value {
        Value::Bool(b) => Ok(*b),
        Value::String(s) if s == "true" => Ok(true),
        Value::String(s) if s == "false" => Ok(false),
        _ => wrong(value, "true or false", "write true or false"),
    }
}

pub fn text(value: &Value) -> Parsed<String> {
    match value {
        Value::String(s) if !s.is_empty() => Ok(s.clone()),
        _ => wrong(value, "a text", "write it in quotes"),
    }
}

/// A whole number within bounds.
pub fn integer(min: u64, max: u64) -> impl Fn(&Value) -> Parsed<u64> {
    move |value| {
        let number = match value {
            Value::Number(n) => n.as_u64(),
            Value::String(s) => s.parse().ok(),
            _ => None,
        };
        match number {
            Some(n) if (min..=max).contains(&n) => Ok(n),
            _ => wrong(value, &format!("a whole number from {min} to {max}"), ""),
        }
    }
}

pub fn port(value: &Value) -> Parsed<u16> {
    let number = integer(1, u64::from(u16::MAX))(value)?;
    u16::try_from(number).map_err(|e| (e.to_string(), String::new()))
}

/// A duration of at least `min`.
pub fn duration_from(min: Duration) -> impl Fn(&Value) -> Parsed<Duration> {
    move |value| {
        let Value::String(s) = value else {
            return wrong(value, "a duration", "write it like 300ms, 30s or 1m30s");
        };
        let parsed = duration::parse(s).map_err(|e| (format!("invalid duration {s:?}: {e}"), String::new()))?;
        if parsed < min {
            return Err((format!("must be at least {}, got {s}", duration::text(min)), String::new()));
        }
        Ok(parsed)
    }
}

/// One of an enum's spellings.
pub fn one_of<T: Copy>(all: &'static [T], name: fn(&T) -> &'static str) -> impl Fn(&Value) -> Parsed<T> {
    move |value| {
        let found = value.as_str().and_then(|s| all.iter().find(|t| name(t) == s));
        match found {
            Some(t) => Ok(*t),
            None => {
                let names = all.iter().map(name).collect::<Vec<_>>().join(", ");
                wrong(value, &format!("one of {names}"), "")
            }
        }
    }
}

/// A list of texts; in the environment separated by commas.
pub fn texts(value: &Value) -> Parsed<Vec<String>> {
    match value {
        Value::Array(items) => items.iter().map(text).collect(),
        Value::String(s) => Ok(s.split(',').map(str::trim).filter(|s| !s.is_empty()).map(str::to_owned).collect()),
        _ => wrong(value, "a list of texts", "write [a, b]"),
    }
}

pub fn path(value: &Value) -> Parsed<PathBuf> {
    text(value).map(PathBuf::from)
}

/// `host:port`, `:port` for every address, or `0` for off.
pub fn bind_address(value: &Value) -> Parsed<Option<SocketAddr>> {
    let spelled = text(value)?;
    if spelled == "0" {
        return Ok(None);
    }
    let full = if spelled.starts_with(':') { format!("[::]{spelled}") } else { spelled };
    let full = full.strip_prefix("localhost:").map_or(full.clone(), |port| format!("127.0.0.1:{port}"));
    full.parse().map(Some).or_else(|_| wrong(value, "host:port, :port or 0", "write it like :8080 or 127.0.0.1:8080"))
}
