//! What groundcrew is made of, as CycloneDX 1.5.
//!
//! Asked of `cargo tree`, which resolves features for a build of the binary alone: what only tests need, or only their
//! features bring in, is not listed. No time, number or path of the moment is in it, so it is as reproducible as the
//! binary.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use anyhow::Context;
use serde::Serialize;
use serde_json::{Value, json};

use crate::locate;

/// Name and version.
type Package = (String, String);

/// Lists what a binary for these targets is made of. What only its build needs has the scope `excluded`.
///
/// # Errors
/// cargo cannot tell.
pub fn sbom(targets: &[String]) -> anyhow::Result<Value> {
    let all = Tree::of(targets, "no-dev")?;
    let linked = Tree::of(targets, "no-dev,no-build,no-proc-macro")?;
    let lock = std::fs::read_to_string(locate::repository().join("Cargo.lock")).context("no Cargo.lock here")?;
    let checksums = checksums(&lock);
    let component = |package: &Package| {
        let checksum = checksums.get(package).map(|checksum| [Checksum { alg: "SHA-256", content: checksum }]);
        let license = all.licenses.get(package).cloned().unwrap_or_default();
        Component {
            kind: if *package == all.root { "application" } else { "library" },
            reference: reference(package),
            name: package.0.clone(),
            version: package.1.clone(),
            scope: if linked.licenses.contains_key(package) { "required" } else { "excluded" },
            // Some crates still write the "or" of two licenses as a slash.
            licenses: [License { expression: license.replace('/', " OR ") }],
            purl: checksum.is_some().then(|| reference(package)),
            hashes: checksum,
        }
    };
    let components: Vec<_> = all.licenses.keys().filter(|package| **package != all.root).map(component).collect();
    let dependencies = all.edges.iter().map(
        |(package, on)| json!({"ref": reference(package), "dependsOn": on.iter().map(reference).collect::<Vec<_>>()}),
    );
    Ok(json!({
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": {"component": component(&all.root)},
        "components": components, "dependencies": dependencies.collect::<Vec<_>>(),
    }))
}

#[derive(Serialize)]
struct Component<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(rename = "bom-ref")]
    reference: String,
    name: String,
    version: String,
    scope: &'static str,
    licenses: [License; 1],
    /// Like the hashes only of what is in a registry, and not of our own crates.
    #[serde(skip_serializing_if = "Option::is_none")]
    purl: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hashes: Option<[Checksum<'a>; 1]>,
}

#[derive(Serialize)]
struct License {
    expression: String,
}

#[derive(Serialize)]
struct Checksum<'a> {
    alg: &'static str,
    content: &'a str,
}

struct Tree {
    root: Package,
    licenses: BTreeMap<Package, String>,
    edges: BTreeMap<Package, BTreeSet<Package>>,
}

impl Tree {
    fn of(targets: &[String], edges: &str) -> anyhow::Result<Self> {
        let mut cargo = cargo();
        cargo.args(["tree", "--locked", "--package", "groundcrew", "--prefix", "depth", "--format", "{p}|{l}"]);
        cargo.args(["--edges", edges]).args(targets.iter().flat_map(|target| ["--target", target]));
        let output = cargo.output().context("cannot run cargo")?;
        anyhow::ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self::read(&String::from_utf8(output.stdout)?)
    }

    /// A line is `<depth><name> v<version> …|<license>`, and hangs on the last line that is less deep.
    fn read(lines: &str) -> anyhow::Result<Self> {
        let (mut licenses, mut edges) = (BTreeMap::new(), BTreeMap::<Package, BTreeSet<Package>>::new());
        let mut path: Vec<Package> = Vec::new();
        for line in lines.lines().filter(|line| !line.is_empty()) {
            let unknown = || format!("`cargo tree` says {line:?}");
            let start = line.find(|sign: char| !sign.is_ascii_digit()).with_context(unknown)?;
            let (depth, rest) = line.split_at(start);
            let (package, license) = rest.split_once('|').with_context(unknown)?;
            let mut words = package.split(' ');
            let (name, version) = words.next().zip(words.next()).with_context(unknown)?;
            let package = (name.to_owned(), version.trim_start_matches('v').to_owned());
            path.truncate(depth.parse()?);
            if let Some(parent) = path.last() {
                edges.entry(parent.clone()).or_default().insert(package.clone());
            }
            licenses.insert(package.clone(), license.trim_end_matches(" (*)").to_owned());
            path.push(package);
        }
        let root = path.into_iter().next().context("`cargo tree` says nothing")?;
        Ok(Self { root, licenses, edges })
    }
}

/// The one that runs us, if any does.
fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// The package URL; a `+` in a version is data there.
fn reference((name, version): &Package) -> String {
    format!("pkg:cargo/{name}@{}", version.replace('+', "%2B"))
}

/// Of every package that comes from a registry.
fn checksums(lock: &str) -> BTreeMap<Package, &str> {
    let packages = lock.split("[[package]]").filter_map(|package| {
        let field =
            |key: &str| package.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = ")).map(unquoted);
        Some(((field("name")?.to_owned(), field("version")?.to_owned()), field("checksum")?))
    });
    packages.collect()
}

fn unquoted(text: &str) -> &str {
    text.trim_matches('"')
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use serde_json::Value;

    use super::{cargo, sbom};
    use crate::locate;

    const TARGET: &str = "x86_64-unknown-linux-gnu";

    fn text(value: &Value) -> String {
        value.as_str().unwrap_or_default().to_owned()
    }

    fn list(value: &Value) -> &[Value] {
        value.as_array().map(Vec::as_slice).unwrap_or_default()
    }

    /// What manifests say, which cargo resolves to what the SBOM says.
    fn manifests() -> BTreeMap<String, Value> {
        let answer = cargo()
            .args(["metadata", "--locked", "--format-version", "1", "--filter-platform", TARGET])
            .output()
            .unwrap();
        let metadata: Value = serde_json::from_slice(&answer.stdout).unwrap();
        let packages = list(&metadata["packages"]).iter();
        packages.map(|p| (format!("{}@{}", text(&p["name"]), text(&p["version"])), p.clone())).collect()
    }

    fn names(manifest: &Value, kind: Option<&str>) -> BTreeSet<String> {
        let always = |d: &&Value| d["kind"].as_str() == kind && d["optional"] == false && d["target"].is_null();
        list(&manifest["dependencies"]).iter().filter(always).map(|d| text(&d["name"])).collect()
    }

    #[test]
    fn everything_that_is_linked_is_listed_and_nothing_that_only_tests_use() {
        let bom = sbom(&[TARGET.to_owned()]).unwrap();
        let manifests = manifests();
        let root = &bom["metadata"]["component"];
        assert_eq!(root["name"], "groundcrew");
        let linked: Vec<_> = list(&bom["components"]).iter().filter(|c| c["scope"] == "required").collect();
        let listed: BTreeSet<_> = list(&bom["components"]).iter().map(|c| text(&c["name"])).collect();
        assert!(linked.len() > 100, "{}", linked.len());
        for component in linked.iter().chain([&root]) {
            let key = format!("{}@{}", text(&component["name"]), text(&component["version"]));
            let missing: Vec<_> = names(&manifests[&key], None).difference(&listed).cloned().collect();
            assert!(missing.is_empty(), "{key} needs {missing:?}");
        }
        for name in ["rstest", "tempfile", "proptest", "serde_path_to_error", "groundcrew-testbed"] {
            assert!(!listed.contains(name), "{name} is for tests");
        }
    }

    #[test]
    fn whoever_audits_it_finds_license_and_checksum_and_no_path_of_this_machine() {
        let bom = sbom(&[TARGET.to_owned()]).unwrap();
        for component in list(&bom["components"]) {
            assert!(component["licenses"][0]["expression"].is_string(), "{component}");
            let ours = text(&component["name"]).starts_with("groundcrew-");
            assert_eq!(text(&component["hashes"][0]["content"]).len(), if ours { 0 } else { 64 }, "{component}");
        }
        assert!(!bom.to_string().contains(&locate::repository().display().to_string()));
    }

    #[test]
    fn every_reference_is_to_one_component() {
        let bom = sbom(&[TARGET.to_owned(), "aarch64-unknown-linux-gnu".to_owned()]).unwrap();
        let all = list(&bom["components"]).iter().chain([&bom["metadata"]["component"]]);
        let references: Vec<_> = all.map(|component| text(&component["bom-ref"])).collect();
        let known: BTreeSet<_> = references.iter().cloned().collect();
        assert_eq!(references.len(), known.len(), "one of them is there twice");
        for dependency in list(&bom["dependencies"]) {
            let on = list(&dependency["dependsOn"]).iter().chain([&dependency["ref"]]);
            let unknown: Vec<_> = on.map(text).filter(|reference| !known.contains(reference)).collect();
            assert!(unknown.is_empty(), "{unknown:?}");
        }
    }
}
