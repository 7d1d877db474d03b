//! Container images made from files, without a container engine or a registry.
//!
//! ```text
//! files ──► layer.tar ──► OCI archive ──► ctr images import
//! ```

mod archive;
mod elf;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::Context;
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::{host, locate};

pub use archive::write_archive;

/// The user that images of operators commonly run as: no account, no rights.
const NONROOT: &str = "65532:65532";

/// Where the kubelet's containers live.
const CONTAINERD_NAMESPACE: &str = "k8s.io";

#[derive(Clone, Debug)]
enum Content {
    Copy(PathBuf),
    Bytes(Vec<u8>),
    Link(String),
    Directory,
}

/// An image to be: everything that is not added is absent.
#[derive(Clone, Debug)]
pub struct Image {
    name: String,
    architecture: &'static str,
    entries: Vec<(String, u32, Content)>,
    entrypoint: Vec<String>,
    user: String,
}

impl Image {
    /// An empty root for this machine. Names need a registry's host, as in `groundcrew.test/web:1`, though none is ever asked: pods use
    /// `imagePullPolicy: Never`.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let architecture = host_architecture();
        Self { name: name.to_owned(), architecture, entries: Vec::new(), entrypoint: Vec::new(), user: String::new() }
    }

    /// The machine's static busybox as shell and tools.
    ///
    /// # Errors
    /// There is none.
    pub fn busybox(name: &str) -> anyhow::Result<Self> {
        let busybox = host::find_program("busybox").context("no busybox here; see `testbed host-packages`")?;
        Ok(Self::new(name).file("bin/busybox", &busybox).link("bin/sh", "busybox").entrypoint(["/bin/busybox"]))
    }

    /// groundcrew as it is shipped: the static binary on an empty root, without rights.
    ///
    /// # Errors
    /// The program is not built.
    pub fn groundcrew(name: &str) -> anyhow::Result<Self> {
        Self::of_program(name, &locate::groundcrew()?)
    }

    /// The same with the program at this place, for whichever machine that is.
    ///
    /// # Errors
    /// The program cannot be read, or would not run on an empty root.
    pub fn of_program(name: &str, program: &Path) -> anyhow::Result<Self> {
        let bytes = std::fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
        let architecture = elf::architecture(&bytes).with_context(|| program.display().to_string())?;
        let image = Self::new(name).entry("groundcrew", 0o755, Content::Bytes(bytes));
        Ok(Self { architecture, ..image }.entrypoint(["/groundcrew"]).user(NONROOT))
    }

    /// Copies an executable file of this machine.
    #[must_use]
    pub fn file(self, path: &str, from: &Path) -> Self {
        self.entry(path, 0o755, Content::Copy(from.to_owned()))
    }

    /// Writes a file.
    #[must_use]
    pub fn text(self, path: &str, text: &str) -> Self {
        self.entry(path, 0o644, Content::Bytes(text.as_bytes().to_vec()))
    }

    /// A symbolic link.
    #[must_use]
    pub fn link(self, path: &str, target: &str) -> Self {
        self.entry(path, 0o777, Content::Link(target.to_owned()))
    }

    /// An empty directory; parents of files come by themselves.
    #[must_use]
    pub fn directory(self, path: &str, mode: u32) -> Self {
        self.entry(path, mode, Content::Directory)
    }

    fn entry(mut self, path: &str, mode: u32, content: Content) -> Self {
        self.entries.push((path.trim_start_matches('/').to_owned(), mode, content));
        self
    }

    /// What runs.
    #[must_use]
    pub fn entrypoint<S: Into<String>>(mut self, words: impl IntoIterator<Item = S>) -> Self {
        self.entrypoint = words.into_iter().map(Into::into).collect();
        self
    }

    /// As whom; root by default.
    #[must_use]
    pub fn user(mut self, user: &str) -> Self {
        user.clone_into(&mut self.user);
        self
    }

    /// Its name, for `image:` in a pod.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The machine it is for, in the words of OCI.
    #[must_use]
    pub fn architecture(&self) -> &str {
        self.architecture
    }

    fn layer(&self) -> anyhow::Result<Vec<u8>> {
        let mut layer = tar::Builder::new(Vec::new());
        let mut directories = std::collections::BTreeSet::new();
        for (path, mode, content) in &self.entries {
            let mut parents: Vec<_> =
                Path::new(path).ancestors().skip(1).filter(|p| !p.as_os_str().is_empty()).collect();
            parents.reverse();
            for parent in parents {
                if directories.insert(parent.to_owned()) {
                    append_special(&mut layer, parent, 0o755, tar::EntryType::Directory, None)?;
                }
            }
            match content {
                Content::Copy(from) => {
                    let bytes = std::fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
                    append(&mut layer, path, *mode, &bytes)?;
                }
                Content::Bytes(bytes) => append(&mut layer, path, *mode, bytes)?,
                Content::Link(target) => {
                    append_special(&mut layer, Path::new(path), *mode, tar::EntryType::Symlink, Some(target))?;
                }
                Content::Directory => {
                    directories.insert(PathBuf::from(path));
                    append_special(&mut layer, Path::new(path), *mode, tar::EntryType::Directory, None)?;
                }
            }
        }
        Ok(layer.into_inner()?)
    }

    fn config(&self, layer_digest: &str) -> Value {
        json!({
            "architecture": self.architecture,
            "os": "linux",
            "config": {"Entrypoint": self.entrypoint, "User": self.user, "Env": ["PATH=/bin"], "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{layer_digest}")]},
        })
    }

    /// Hands the image to a containerd.
    pub(crate) async fn import(&self, ctr: &Path, socket: &Path) -> anyhow::Result<()> {
        let mut archive = tempfile::NamedTempFile::new()?;
        write_archive(std::slice::from_ref(self), archive.as_file_mut())?;
        let run = tokio::process::Command::new(ctr)
            .arg("--address")
            .arg(socket)
            .args(["--namespace", CONTAINERD_NAMESPACE, "images", "import"])
            .arg(archive.path())
            .stdin(Stdio::null())
            .output()
            .await?;
        let complaint = String::from_utf8_lossy(&run.stderr);
        anyhow::ensure!(run.status.success(), "cannot import {}: {complaint}", self.name);
        Ok(())
    }
}

impl Cluster {
    /// Makes an image known to the real node.
    ///
    /// # Errors
    /// The cluster has no real node, or the import failed.
    pub async fn load_image(&self, image: &Image) -> anyhow::Result<()> {
        let node = self.info().node.as_ref().context("only layer 4 runs containers")?;
        image.import(&node.ctr, &node.containerd).await
    }
}

fn append<W: Write>(archive: &mut tar::Builder<W>, path: &str, mode: u32, bytes: &[u8]) -> anyhow::Result<()> {
    let mut header = header(mode, tar::EntryType::Regular);
    header.set_size(bytes.len().try_into()?);
    Ok(archive.append_data(&mut header, path, bytes)?)
}

fn append_special<W: Write>(
    archive: &mut tar::Builder<W>,
    path: &Path,
    mode: u32,
    kind: tar::EntryType,
    target: Option<&str>,
) -> anyhow::Result<()> {
    let mut header = header(mode, kind);
    match target {
        Some(target) => archive.append_link(&mut header, path, target)?,
        None => archive.append_data(&mut header, path, std::io::empty())?,
    }
    Ok(())
}

/// Owner, group and time are zero, so that the same files give the same digest.
fn header(mode: u32, kind: tar::EntryType) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(0);
    header
}

/// OCI speaks of machines with the words of Go, which differ from Rust's for the two we run on.
fn host_architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::Image;

    #[test]
    fn parents_come_once_and_before_their_files() {
        let image = Image::new("x/y:1").text("/a/b/c", "1").text("/a/b/d", "2").link("/a/e", "b");
        let layer = image.layer().unwrap();
        let mut archive = tar::Archive::new(layer.as_slice());
        let paths: Vec<_> =
            archive.entries().unwrap().map(|e| e.unwrap().path().unwrap().display().to_string()).collect();
        assert_eq!(paths, ["a", "a/b", "a/b/c", "a/b/d", "a/e"]);
    }
}
