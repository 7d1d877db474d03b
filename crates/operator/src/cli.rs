//! The command line: arguments in, a validated configuration and a command out.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use groundcrew_core::config::{self, Config, Override};
use serde_json::Value;

use crate::{agent, cleanup, manifests, run, warmup};

/// Bad configuration, as for bad usage.
const EXIT_CONFIG: u8 = 2;
const EXIT_FAILED: u8 = 1;

const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (commit ", env!("GROUNDCREW_COMMIT"), ")");

/// Gets Kubernetes nodes and pods ready before they take traffic.
#[derive(Debug, Parser)]
#[command(name = "groundcrew", version = VERSION, propagate_version = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the webhooks and run the controllers.
    Run(Settings),
    /// Do the work that must happen on each node; runs as a DaemonSet.
    Agent(Settings),
    /// Open every shut warm-up gate, before uninstalling: afterwards nobody could.
    OpenGates(Settings),
    /// Print everything an installation consists of, as YAML.
    Manifests(Manifests),
    /// Stop the operator and take back everything it left in the cluster; custom resources stay.
    Cleanup(Settings),
}

/// Flags override the environment (GROUNDCREW_<SECTION>__<KEY>), which overrides the file.
#[derive(Debug, Default, Args)]
pub struct Settings {
    /// Configuration file (YAML).
    #[arg(long, value_name = "FILE", env = "GROUNDCREW_CONFIG")]
    pub config: Option<PathBuf>,
    /// Kubeconfig; without it KUBECONFIG, ~/.kube/config or the pod's service account is used.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of the operator's own objects [default: the pod's, or groundcrew-system].
    #[arg(long, env = "POD_NAMESPACE")]
    pub namespace: Option<String>,
    /// Name of the node this process runs on.
    #[arg(long, env = "NODE_NAME")]
    pub node_name: Option<String>,
    /// Where metrics are served, like :8080; 0 turns them off.
    #[arg(long, value_name = "ADDR")]
    metrics_bind_address: Option<String>,
    /// Where health is served, like :8081.
    #[arg(long, value_name = "ADDR")]
    health_probe_bind_address: Option<String>,
    /// Port of the webhook server.
    #[arg(long, value_name = "PORT")]
    webhook_port: Option<String>,
    /// Register the webhooks by this address instead of by Service; for running outside the cluster.
    #[arg(long, value_name = "https://HOST:PORT")]
    webhook_url: Option<String>,
    /// Directory with tls.crt and tls.key; without it the operator makes its own certificates.
    #[arg(long, value_name = "DIR")]
    cert_dir: Option<String>,
    /// Whether replicas agree on one that writes.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    leader_elect: Option<String>,
    /// Whether to serve and register the webhooks.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    enable_webhook: Option<String>,
    /// Whether to run the controllers.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    enable_controller: Option<String>,
}

#[derive(Debug, Args)]
struct Manifests {
    #[command(flatten)]
    settings: Settings,
    /// Image of the operator.
    #[arg(long, default_value = concat!("groundcrew:", env!("CARGO_PKG_VERSION")))]
    image: String,
    /// The Job that cleans up, with its rights, instead.
    #[arg(long)]
    cleanup: bool,
}

impl Settings {
    fn overrides(&self) -> impl Iterator<Item = Override> {
        [
            (&self.metrics_bind_address, "metrics.bindAddress", "--metrics-bind-address"),
            (&self.health_probe_bind_address, "health.bindAddress", "--health-probe-bind-address"),
            (&self.webhook_port, "webhook.port", "--webhook-port"),
            (&self.webhook_url, "webhook.url", "--webhook-url"),
            (&self.cert_dir, "webhook.certDir", "--cert-dir"),
            (&self.leader_elect, "controller.leaderElection.enabled", "--leader-elect"),
            (&self.enable_webhook, "webhook.enabled", "--enable-webhook"),
            (&self.enable_controller, "controller.enabled", "--enable-controller"),
        ]
        .into_iter()
        .filter_map(|(value, path, flag)| Some(Override::from_flag(path, value.clone()?, flag)))
    }

    /// The validated configuration, or everything that is wrong with it.
    fn load(&self) -> Result<Config, String> {
        let file = self.config.as_deref().map_or(Ok(Value::Null), read_yaml)?;
        let env = std::env::vars().filter_map(|(name, text)| Override::from_env(&name, &text));
        config::load(file, env.chain(self.overrides()).collect()).map_err(|problems| problems.to_string())
    }
}

fn read_yaml(path: &Path) -> Result<Value, String> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).map_err(|e| format!("cannot read the configuration {shown}: {e}"))?;
    if text.trim().is_empty() {
        return Ok(Value::Null);
    }
    serde_saphyr::from_str(&text).map_err(|e| format!("the configuration {shown} is not valid YAML: {e}"))
}

/// Parses the arguments and does what they say.
#[must_use]
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let settings = match &cli.command {
        Command::Run(settings) | Command::Agent(settings) => settings,
        Command::OpenGates(settings) | Command::Cleanup(settings) => settings,
        Command::Manifests(manifests) => &manifests.settings,
    };
    let config = match settings.load() {
        Ok(config) => config,
        Err(problems) => return fail(EXIT_CONFIG, &problems),
    };
    let done = match &cli.command {
        Command::Run(settings) => run::main(settings, config),
        Command::Agent(settings) => agent::main(settings, config),
        Command::Cleanup(settings) => cleanup::main(settings, &config),
        Command::OpenGates(settings) => warmup::farewell::main(settings),
        Command::Manifests(m) => {
            let namespace = m.settings.namespace.as_deref().unwrap_or(manifests::DEFAULT_NAMESPACE);
            print(&manifests::yaml(&match m.cleanup {
                true => cleanup::manifests::objects(&config, namespace, &m.image),
                false => manifests::objects(&config, namespace, &m.image),
            }));
            Ok(())
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => fail(EXIT_FAILED, &message),
    }
}

#[allow(clippy::print_stderr, reason = "the command line's own output")]
fn fail(code: u8, message: &str) -> ExitCode {
    eprintln!("groundcrew: {message}");
    ExitCode::from(code)
}

#[allow(clippy::print_stdout, reason = "the command line's own output")]
fn print(text: &str) {
    print!("{text}");
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn settings(args: &[&str]) -> Settings {
        let all = ["groundcrew", "run"].iter().chain(args);
        match Cli::try_parse_from(all).unwrap().command {
            Command::Run(settings) => settings,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn switches_take_a_value_or_stand_alone() {
        assert!(!settings(&["--leader-elect=false"]).load().unwrap().controller.leader_election.enabled);
        assert!(settings(&["--leader-elect"]).load().unwrap().controller.leader_election.enabled);
        assert!(!settings(&["--enable-webhook=false"]).load().unwrap().webhook.enabled);
        assert!(!settings(&["--enable-controller=false"]).load().unwrap().controller.enabled);
    }

    #[test]
    fn a_bad_flag_value_is_reported_with_the_flag() {
        let problem = settings(&["--webhook-port=x"]).load().unwrap_err();
        assert!(problem.contains("webhook.port") && problem.contains("--webhook-port"), "{problem}");
    }

    #[test]
    fn a_yaml_mistake_is_reported_with_its_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.yaml");
        std::fs::write(&path, "webhook:\n  port: 1\n  port: 2\n").unwrap();
        let problem = read_yaml(&path).unwrap_err();
        assert!(problem.contains("duplicate") && problem.contains('3'), "{problem}");
    }
}
