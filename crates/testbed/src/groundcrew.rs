//! The operator as a process next to the cluster.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::Context;
use rustix::process::{Pid, Signal};
use tokio::process::Child;
use tokio::time::{Instant, sleep, timeout};

use crate::cluster::{Cluster, unique};
use crate::proxy::Proxy;
use crate::tail::tail;
use crate::{fetch, locate, ports, rights, supervisor};

/// Far more than a start takes on two busy cores.
const READY_DEADLINE: Duration = Duration::from_secs(60);

/// A graceful end takes less than ten seconds by contract; a test that measures it must see a late end too.
const EXIT_DEADLINE: Duration = Duration::from_secs(60);

/// How groundcrew is to be started.
#[derive(Debug)]
pub struct GroundcrewBuilder<'a> {
    cluster: &'a Cluster,
    command: &'static str,
    name: String,
    kubeconfig: Option<PathBuf>,
    proxy: Option<&'a Proxy>,
    webhook_port: Option<u16>,
    webhook_url: Option<String>,
    config: Option<String>,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
}

impl<'a> GroundcrewBuilder<'a> {
    /// Runs the agent of that node instead of the operator.
    #[must_use]
    pub fn agent(self, node: &str) -> Self {
        self.command("agent").arg("--node-name").arg(node)
    }

    /// Another subcommand than `run`, which takes the same flags.
    #[must_use]
    pub fn command(mut self, name: &'static str) -> Self {
        self.command = name;
        self
    }

    /// Names its log; a test with two replicas tells them apart by it.
    #[must_use]
    pub fn name(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }

    /// These credentials instead of those of a user with the rights that an installation grants.
    #[must_use]
    pub fn kubeconfig(mut self, path: &Path) -> Self {
        self.kubeconfig = Some(path.to_owned());
        self
    }

    /// Reaches the API server through this proxy.
    #[must_use]
    pub fn through(mut self, proxy: &'a Proxy) -> Self {
        self.proxy = Some(proxy);
        self
    }

    /// A fixed port instead of a free one, so that a successor can take its place.
    #[must_use]
    pub fn webhook_port(mut self, port: u16) -> Self {
        self.webhook_port = Some(port);
        self
    }

    /// Registers this URL instead of its own address: replicas behind a [`Proxy`](crate::Proxy) share one.
    #[must_use]
    pub fn webhook_url(mut self, url: &str) -> Self {
        self.webhook_url = Some(url.to_owned());
        self
    }

    /// The text of its configuration file.
    #[must_use]
    pub fn config_yaml(mut self, text: &str) -> Self {
        self.config = Some(text.to_owned());
        self
    }

    /// One more argument, after the ones the testbed sets: later flags win.
    #[must_use]
    pub fn arg(mut self, argument: impl Into<OsString>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// More arguments.
    #[must_use]
    pub fn args<A: Into<OsString>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// An environment variable.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Starts it and waits until `/readyz` says yes.
    ///
    /// # Errors
    /// It ended, or is not ready after a minute; with the end of its log.
    pub async fn start(self) -> anyhow::Result<Groundcrew> {
        let mut groundcrew = self.spawn().await?;
        groundcrew.wait_ready(READY_DEADLINE).await?;
        Ok(groundcrew)
    }

    /// Starts it without waiting.
    ///
    /// # Caveats
    /// The process is killed with the thread that calls this, so that a killed test leaves nothing behind: call it on the
    /// test's own task, not in a `spawn_blocking`.
    ///
    /// # Errors
    /// The program is not built, or its rights cannot be granted.
    pub async fn spawn(self) -> anyhow::Result<Groundcrew> {
        // A port that was asked for is free until it is bound, so it may be among them.
        let free: Vec<u16> =
            ports::free_ports(4)?.into_iter().filter(|port| Some(*port) != self.webhook_port).take(3).collect();
        let [webhook, metrics, health] = free.as_slice() else { anyhow::bail!("too few ports") };
        let webhook = local(self.webhook_port.unwrap_or(*webhook));
        let (metrics, health) = (local(*metrics), local(*health));
        let dir = self.cluster.info().dir.join(unique(&self.name));
        std::fs::create_dir_all(&dir)?;
        let log = dir.join(format!("{}.log", self.name));
        let output = std::fs::File::create(&log)?;
        let config = self.config.as_ref().map(|text| (dir.join("config.yaml"), text));
        if let Some((file, text)) = &config {
            std::fs::write(file, text)?;
        }
        let config = config.as_ref().map(|(file, _)| file.as_path());
        let kubeconfig = self.credentials(config).await?;

        let mut command = supervisor::leashed(&locate::groundcrew()?)?;
        command.arg(self.command);
        command.arg("--kubeconfig").arg(&kubeconfig);
        command.arg("--webhook-url").arg(self.webhook_url.unwrap_or_else(|| format!("https://{webhook}")));
        command.arg("--webhook-port").arg(webhook.port().to_string());
        command.arg("--metrics-bind-address").arg(metrics.to_string());
        command.arg("--health-probe-bind-address").arg(health.to_string());
        if let Some(file) = config {
            command.arg("--config").arg(file);
        }
        command.args(self.arguments).env_remove("KUBECONFIG").envs(self.environment);
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output).process_group(0);
        let child = tokio::process::Command::from(command).kill_on_drop(true).spawn()?;
        self.cluster.show_on_failure(&log);
        Ok(Groundcrew { child, webhook, metrics, health, log })
    }

    async fn credentials(&self, config: Option<&Path>) -> anyhow::Result<PathBuf> {
        let original = match &self.kubeconfig {
            Some(path) => path.clone(),
            None => {
                let (arguments, environment) = (&self.arguments, &self.environment);
                let start = rights::Start { command: self.command, config, arguments, environment };
                rights::grant(self.cluster, &start).await?
            }
        };
        self.proxy.map_or(Ok(original.clone()), |proxy| proxy.redirect(&original))
    }
}

/// A running `groundcrew run`; killed when dropped.
#[derive(Debug)]
pub struct Groundcrew {
    child: Child,
    webhook: SocketAddr,
    metrics: SocketAddr,
    health: SocketAddr,
    log: PathBuf,
}

impl Groundcrew {
    /// `groundcrew run` against this cluster with the rights an installation grants it, on free ports, with its webhook
    /// registered by URL.
    #[must_use]
    pub fn builder(cluster: &Cluster) -> GroundcrewBuilder<'_> {
        GroundcrewBuilder {
            cluster,
            command: "run",
            name: "groundcrew".to_owned(),
            kubeconfig: None,
            proxy: None,
            webhook_port: None,
            webhook_url: None,
            config: None,
            arguments: Vec::new(),
            environment: Vec::new(),
        }
    }

    /// Waits until `/readyz` says yes.
    ///
    /// # Errors
    /// It ended, or the deadline passed; with the end of its log.
    pub async fn wait_ready(&mut self, deadline: Duration) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            let answer = fetch::get(self.health, "/readyz").await;
            if matches!(answer, Ok((200, _))) {
                return Ok(());
            }
            if let Some(status) = self.child.try_wait()? {
                anyhow::bail!("groundcrew ended with {status}:\n{}", self.log_tail());
            }
            let elapsed = began.elapsed();
            anyhow::ensure!(
                elapsed < deadline,
                "groundcrew is not ready after {elapsed:?}: {answer:?}\n{}",
                self.log_tail()
            );
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Where the API server calls it.
    #[must_use]
    pub fn webhook_addr(&self) -> SocketAddr {
        self.webhook
    }

    /// Where `/metrics` is.
    #[must_use]
    pub fn metrics_addr(&self) -> SocketAddr {
        self.metrics
    }

    /// Where `/livez` and `/readyz` are.
    #[must_use]
    pub fn health_addr(&self) -> SocketAddr {
        self.health
    }

    /// Its process id, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// SIGKILL, like a crash; returns when the process is gone.
    ///
    /// # Errors
    /// The process cannot be signalled.
    pub async fn kill(&mut self) -> anyhow::Result<()> {
        Ok(self.child.kill().await?)
    }

    /// SIGTERM; tells how it ended and how long that took.
    ///
    /// # Errors
    /// It had ended before, or does not end within a minute.
    pub async fn terminate(&mut self) -> anyhow::Result<(ExitStatus, Duration)> {
        let began = Instant::now();
        self.signal(Signal::TERM)?;
        let status = self.wait_exit(EXIT_DEADLINE).await?;
        Ok((status, began.elapsed()))
    }

    /// Waits until it ends by itself.
    ///
    /// # Errors
    /// It still runs after `deadline`.
    pub async fn wait_exit(&mut self, deadline: Duration) -> anyhow::Result<ExitStatus> {
        let ended = timeout(deadline, self.child.wait()).await;
        ended
            .with_context(|| format!("groundcrew still runs after {deadline:?}:\n{}", self.log_tail()))?
            .map_err(Into::into)
    }

    /// SIGSTOP: alive, connected and silent.
    ///
    /// # Errors
    /// It has ended.
    pub fn pause(&self) -> anyhow::Result<()> {
        self.signal(Signal::STOP)
    }

    /// SIGCONT.
    ///
    /// # Errors
    /// It has ended.
    pub fn resume(&self) -> anyhow::Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let raw = self.pid().context("groundcrew has ended")?;
        let pid = Pid::from_raw(i32::try_from(raw)?).context("not a process id")?;
        Ok(rustix::process::kill_process(pid, signal)?)
    }

    /// The page at `/metrics`.
    ///
    /// # Errors
    /// It does not answer 200.
    pub async fn metrics(&self) -> anyhow::Result<String> {
        let (status, body) = fetch::get(self.metrics, "/metrics").await?;
        anyhow::ensure!(status == 200, "/metrics answers {status}: {body}");
        Ok(body)
    }

    /// Everything it logged so far.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn log(&self) -> anyhow::Result<String> {
        std::fs::read_to_string(&self.log).with_context(|| format!("cannot read {}", self.log.display()))
    }

    fn log_tail(&self) -> String {
        tail(&self.log, 40)
    }
}

fn local(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}
