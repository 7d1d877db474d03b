//! The OCI archive: a tar file of blobs named by their digests, and an index that leads to them.
//!
//! ```text
//! index.json ──► index of machines ──► manifest per machine ──► config, layer
//! ```

use std::collections::BTreeMap;
use std::io::Write;

use anyhow::Context;
use serde_json::{Value, json};

use super::{Image, append};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// Writes one image, made for one machine or for several; the first tells its name.
///
/// # Errors
/// There is none, two are for the same machine, a file cannot be read, or the archive cannot be written.
pub fn write_archive(machines: &[Image], to: impl Write) -> anyhow::Result<()> {
    let name = machines.first().context("no image")?.name();
    let mut blobs = Blobs::default();
    let mut manifests = BTreeMap::new();
    for image in machines {
        let layer = image.layer()?;
        let config = blobs.add(CONFIG, serde_json::to_vec(&image.config(&sha256(&layer)))?);
        let layer = blobs.add(LAYER, layer);
        let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer]});
        let mut manifest = blobs.add(MANIFEST, serde_json::to_vec(&manifest)?);
        set(&mut manifest, "platform", json!({"architecture": image.architecture, "os": "linux"}));
        let twice = manifests.insert(image.architecture, manifest).is_some();
        anyhow::ensure!(!twice, "two images for {}", image.architecture);
    }
    let manifests: Vec<_> = manifests.into_values().collect();
    let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests});
    let mut index = blobs.add(INDEX, serde_json::to_vec(&index)?);
    set(&mut index, "annotations", json!({"io.containerd.image.name": name}));

    let mut archive = tar::Builder::new(to);
    append(&mut archive, "oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    let start = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [index]});
    append(&mut archive, "index.json", 0o644, &serde_json::to_vec(&start)?)?;
    for (digest, blob) in &blobs.0 {
        append(&mut archive, &format!("blobs/sha256/{digest}"), 0o644, blob)?;
    }
    archive.finish()?;
    Ok(())
}

/// By digest.
#[derive(Default)]
struct Blobs(BTreeMap<String, Vec<u8>>);

impl Blobs {
    /// Takes a blob in and hands back what others refer to it by.
    fn add(&mut self, media_type: &str, bytes: Vec<u8>) -> Value {
        let digest = sha256(&bytes);
        let descriptor = json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len()});
        self.0.insert(digest, bytes);
        descriptor
    }
}

fn set(object: &mut Value, key: &str, value: Value) {
    if let Some(fields) = object.as_object_mut() {
        fields.insert(key.to_owned(), value);
    }
}

fn sha256(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read;
    use std::path::Path;

    use serde_json::Value;

    use super::{sha256, write_archive};
    use crate::image::Image;
    use crate::image::elf::made_up;

    const AMD64: u16 = 62;
    const ARM64: u16 = 183;

    fn archive(machines: &[Image]) -> Vec<u8> {
        let mut bytes = Vec::new();
        write_archive(machines, &mut bytes).unwrap();
        bytes
    }

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

    /// What a descriptor leads to; its size is right.
    fn follow(files: &BTreeMap<String, Vec<u8>>, descriptor: &Value) -> Vec<u8> {
        let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
        let blob = files[&format!("blobs/sha256/{digest}")].clone();
        assert_eq!(descriptor["size"], blob.len());
        blob
    }

    fn json(bytes: &[u8]) -> Value {
        serde_json::from_slice(bytes).unwrap()
    }

    fn program(dir: &Path, machine: u16) -> Image {
        let path = dir.join(machine.to_string());
        // A file of its own each time: its age and inode must not matter.
        let _ = std::fs::remove_file(&path);
        std::fs::write(&path, made_up(machine, 1)).unwrap();
        Image::of_program("groundcrew:1", &path).unwrap()
    }

    #[test]
    fn the_name_leads_to_a_program_for_each_machine() {
        let dir = tempfile::tempdir().unwrap();
        let files = unpack(&archive(&[program(dir.path(), ARM64), program(dir.path(), AMD64)]));
        let start = json(&files["index.json"]);
        assert_eq!(start["manifests"][0]["annotations"]["io.containerd.image.name"], "groundcrew:1");
        let machines = json(&follow(&files, &start["manifests"][0]));
        for (at, architecture, machine) in [(0, "amd64", AMD64), (1, "arm64", ARM64)] {
            let descriptor = &machines["manifests"][at];
            assert_eq!(descriptor["platform"]["architecture"], architecture);
            let manifest = json(&follow(&files, descriptor));
            assert_eq!(json(&follow(&files, &manifest["config"]))["architecture"], architecture);
            let layer = unpack(&follow(&files, &manifest["layers"][0]));
            assert_eq!(layer, BTreeMap::from([("groundcrew".to_owned(), made_up(machine, 1))]), "nothing else");
        }
        assert_eq!(machines["manifests"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn every_blob_is_named_by_its_digest() {
        let image = Image::new("groundcrew.test/web:1").text("/www/index.html", "hello").entrypoint(["/x"]).user("1:1");
        let files = unpack(&archive(&[image]));
        let blobs: Vec<_> =
            files.iter().filter_map(|(path, bytes)| Some((path.strip_prefix("blobs/sha256/")?, bytes))).collect();
        assert_eq!(blobs.len(), 4);
        for (digest, bytes) in blobs {
            assert_eq!(digest, sha256(bytes));
        }
    }

    #[test]
    fn the_same_files_give_the_same_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let once = archive(&[program(dir.path(), AMD64), program(dir.path(), ARM64)]);
        assert_eq!(once, archive(&[program(dir.path(), ARM64), program(dir.path(), AMD64)]));
    }

    #[test]
    fn one_machine_has_one_program() {
        let dir = tempfile::tempdir().unwrap();
        let twice = [program(dir.path(), AMD64), program(dir.path(), AMD64)];
        let error = write_archive(&twice, Vec::new()).unwrap_err();
        assert!(error.to_string().contains("amd64"), "{error}");
    }
}
