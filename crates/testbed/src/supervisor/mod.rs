//! Runs the processes of one cluster and answers for their end.
//!
//! A test talks to `testbed supervise` over a pipe, see [`protocol`](crate::protocol). When the test ends, in whatever way,
//! the pipe closes and the supervisor stops everything; when the supervisor itself is killed, the [`leash`] does it.

mod cleanup;
mod control_plane;
pub mod leash;
mod node_parts;
mod plan;
mod process;
mod ready;

pub(crate) use plan::apiserver_flags;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::Layer;
use crate::assets::Assets;
use crate::protocol::{ClusterInfo, Order, Part, Report};
use cleanup::Machine;
use plan::Plan;
use process::{Launch, Process};

pub(crate) use leash::command as leashed;

/// Ports are free when picked, but another test may be faster; a second collision in a row is no accident.
const ATTEMPTS: u32 = 3;

/// For a part that is asked to end while the cluster goes on. The API server drains its requests.
const GRACE: Duration = Duration::from_secs(10);

/// What to supervise and who holds the other end.
#[derive(Debug)]
pub struct Options {
    /// What to run.
    pub layer: Layer,
    /// Where; without it a directory is made and removed at the end.
    pub dir: Option<PathBuf>,
    /// Take orders from standard input and end with it; otherwise only signals end the supervisor.
    pub leashed_to_stdin: bool,
}

/// Starts a cluster, announces it with `announce`, serves orders until the leash is let go, stops everything.
///
/// # Assumptions
/// Runs on the process' main thread, in a current-thread runtime: children live as long as the thread that starts them.
///
/// # Errors
/// A part did not start; whatever did start is stopped before the error is returned.
pub async fn run(options: Options, announce: impl Fn(&ClusterInfo) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let mut holder = Holder::new(options.leashed_to_stdin)?;
    let temporary = match options.dir {
        Some(_) => None,
        None => Some(tempfile::Builder::new().prefix(cleanup::TEMPORARY_PREFIX).tempdir()?),
    };
    let dir = match (&options.dir, &temporary) {
        (Some(dir), _) => std::path::absolute(dir)?,
        (None, Some(dir)) => dir.path().to_owned(),
        (None, None) => anyhow::bail!("no directory to work in"),
    };
    let layer = options.layer;
    let assets = tokio::select! {
        found = tokio::task::spawn_blocking(move || Assets::ensure(layer)) => found??,
        () = holder.let_go() => return Ok(()),
    };
    let machine = tokio::select! {
        claimed = Machine::claim(layer, &dir, &assets) => claimed?,
        () = holder.let_go() => return Ok(()),
    };
    let mut supervisor = tokio::select! {
        started = Supervisor::start(layer, &dir, &assets) => started?,
        // Dropping the start kills what it had started; only a real node leaves more than processes behind.
        () = holder.let_go() => {
            cleanup::sweep(layer, &dir, &assets).await?;
            return machine.release();
        }
    };
    announce(&supervisor.info()?)?;
    supervisor.serve(&mut holder).await;
    supervisor.stop_all().await?;
    if std::env::var_os("GROUNDCREW_TESTBED_KEEP").is_some() {
        // For a look at logs and data after a failed test.
        temporary.map(tempfile::TempDir::keep);
    }
    machine.release()
}

/// Prints one line of the protocol on standard output.
///
/// # Errors
/// Nobody reads.
pub fn announce_ready(info: &ClusterInfo) -> anyhow::Result<()> {
    say(&Report::Ready(Box::new(info.clone())))
}

/// Tells the test why there is no cluster.
///
/// # Errors
/// Nobody reads.
pub fn announce_failure(error: &anyhow::Error) -> anyhow::Result<()> {
    say(&Report::Failed(format!("{error:#}")))
}

fn say(report: &Report) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, report)?;
    out.write_all(b"\n")?;
    out.flush()?;
    Ok(())
}

struct Supervisor {
    plan: Plan,
    running: BTreeMap<Part, Process>,
}

impl Supervisor {
    async fn start(layer: Layer, dir: &Path, assets: &Assets) -> anyhow::Result<Self> {
        let mut attempt = 1;
        loop {
            let mut supervisor = Self { plan: Plan::create(layer, dir, assets)?, running: BTreeMap::new() };
            let Err(error) = supervisor.start_all().await else { return Ok(supervisor) };
            supervisor.stop_all().await?;
            if attempt == ATTEMPTS || !format!("{error:#}").contains("address already in use") {
                return Err(error);
            }
            attempt += 1;
            std::fs::remove_dir_all(dir.join("etcd"))?;
        }
    }

    /// The store first, then the API server, then everybody who talks to it; containerd talks to nobody.
    async fn start_all(&mut self) -> anyhow::Result<()> {
        let parts: Vec<_> = self.plan.parts().collect();
        if parts.contains(&Part::Containerd) {
            self.spawn(Part::Containerd)?;
        }
        self.spawn(Part::Etcd)?;
        self.wait(Part::Etcd).await?;
        self.spawn(Part::Apiserver)?;
        if parts.contains(&Part::Containerd) {
            self.wait(Part::Containerd).await?;
            node_parts::load_pause_image(&self.plan).await?;
        }
        self.wait(Part::Apiserver).await?;
        let others: Vec<_> = parts.into_iter().filter(|part| !self.running.contains_key(part)).collect();
        for part in &others {
            self.spawn(*part)?;
        }
        for part in others {
            self.wait(part).await?;
        }
        ready::cluster(&self.plan).await
    }

    fn spawn(&mut self, part: Part) -> anyhow::Result<()> {
        let process = Process::spawn(&self.launch(part)?, &self.plan.log(part))?;
        self.running.insert(part, process);
        Ok(())
    }

    fn launch(&self, part: Part) -> anyhow::Result<Launch> {
        let plan = &self.plan;
        match part {
            Part::Etcd => control_plane::etcd(plan),
            Part::Apiserver => control_plane::apiserver(plan),
            Part::ControllerManager => control_plane::controller_manager(plan),
            Part::Scheduler => control_plane::scheduler(plan),
            Part::Kwok => control_plane::kwok(plan),
            Part::Containerd => node_parts::containerd(plan),
            Part::Kubelet => node_parts::kubelet(plan),
            Part::KubeProxy => node_parts::kube_proxy(plan),
        }
    }

    async fn wait(&mut self, part: Part) -> anyhow::Result<()> {
        let process = self.running.get_mut(&part).with_context(|| format!("{part} was not started"))?;
        ready::wait(&self.plan, part, process).await
    }

    fn info(&self) -> anyhow::Result<ClusterInfo> {
        let pids = self.running.iter().filter_map(|(part, process)| Some((*part, process.pid()?))).collect();
        Ok(ClusterInfo { pids, ..self.plan.info()? })
    }

    async fn serve(&mut self, holder: &mut Holder) {
        while let Some(line) = holder.next_line().await {
            let done = match serde_json::from_str(&line) {
                Ok(order) => self.obey(order).await,
                Err(error) => Err(anyhow::Error::from(error).context(format!("not an order: {line}"))),
            };
            let report = match done {
                Ok(pid) => Report::Done { pid },
                Err(error) => Report::Failed(format!("{error:#}")),
            };
            if say(&report).is_err() {
                return;
            }
        }
    }

    async fn obey(&mut self, order: Order) -> anyhow::Result<Option<u32>> {
        match order {
            Order::Start(part) => {
                anyhow::ensure!(!self.running.contains_key(&part), "{part} runs already");
                self.spawn(part)?;
                self.wait(part).await?;
                return Ok(self.running.get(&part).and_then(Process::pid));
            }
            Order::Stop(part) => {
                self.take(part)?.stop(GRACE).await?;
            }
            Order::Kill(part) => {
                self.take(part)?.kill().await?;
            }
            Order::Pause(part) => self.get(part)?.signal(Signal::STOP)?,
            Order::Resume(part) => self.get(part)?.signal(Signal::CONT)?,
        }
        Ok(None)
    }

    fn get(&self, part: Part) -> anyhow::Result<&Process> {
        self.running.get(&part).with_context(|| format!("{part} does not run"))
    }

    fn take(&mut self, part: Part) -> anyhow::Result<Process> {
        self.running.remove(&part).with_context(|| format!("{part} does not run"))
    }

    /// Kubelet first so that nobody restarts containers, then what it left, then the others, killed: their data is
    /// thrown away, so there is nothing to wait for.
    async fn stop_all(mut self) -> anyhow::Result<()> {
        for part in [Part::Kubelet, Part::KubeProxy] {
            if let Some(mut process) = self.running.remove(&part) {
                process.stop(GRACE).await?;
            }
        }
        if self.plan.layer == Layer::Nodes {
            cleanup::kill_containers(&self.plan.dir).await?;
        }
        while let Some((_, mut process)) = self.running.pop_last() {
            process.kill().await?;
        }
        cleanup::sweep(self.plan.layer, &self.plan.dir, &self.plan.assets).await
    }
}

/// Whoever started the supervisor: sends orders, and lets go by closing the pipe or by a signal.
struct Holder {
    lines: mpsc::Receiver<String>,
}

impl Holder {
    fn new(read_stdin: bool) -> anyhow::Result<Self> {
        let (sender, mut input) = mpsc::channel(16);
        let (orders, lines) = mpsc::channel(16);
        // Held by the task below when nobody reads: then only signals end us.
        let mut unread = None;
        if read_stdin {
            // A plain thread: a read of standard input cannot be interrupted, and must not keep the runtime from ending.
            std::thread::spawn(move || {
                for line in std::io::stdin().lines().map_while(Result::ok) {
                    if sender.blocking_send(line).is_err() {
                        return;
                    }
                }
            });
        } else {
            unread = Some(sender);
        }
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::spawn(async move {
            let _unread = unread;
            loop {
                let line = tokio::select! {
                    line = input.recv() => line,
                    _ = interrupt.recv() => None,
                    _ = terminate.recv() => None,
                };
                // Dropping the sender of orders is the message.
                let Some(line) = line else { return };
                if orders.send(line).await.is_err() {
                    return;
                }
            }
        });
        Ok(Self { lines })
    }

    async fn next_line(&mut self) -> Option<String> {
        self.lines.recv().await
    }

    /// Resolves when nobody holds the leash any more. Orders sent before the cluster is ready are not expected.
    async fn let_go(&mut self) {
        while self.lines.recv().await.is_some() {}
    }
}
