//! Container images made from files, without a container engine or a registry.
//!
//! ```text
//! files ──► layer.tar ──► OCI archive (config, manifest, index) ──► ctr images import
//! ```

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::Context;
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::{host, locate};

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
    entries: Vec<(String, u32, Content)>,
    entrypoint: Vec<String>,
    user: String,
}

impl Image {
    /// An empty root. Names need a registry's host, as in `groundcrew.test/web:1`, though none is ever asked: pods use
    /// `imagePullPolicy: Never`.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), entries: Vec::new(), entrypoint: Vec::new(), user: String::new() }
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
        Ok(Self::of_program(name, &locate::groundcrew()?))
    }

    /// The same with the program at this place.
    #[must_use]
    pub fn of_program(name: &str, program: &Path) -> Self {
        Self::new(name).file("groundcrew", program).entrypoint(["/groundcrew"]).user(NONROOT)
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

    /// Writes the image as an OCI archive.
    ///
    /// # Errors
    /// A file cannot be read, or the archive cannot be written.
    pub fn write_archive(&self, to: impl Write) -> anyhow::Result<()> {
        let layer = self.layer()?;
        let config = serde_json::to_vec(&self.config(&layer))?;
        let manifest = serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
            "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", &layer)],
        }))?;
        let mut named = descriptor("application/vnd.oci.image.manifest.v1+json", &manifest);
        if let Some(fields) = named.as_object_mut() {
            fields.insert("annotations".to_owned(), json!({"io.containerd.image.name": self.name}));
        }
        let index = serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": [named]}))?;
        let mut archive = tar::Builder::new(to);
        append(&mut archive, "oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        append(&mut archive, "index.json", 0o644, &index)?;
        for blob in [&config, &manifest, &layer] {
            append(&mut archive, &format!("blobs/sha256/{}", sha256(blob)), 0o644, blob)?;
        }
        archive.finish()?;
        Ok(())
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

    fn config(&self, layer: &[u8]) -> Value {
        // The words of Go, which differ from Rust's for the two machines we run on.
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        json!({
            "architecture": architecture,
            "os": "linux",
            "config": {"Entrypoint": self.entrypoint, "User": self.user, "Env": ["PATH=/bin"], "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{}", sha256(layer))]},
        })
    }

    /// Hands the image to a containerd.
    pub(crate) async fn import(&self, ctr: &Path, socket: &Path) -> anyhow::Result<()> {
        let mut archive = tempfile::NamedTempFile::new()?;
        self.write_archive(archive.as_file_mut())?;
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

fn descriptor(media_type: &str, bytes: &[u8]) -> Value {
    json!({"mediaType": media_type, "digest": format!("sha256:{}", sha256(bytes)), "size": bytes.len()})
}

fn sha256(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read;

    use super::{Image, sha256};

    fn unpack(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
        let mut reader = tar::Archive::new(archive);
        let entries = reader.entries().unwrap().map(Result::unwrap);
        entries
            .map(|mut entry| {
                let mut bytes = Vec::new();
                entry.read_to_end(&mut bytes).unwrap();
                (entry.path().unwrap().display().to_string(), bytes)
            })
            .collect()
    }

    #[test]
    fn archive_names_the_image_and_every_blob_by_its_digest() {
        let image = Image::new("groundcrew.test/web:1").text("/www/index.html", "hello").entrypoint(["/x"]).user("1:1");
        let mut bytes = Vec::new();
        image.write_archive(&mut bytes).unwrap();
        let files = unpack(&bytes);
        assert!(String::from_utf8_lossy(&files["index.json"]).contains("groundcrew.test/web:1"));
        let blobs: Vec<_> =
            files.iter().filter_map(|(path, bytes)| Some((path.strip_prefix("blobs/sha256/")?, bytes))).collect();
        assert_eq!(blobs.len(), 3);
        for (digest, bytes) in blobs {
            assert_eq!(digest, sha256(bytes));
        }
    }

    #[test]
    fn the_same_files_give_the_same_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("groundcrew");
        let archive = || {
            // A file of its own each time: its age and inode must not matter.
            let _ = std::fs::remove_file(&program);
            std::fs::write(&program, "binary").unwrap();
            let mut bytes = Vec::new();
            Image::of_program("groundcrew:1", &program).write_archive(&mut bytes).unwrap();
            bytes
        };
        assert_eq!(archive(), archive());
    }

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
