//! Puts the commit into the binary, for `--version`.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=GROUNDCREW_COMMIT");
    // Unlike HEAD itself, its log changes with every commit; git knows where it is in a worktree.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo:rerun-if-changed={log}");
    }
    let told = std::env::var("GROUNDCREW_COMMIT").ok();
    let commit = told.or_else(|| git(&["rev-parse", "--short=12", "HEAD"])).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo:rustc-env=GROUNDCREW_COMMIT={commit}");
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let answer = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !answer.is_empty()).then_some(answer)
}
