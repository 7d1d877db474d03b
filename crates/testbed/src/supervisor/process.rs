//! One child process of the supervisor: started on a leash, logged to a file, ended by its own pid.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::Context;
use rustix::process::{Pid, Signal};
use tokio::process::Child;

use super::leash;
use crate::tail::tail;

/// What to run.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<OsString>,
    pub(crate) environment: Vec<(&'static str, OsString)>,
}

impl Launch {
    pub(crate) fn new(program: &Path) -> Self {
        Self { program: program.to_owned(), arguments: Vec::new(), environment: Vec::new() }
    }

    /// Adds `--name=value`.
    pub(crate) fn flag(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        let mut argument = OsString::from(format!("--{name}="));
        argument.push(value.as_ref());
        self.arguments.push(argument);
        self
    }

    pub(crate) fn env(mut self, name: &'static str, value: impl Into<OsString>) -> Self {
        self.environment.push((name, value.into()));
        self
    }
}

#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    /// # Assumptions
    /// Called on the thread that lives as long as the supervisor: the leash snaps when the *thread* ends.
    pub(crate) fn spawn(launch: &Launch, log: &Path) -> anyhow::Result<Self> {
        let output = open_log(log)?;
        let mut command = leash::command(&launch.program)?;
        command.args(&launch.arguments).envs(launch.environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        // A group of its own: ctrl-c in a terminal must reach the supervisor alone, which then stops parts in order.
        command.process_group(0);
        let child = tokio::process::Command::from(command)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot run {}", launch.program.display()))?;
        Ok(Self { child, log: log.to_owned() })
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// The reason for giving up on a process that should be running but ended.
    pub(crate) fn ended(&mut self) -> anyhow::Result<Option<String>> {
        let status = self.child.try_wait()?;
        Ok(status.map(|status| format!("ended with {status}; the end of its log:\n{}", tail(&self.log, 20))))
    }

    pub(crate) fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let raw = self.pid().context("the process has ended")?;
        let pid = Pid::from_raw(i32::try_from(raw)?).context("not a process id")?;
        rustix::process::kill_process(pid, signal).with_context(|| format!("cannot signal process {raw}"))
    }

    /// Asks the process to end, and insists after `grace`.
    pub(crate) async fn stop(&mut self, grace: Duration) -> anyhow::Result<ExitStatus> {
        if self.pid().is_some() {
            // A paused process would not see the request to end.
            self.signal(Signal::CONT)?;
            self.signal(Signal::TERM)?;
            if let Ok(status) = tokio::time::timeout(grace, self.child.wait()).await {
                return Ok(status?);
            }
        }
        self.kill().await
    }

    pub(crate) async fn kill(&mut self) -> anyhow::Result<ExitStatus> {
        if self.pid().is_some() {
            self.child.start_kill()?;
        }
        Ok(self.child.wait().await?)
    }
}

/// Appends, so that the log of a restarted part keeps its first life.
fn open_log(path: &Path) -> anyhow::Result<File> {
    let file = OpenOptions::new().create(true).append(true).open(path);
    file.with_context(|| format!("cannot write the log {}", path.display()))
}
