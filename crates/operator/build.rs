//! Puts the commit into the binary, for `--version`.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=GROUNDCREW_COMMIT");
    println!("cargo:rerun-if-changed=../../.git/HEAD");
    let commit = std::env::var("GROUNDCREW_COMMIT").ok().or_else(from_git).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo:rustc-env=GROUNDCREW_COMMIT={commit}");
}

fn from_git() -> Option<String> {
    let output = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output().ok()?;
    let commit = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !commit.is_empty()).then_some(commit)
}
