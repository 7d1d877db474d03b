//! Finds the programs of this workspace, which lie next to one another in cargo's target directory, and its files.

use std::path::{Path, PathBuf};

use anyhow::Context;

/// The `testbed` program; `GROUNDCREW_TESTBED_BIN` overrides.
pub(crate) fn testbed() -> anyhow::Result<PathBuf> {
    sibling("testbed", "GROUNDCREW_TESTBED_BIN")
}

/// The `groundcrew` program; `GROUNDCREW_BIN` overrides.
///
/// # Errors
/// It is not built.
pub fn groundcrew() -> anyhow::Result<PathBuf> {
    sibling("groundcrew", "GROUNDCREW_BIN")
}

/// The checkout a test runs in, which is not always the one it was compiled in: clones may share a target directory.
#[must_use]
pub fn repository() -> PathBuf {
    let here = std::env::current_dir().unwrap_or_default();
    here.ancestors().find(|place| place.join("Cargo.lock").is_file()).map(Path::to_owned).unwrap_or_default()
}

fn sibling(name: &str, variable: &str) -> anyhow::Result<PathBuf> {
    if let Some(path) = std::env::var_os(variable).filter(|path| !path.is_empty()) {
        return Ok(PathBuf::from(path));
    }
    let own = std::env::current_exe().context("cannot tell where this program lies")?;
    // A program lies in target/<profile>/, a test in target/<profile>/deps/.
    let places: Vec<_> = own.ancestors().skip(1).take(2).map(|dir| dir.join(name)).collect();
    let found = places.iter().find(|path| path.is_file()).cloned();
    found.with_context(|| {
        let near = places.first().map_or(Path::new("."), PathBuf::as_path).display();
        format!("no `{name}` at {near} or one directory up: run `make build`, or set {variable}")
    })
}
