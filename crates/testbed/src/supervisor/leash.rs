//! Ties a child's life to its parent's, even when the parent is killed and cannot clean up.
//!
//! Linux sends a chosen signal to a process whose parent *thread* ends, but a process must ask for that itself. So the
//! testbed starts `testbed leashed <parent> <program> …`, which asks and then becomes the program.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::Context;
use rustix::process::{Pid, Signal};

use crate::locate;

/// The hidden subcommand of `testbed` that [`become_program`] serves.
pub const SUBCOMMAND: &str = "leashed";

/// A command that runs `program` and is killed with the thread that spawns it.
pub(crate) fn command(program: &Path) -> anyhow::Result<Command> {
    let mut command = Command::new(locate::testbed()?);
    command.arg(SUBCOMMAND).arg(std::process::id().to_string()).arg(program);
    Ok(command)
}

/// Asks to be killed with the parent and turns into `program`.
///
/// # Errors
/// The parent is gone already, or the program cannot be run.
pub fn become_program(parent: i32, program: &Path, arguments: &[OsString]) -> anyhow::Result<Infallible> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // The parent may have died before we asked, and then no signal will ever come.
    anyhow::ensure!(rustix::process::getppid().map(Pid::as_raw_pid) == Some(parent), "the parent has ended");
    let error = Command::new(program).args(arguments).exec();
    Err(error).with_context(|| format!("cannot run {}", program.display()))
}
