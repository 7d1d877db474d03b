//! The configuration: raw layers in, one validated value out, or every problem at once.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde_json::Value;

use crate::certificates::{Rules, RulesError};
use crate::spread::rebalance::Limits;

mod names;
mod node_startup;
mod reader;
#[cfg(test)]
mod tests;

pub use names::BaseUrl;
use names::{dns_label, dns_labels, http_url, https_url, label};
pub use node_startup::{Engine, FailurePolicy, NodeStartupFeature};
use reader::{Notes, Parsed, Section, bind_address, boolean, duration_from, integer, one_of, path, port};
pub use reader::{Origin, Override, Problem, Problems};

#[derive(Clone, Debug)]
pub struct Config {
    /// The file with what overrides it written into it, for an installation that hands it on.
    pub given: Value,
    pub crds: Crds,
    pub controller: Controller,
    pub webhook: Webhook,
    pub node_labels: NodeLabels,
    pub logging: Logging,
    pub metrics: Option<SocketAddr>,
    pub health: SocketAddr,
    pub tracing: Tracing,
    pub spread: SpreadFeature,
    pub timestamp: TimestampFeature,
    pub sizing: SizingFeature,
    pub warmup: WarmupFeature,
    pub node_startup: NodeStartupFeature,
}

#[derive(Clone, Debug)]
pub struct Crds {
    /// Whether the leader applies the custom resource definitions of its release.
    pub manage: bool,
}

#[derive(Clone, Debug)]
pub struct Controller {
    pub enabled: bool,
    pub resync_period: Duration,
    pub workers: usize,
    pub leader_election: LeaderElection,
    pub namespace_selector: Option<LabelSelector>,
}

#[derive(Clone, Debug)]
pub struct LeaderElection {
    pub enabled: bool,
    /// Absent means the operator's own namespace.
    pub namespace: Option<String>,
}

impl LeaderElection {
    /// Where the lease of the replicas is.
    #[must_use]
    pub fn namespace_or<'n>(&'n self, own: &'n str) -> &'n str {
        self.namespace.as_deref().unwrap_or(own)
    }
}

#[derive(Clone, Debug)]
pub struct Webhook {
    pub enabled: bool,
    pub port: u16,
    /// Where a hand-made or cert-manager pair lies; used when `certificates.source` is `files`.
    pub cert_dir: PathBuf,
    pub certificates: Certificates,
    /// Registered instead of the Service, for an operator outside the cluster.
    pub url: Option<BaseUrl>,
    pub service: String,
    pub exempt_namespaces: Vec<String>,
    /// How long a configuration that an admin deleted is left deleted.
    pub recreate_after: Duration,
    /// Reviews at once on one connection; an API server with more opens another, which may meet another replica.
    pub max_streams: u32,
}

#[derive(Clone, Debug)]
pub struct Certificates {
    pub source: CertificateSource,
    /// Lifetimes of what the operator makes itself.
    pub rules: Rules,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CertificateSource {
    Managed,
    Files,
}

#[derive(Clone, Debug)]
pub struct NodeLabels {
    pub spot: (String, String),
    pub on_demand: (String, String),
}

#[derive(Clone, Debug)]
pub struct Logging {
    pub level: LogLevel,
    pub format: LogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    Trace,
    Debug,
    Info,
    Warn,
    Error,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    Json,
    Text,
}

#[derive(Clone, Debug)]
pub struct Tracing {
    /// Where spans go by OTLP over HTTP; absent means nowhere.
    pub otlp_endpoint: Option<String>,
}

#[derive(Clone, Debug)]
pub struct SpreadFeature {
    pub enabled: bool,
    pub mode: SpreadMode,
    pub limits: Limits,
    /// Moves under way at once in the whole cluster.
    pub max_moves: usize,
    /// Evictions that may start in one second.
    pub moves_per_second: u32,
}

/// Whether decisions are carried out or only reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpreadMode {
    Enforce,
    Observe,
}

#[derive(Clone, Debug)]
pub struct TimestampFeature {
    pub enabled: bool,
}

#[derive(Clone, Debug)]
pub struct SizingFeature {
    pub enabled: bool,
    /// Whether running pods follow their template and node.
    pub resize: bool,
    pub resizes_per_second: u32,
    /// The percentage of a node that all its sized pods together may reserve without a warning.
    pub warn_share: u64,
}

#[derive(Clone, Debug)]
pub struct WarmupFeature {
    pub enabled: bool,
    /// Warm-ups at once on one node.
    pub max_concurrent: usize,
    /// Requests per second of one node, shared between its namespaces.
    pub max_rps: u32,
    /// How long a pod may wait for a place, or a warm-up be set aside, before the gate opens without it.
    pub max_queue_wait: Duration,
    /// An agent that was not heard of for so long is gone, and the leader opens its gates.
    pub agent_timeout: Duration,
}

impl LogLevel {
    const ALL: &'static [Self] = &[Self::Trace, Self::Debug, Self::Info, Self::Warn, Self::Error];

    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Trace => "trace",
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Error => "error",
        }
    }
}

impl LogFormat {
    const ALL: &'static [Self] = &[Self::Json, Self::Text];

    const fn name(&self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Text => "text",
        }
    }
}

impl SpreadMode {
    const ALL: &'static [Self] = &[Self::Enforce, Self::Observe];

    const fn name(&self) -> &'static str {
        match self {
            Self::Enforce => "enforce",
            Self::Observe => "observe",
        }
    }
}

impl CertificateSource {
    const ALL: &'static [Self] = &[Self::Managed, Self::Files];

    const fn name(&self) -> &'static str {
        match self {
            Self::Managed => "managed",
            Self::Files => "files",
        }
    }
}

const DAY: Duration = Duration::from_secs(24 * 3600);
const SECOND: Duration = Duration::from_secs(1);

/// Builds the configuration from the parsed file and what overrides it, weakest first.
pub fn load(file: Value, overrides: Vec<Override>) -> Result<Config, Problems> {
    let mut notes = Notes::of(&file);
    let mut root = Section::root(file, overrides, &mut notes);
    let mut config = Config {
        given: Value::Null,
        crds: crds(root.section("crds")),
        controller: controller(root.section("controller")),
        webhook: webhook(root.section("webhook")),
        node_labels: node_labels(root.section("nodeLabels")),
        logging: logging(root.section("logging")),
        metrics: metrics(root.section("metrics")),
        health: health(root.section("health")),
        tracing: tracing(root.section("tracing")),
        spread: spread(root.section("spread")),
        timestamp: timestamp(root.section("timestamp")),
        sizing: sizing(root.section("sizing")),
        warmup: warmup(root.section("warmup")),
        node_startup: node_startup::node_startup(root.section("nodeStartup")),
    };
    drop(root);
    config.given = notes.given;
    if notes.problems.0.is_empty() { Ok(config) } else { Err(notes.problems) }
}

fn crds(mut s: Section<'_>) -> Crds {
    Crds { manage: s.get("manage", true, boolean) }
}

fn controller(mut s: Section<'_>) -> Controller {
    Controller {
        enabled: s.get("enabled", true, boolean),
        resync_period: s.get("resyncPeriod", 30 * SECOND, duration_from(5 * SECOND)),
        workers: usize::try_from(s.get("workers", 5, integer(1, 100))).unwrap_or(5),
        leader_election: {
            let mut s = s.section("leaderElection");
            LeaderElection { enabled: s.get("enabled", true, boolean), namespace: s.optional("namespace", dns_label) }
        },
        namespace_selector: s.optional("namespaceSelector", selector),
    }
}

/// As many as Go's own servers allow.
const MAX_STREAMS: u64 = 250;

fn webhook(mut s: Section<'_>) -> Webhook {
    let cert_dir = s.optional("certDir", path);
    // Whoever names a directory means it; without one the operator makes its own certificates.
    let source = if cert_dir.is_some() { CertificateSource::Files } else { CertificateSource::Managed };
    Webhook {
        enabled: s.get("enabled", true, boolean),
        port: s.get("port", 9443, port),
        cert_dir: cert_dir.unwrap_or_else(|| PathBuf::from("/tmp/k8s-webhook-server/serving-certs")),
        certificates: certificates(s.section("certificates"), source),
        url: s.optional("url", https_url),
        service: s.get("service", "groundcrew-webhook".to_owned(), dns_label),
        exempt_namespaces: s.get(
            "exemptNamespaces",
            ["kube-system", "kube-public", "kube-node-lease"].map(str::to_owned).to_vec(),
            dns_labels,
        ),
        recreate_after: s.get("recreateAfter", 600 * SECOND, duration_from(Duration::ZERO)),
        max_streams: u32::try_from(s.get("maxStreams", MAX_STREAMS, integer(1, 1000))).unwrap_or(u32::MAX),
    }
}

fn certificates(mut s: Section<'_>, default: CertificateSource) -> Certificates {
    let source = s.get("source", default, one_of(CertificateSource::ALL, CertificateSource::name));
    let ca = s.get("caLifetime", 365 * DAY, duration_from(SECOND));
    let leaf = s.get("leafLifetime", 30 * DAY, duration_from(SECOND));
    let overlap = s.get("overlap", 60 * SECOND, duration_from(Duration::ZERO));
    let rules = Rules::new(ca, leaf, overlap).unwrap_or_else(|e| {
        let key = if e == RulesError::OverlapTooLong { "overlap" } else { "leafLifetime" };
        s.reject(key, e.to_string(), "");
        Rules::default()
    });
    Certificates { source, rules }
}

fn node_labels(mut s: Section<'_>) -> NodeLabels {
    let capacity = |value: &str| ("karpenter.sh/capacity-type".to_owned(), value.to_owned());
    NodeLabels {
        spot: s.get("spot", capacity("spot"), label),
        on_demand: s.get("onDemand", capacity("on-demand"), label),
    }
}

fn logging(mut s: Section<'_>) -> Logging {
    Logging {
        level: s.get("level", LogLevel::Info, one_of(LogLevel::ALL, LogLevel::name)),
        format: s.get("format", LogFormat::Json, one_of(LogFormat::ALL, LogFormat::name)),
    }
}

/// `bindAddress` is what the seed's flag sets; it is stronger than `port`.
fn metrics(mut s: Section<'_>) -> Option<SocketAddr> {
    let enabled = s.get("enabled", true, boolean);
    let by_port = everywhere(s.get("port", 8080, port));
    let address = s.get("bindAddress", Some(by_port), bind_address);
    address.filter(|_| enabled)
}

fn health(mut s: Section<'_>) -> SocketAddr {
    let by_port = everywhere(s.get("port", 8081, port));
    let address = s.get("bindAddress", Some(by_port), bind_address);
    if address.is_none() {
        s.reject("bindAddress", "must not be 0", "probes need it; bind it to 127.0.0.1:8081 to hide it");
    }
    address.unwrap_or(by_port)
}

fn tracing(mut s: Section<'_>) -> Tracing {
    Tracing { otlp_endpoint: s.optional("otlpEndpoint", http_url) }
}

fn timestamp(mut s: Section<'_>) -> TimestampFeature {
    TimestampFeature { enabled: s.get("enabled", true, boolean) }
}

fn sizing(mut s: Section<'_>) -> SizingFeature {
    SizingFeature {
        enabled: s.get("enabled", true, boolean),
        resize: s.get("resize", true, boolean),
        // A thousand nodes follow a changed template within a minute, and the API server hardly notices.
        resizes_per_second: u32::try_from(s.get("resizesPerSecond", 20, integer(1, 1000))).unwrap_or(20),
        warn_share: s.get("warnShare", 50, integer(1, 100)),
    }
}

fn warmup(mut s: Section<'_>) -> WarmupFeature {
    WarmupFeature {
        enabled: s.get("enabled", true, boolean),
        max_concurrent: usize::try_from(s.get("maxConcurrent", 10, integer(1, 1000))).unwrap_or(10),
        max_rps: u32::try_from(s.get("maxRps", 100, integer(1, 100_000))).unwrap_or(100),
        max_queue_wait: s.get("maxQueueWait", 300 * SECOND, duration_from(SECOND)),
        // Half of it is a write's deadline and a renewal apart: less would leave the agent no time to write.
        agent_timeout: s.get("agentTimeout", 30 * SECOND, duration_from(15 * SECOND)),
    }
}

fn spread(mut s: Section<'_>) -> SpreadFeature {
    let usual = Limits::default();
    SpreadFeature {
        enabled: s.get("enabled", true, boolean),
        mode: s.get("mode", SpreadMode::Enforce, one_of(SpreadMode::ALL, SpreadMode::name)),
        limits: Limits {
            cooldown: s.get("cooldown", usual.cooldown, duration_from(SECOND)),
            fallback_after: s.get("fallbackAfter", usual.fallback_after, duration_from(SECOND)),
            return_after: s.get("returnAfter", usual.return_after, duration_from(SECOND)),
        },
        max_moves: usize::try_from(s.get("maxMoves", 10, integer(1, 1000))).unwrap_or(10),
        moves_per_second: u32::try_from(s.get("movesPerSecond", 5, integer(1, 100))).unwrap_or(5),
    }
}

/// IPv6's any address takes IPv4 too.
#[must_use]
pub fn everywhere(port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port)
}

/// A label selector whose operators and values fit together.
fn selector(value: &Value) -> Parsed<LabelSelector> {
    let known = ["matchLabels", "matchExpressions"];
    if let Some(key) = value.as_object().and_then(|map| map.keys().find(|k| !known.contains(&k.as_str()))) {
        return Err((format!("unknown key {key:?} in the selector"), format!("known keys here: {}", known.join(", "))));
    }
    let selector: LabelSelector = serde_json::from_value(value.clone())
        .map_err(|e| (format!("not a label selector: {e}"), "use matchLabels and matchExpressions".to_owned()))?;
    for requirement in selector.match_expressions.iter().flatten() {
        let values = requirement.values.as_ref().map_or(0, Vec::len);
        let fits = match requirement.operator.as_str() {
            "In" | "NotIn" => values > 0,
            "Exists" | "DoesNotExist" => values == 0,
            _ => false,
        };
        if !fits {
            let (key, operator) = (&requirement.key, &requirement.operator);
            return Err((
                format!("operator {operator:?} of key {key:?} does not fit its {values} values"),
                "In and NotIn take values, Exists and DoesNotExist take none".to_owned(),
            ));
        }
    }
    Ok(selector)
}
