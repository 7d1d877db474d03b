//! What a failed test shows of its cluster.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::protocol::{ClusterInfo, Part};
use crate::tail::tail;

const LINES_PER_LOG: usize = 60;

/// The API server logs much that is unrelated to a test.
const APISERVER_LINES: usize = 20;

#[expect(clippy::print_stderr, reason = "the test harness shows this under the failed test")]
pub(crate) fn print(info: &ClusterInfo, logs: &[PathBuf]) {
    eprintln!("---- state of the cluster ----");
    for arguments in [
        ["get", "nodes,pods", "--all-namespaces", "--output=wide"].as_slice(),
        ["get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"].as_slice(),
    ] {
        eprintln!("$ kubectl {}\n{}", arguments.join(" "), kubectl(info, arguments));
    }
    for log in logs {
        show(log, LINES_PER_LOG);
    }
    if let Some(log) = info.logs.get(&Part::Apiserver) {
        show(log, APISERVER_LINES);
    }
    eprintln!("---- end of the cluster's state (GROUNDCREW_TESTBED_KEEP=1 keeps {}) ----", info.dir.display());
}

#[expect(clippy::print_stderr, reason = "the test harness shows this under the failed test")]
pub(crate) fn say(text: &str) {
    eprintln!("{text}");
}

#[expect(clippy::print_stderr, reason = "the test harness shows this under the failed test")]
fn show(log: &Path, lines: usize) {
    eprintln!("$ tail -n {lines} {}\n{}", log.display(), tail(log, lines));
}

fn kubectl(info: &ClusterInfo, arguments: &[&str]) -> String {
    let run = Command::new(&info.kubectl)
        .args(["--request-timeout=5s", "--kubeconfig"])
        .arg(&info.kubeconfig)
        .args(arguments)
        .stdin(Stdio::null())
        .output();
    match run {
        Ok(output) => {
            format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
        }
        Err(error) => format!("(cannot run {}: {error})", info.kubectl.display()),
    }
}
