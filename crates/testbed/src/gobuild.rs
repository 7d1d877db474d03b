//! Builds Kubernetes, etcd, kwok, containerd, helm and cert-manager from their Go modules, once per version.
//!
//! ```text
//! controlplane/*/go.mod ──► <cache>/bin/.build-*/  ──rename──► <cache>/bin/<versions>-<hash>/kube-apiserver …
//!                                                              <cache>/bin/helm-<version>-<hash>/helm
//!                                                              <cache>/bin/cert-manager-<version>-<hash>/cert-manager
//! ```
//!
//! # Guarantees
//! A file in the cache is complete: it appears by rename. Concurrent builders wait for one another on a file lock, and
//! the second finds the work done.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::Context;

use crate::Layer;
use crate::assets::Program;

/// Of the servers in `controlplane/kubernetes/go.mod`; without it they would call themselves v0.0.0.
pub const KUBERNETES_VERSION: &str = "1.36.3";

/// kwok reads its stages from a file; its module ships them, its binary does not.
pub(crate) const KWOK_STAGES: &str = "kwok-stages.yaml";

/// Nodes that stay ready by a lease like real ones, pods that run as soon as they are bound.
const KWOK_STAGE_FILES: [&str; 5] = [
    "node/fast/node-initialize.yaml",
    "node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
    "pod/fast/pod-ready.yaml",
    "pod/fast/pod-complete.yaml",
    "pod/fast/pod-delete.yaml",
];

/// Source files are part of this binary, so that it builds the same control plane wherever it runs.
struct GoModule {
    name: &'static str,
    files: &'static [(&'static str, &'static str)],
}

const KUBERNETES: GoModule = GoModule {
    name: "kubernetes",
    files: &[
        ("go.mod", include_str!("../controlplane/kubernetes/go.mod")),
        ("go.sum", include_str!("../controlplane/kubernetes/go.sum")),
        ("etcd/main.go", include_str!("../controlplane/kubernetes/etcd/main.go")),
    ],
};

/// Its dependencies do not fit those of Kubernetes, hence a module of its own.
const CONTAINERD: GoModule = GoModule {
    name: "containerd",
    files: &[
        ("go.mod", include_str!("../controlplane/containerd/go.mod")),
        ("go.sum", include_str!("../controlplane/containerd/go.sum")),
    ],
};

/// Not a part of any cluster, and cached apart: a new helm does not build Kubernetes anew.
const HELM: GoModule = GoModule {
    name: "helm",
    files: &[
        ("go.mod", include_str!("../controlplane/helm/go.mod")),
        ("go.sum", include_str!("../controlplane/helm/go.sum")),
    ],
};

const HELM_VERSION: &str = "4.3.1";

/// Its controllers in a program of ours: those of its own are in modules that no proxy serves.
const CERT_MANAGER: GoModule = GoModule {
    name: "cert-manager",
    files: &[
        ("go.mod", include_str!("../controlplane/cert-manager/go.mod")),
        ("go.sum", include_str!("../controlplane/cert-manager/go.sum")),
        ("main.go", include_str!("../controlplane/cert-manager/main.go")),
    ],
};

const CERT_MANAGER_VERSION: &str = "1.21.2";

/// Beside cert-manager's program; its module ships them, a cluster needs them first.
const CERT_MANAGER_DEFINITIONS: &str = "definitions.yaml";

/// Those that the controllers in our program watch.
const CERT_MANAGER_DEFINITION_FILES: [&str; 4] = [
    "cert-manager.io_certificaterequests.yaml",
    "cert-manager.io_certificates.yaml",
    "cert-manager.io_clusterissuers.yaml",
    "cert-manager.io_issuers.yaml",
];

/// The parts of a cluster are cached together: containerd looks for its shim beside itself.
const MODULES: [&GoModule; 2] = [&KUBERNETES, &CONTAINERD];

impl Program {
    fn module(self) -> &'static GoModule {
        match self {
            Self::Containerd | Self::ContainerdShim | Self::Ctr => &CONTAINERD,
            _ => &KUBERNETES,
        }
    }

    fn package(self) -> String {
        match self {
            Self::Etcd => "./etcd".to_owned(),
            Self::Kwok => "sigs.k8s.io/kwok/cmd/kwok".to_owned(),
            Self::Containerd | Self::ContainerdShim | Self::Ctr => {
                format!("github.com/containerd/containerd/v2/cmd/{}", self.name())
            }
            _ => format!("k8s.io/kubernetes/cmd/{}", self.name()),
        }
    }
}

/// Names what is built: the version for people, a hash of all sources and flags for correctness.
pub(crate) fn cache_key() -> String {
    let flags = linker_flags();
    let hash = hash_of(&MODULES, std::iter::once(flags.as_str()).chain(KWOK_STAGE_FILES));
    format!("kubernetes-{KUBERNETES_VERSION}-{hash}")
}

fn hash_of<'a>(modules: &[&GoModule], more: impl Iterator<Item = &'a str>) -> String {
    let mut hash = ring::digest::Context::new(&ring::digest::SHA256);
    for module in modules {
        for (path, text) in module.files {
            for part in [module.name, path, text] {
                hash.update(part.as_bytes());
                hash.update(&[0]);
            }
        }
    }
    for text in more {
        hash.update(text.as_bytes());
    }
    hash.finish().as_ref().iter().take(6).map(|byte| format!("{byte:02x}")).collect()
}

/// Builds helm unless it is there, and tells where.
pub(crate) fn build_helm(cache: &Path) -> anyhow::Result<PathBuf> {
    let flags = format!("-s -w -X helm.sh/helm/v4/internal/version.version=v{HELM_VERSION}");
    build_apart(cache, &HELM, HELM_VERSION, &flags, "helm.sh/helm/v4/cmd/helm", |_| Ok(None))
}

/// Builds cert-manager unless it is there, and tells where its program and its definitions are.
pub(crate) fn build_cert_manager(cache: &Path) -> anyhow::Result<(PathBuf, PathBuf)> {
    let program = build_apart(cache, &CERT_MANAGER, CERT_MANAGER_VERSION, "-s -w", ".", |sources| {
        let module = ("github.com/cert-manager/cert-manager", "deploy/crds");
        Ok(Some((CERT_MANAGER_DEFINITIONS, yaml_of(sources, module, &CERT_MANAGER_DEFINITION_FILES)?)))
    })?;
    let definitions = program.with_file_name(CERT_MANAGER_DEFINITIONS);
    Ok((program, definitions))
}

/// Builds a module's one program, which has the module's name, into a directory of its own.
fn build_apart(
    cache: &Path,
    module: &GoModule,
    version: &str,
    flags: &str,
    package: &str,
    beside: impl Fn(&Path) -> anyhow::Result<Option<Beside>>,
) -> anyhow::Result<PathBuf> {
    let parent = cache.join("bin");
    let dir = parent.join(format!("{}-{version}-{}", module.name, hash_of(&[module], std::iter::empty())));
    let program = dir.join(module.name);
    if program.is_file() {
        return Ok(program);
    }
    let _lock = lock(&parent, &dir)?;
    if !program.is_file() {
        go_build(&parent, &dir, module, flags, &[(module.name, package.to_owned())], beside)?;
    }
    Ok(program)
}

/// Concurrent builders wait here for one another.
fn lock(parent: &Path, dir: &Path) -> anyhow::Result<File> {
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let lock = File::create(parent.join(".lock"))?;
    lock.lock().context("cannot lock the cache of built programs")?;
    Ok(lock)
}

/// Builds those of `programs` that `dir` lacks.
pub(crate) fn build_missing(dir: &Path, programs: &[Program]) -> anyhow::Result<()> {
    if missing(dir, programs).is_empty() {
        return Ok(());
    }
    let parent = dir.parent().context("the cache directory has no parent")?;
    let _lock = lock(parent, dir)?;
    // Somebody else may have built them while we waited for the lock.
    let missing = missing(dir, programs);
    // Layer by layer: an interrupted build keeps the lower layers.
    for layer in Layer::ALL {
        for module in MODULES {
            let group: Vec<_> =
                missing.iter().copied().filter(|p| p.layer() == layer && p.module().name == module.name).collect();
            build_group(parent, dir, module, &group)?;
        }
    }
    Ok(())
}

fn missing(dir: &Path, programs: &[Program]) -> Vec<Program> {
    programs.iter().copied().filter(|program| !is_built(dir, *program)).collect()
}

fn is_built(dir: &Path, program: Program) -> bool {
    dir.join(program.name()).is_file() && (program != Program::Kwok || dir.join(KWOK_STAGES).is_file())
}

fn build_group(scratch_parent: &Path, dir: &Path, module: &GoModule, group: &[Program]) -> anyhow::Result<()> {
    let programs: Vec<_> = group.iter().map(|program| (program.name(), program.package())).collect();
    go_build(scratch_parent, dir, module, &linker_flags(), &programs, |sources| {
        let stages = group.contains(&Program::Kwok);
        let stages = stages.then(|| yaml_of(sources, ("sigs.k8s.io/kwok", "kustomize/stage"), &KWOK_STAGE_FILES));
        Ok(stages.transpose()?.map(|text| (KWOK_STAGES, text)))
    })
}

/// A file's name and text.
type Beside = (&'static str, String);

/// Builds programs, each a name and a package, and a file that is made from their sources to lie beside them.
fn go_build(
    scratch_parent: &Path,
    dir: &Path,
    module: &GoModule,
    flags: &str,
    programs: &[(&str, String)],
    beside: impl Fn(&Path) -> anyhow::Result<Option<Beside>>,
) -> anyhow::Result<()> {
    if programs.is_empty() {
        return Ok(());
    }
    let names: Vec<_> = programs.iter().map(|(name, _)| *name).collect();
    report(&format!("testbed: building {} from source, once; this takes minutes", names.join(", ")));
    let began = Instant::now();
    let scratch = tempfile::Builder::new().prefix(".build-").tempdir_in(scratch_parent)?;
    let sources = scratch.path().join("src");
    for (path, text) in module.files {
        let file = sources.join(path);
        fs::create_dir_all(file.parent().unwrap_or(&sources))?;
        fs::write(&file, text)?;
    }
    let output = scratch.path().join("bin");
    fs::create_dir_all(&output)?;
    let mut go = go_command(&sources);
    go.args(["build", "-buildvcs=false", "-trimpath", "-ldflags", flags, "-o"]).arg(&output);
    go.args(programs.iter().map(|(_, package)| package));
    run(go)?;
    if let Some((name, text)) = beside(&sources)? {
        fs::write(output.join(name), text)?;
        fs::rename(output.join(name), dir.join(name))?;
    }
    for name in names {
        fs::rename(output.join(name), dir.join(name)).with_context(|| format!("go build made no {name}"))?;
    }
    report(&format!("testbed: built in {} s", began.elapsed().as_secs()));
    Ok(())
}

fn linker_flags() -> String {
    let mut flags = "-s -w".to_owned();
    let minor = KUBERNETES_VERSION.split('.').nth(1).unwrap_or_default();
    for package in ["k8s.io/component-base/version", "k8s.io/client-go/pkg/version"] {
        for (name, value) in [
            ("gitVersion", format!("v{KUBERNETES_VERSION}")),
            ("gitMajor", "1".to_owned()),
            ("gitMinor", minor.to_owned()),
        ] {
            flags.push_str(&format!(" -X {package}.{name}={value}"));
        }
    }
    flags
}

/// Files of a directory in a Go module, as one YAML file.
fn yaml_of(sources: &Path, (module, directory): (&str, &str), files: &[&str]) -> anyhow::Result<String> {
    let mut go = go_command(sources);
    go.args(["list", "-m", "-f", "{{.Dir}}", module]).stdout(Stdio::piped());
    let listed = go.output().context("cannot run go")?;
    let place = PathBuf::from(String::from_utf8(listed.stdout)?.trim()).join(directory);
    let mut all = String::new();
    for file in files {
        let text = fs::read_to_string(place.join(file)).with_context(|| format!("{module} lacks {file}"))?;
        all.push_str("---\n");
        all.push_str(&text);
        all.push('\n');
    }
    Ok(all)
}

fn go_command(sources: &Path) -> Command {
    let mut go = Command::new("go");
    // No C: the result runs on any Linux. `go.work` files around the cache are none of our business.
    go.current_dir(sources).env("CGO_ENABLED", "0").env("GOWORK", "off").stdin(Stdio::null()).stdout(Stdio::null());
    go
}

fn run(mut go: Command) -> anyhow::Result<()> {
    let status = go.status().context("cannot run go: install Go 1.26 or newer to build the testbed's Kubernetes")?;
    anyhow::ensure!(status.success(), "{go:?} failed: {status}");
    Ok(())
}

#[expect(clippy::print_stderr, reason = "a test that waits minutes for a build has to say so")]
fn report(line: &str) {
    eprintln!("{line}");
}

#[cfg(test)]
mod tests {
    use super::{
        CERT_MANAGER, CERT_MANAGER_VERSION, HELM, HELM_VERSION, KUBERNETES, KUBERNETES_VERSION, cache_key, linker_flags,
    };

    #[test]
    fn key_names_the_version_and_is_stable() {
        assert!(cache_key().starts_with("kubernetes-1."));
        assert_eq!(cache_key(), cache_key());
    }

    #[test]
    fn modules_require_the_versions_that_programs_and_their_places_tell() {
        for (module, required, version) in [
            (&KUBERNETES, "k8s.io/kubernetes", KUBERNETES_VERSION),
            (&HELM, "helm.sh/helm/v4", HELM_VERSION),
            (&CERT_MANAGER, "github.com/cert-manager/cert-manager", CERT_MANAGER_VERSION),
        ] {
            let (_, go_mod) = module.files[0];
            assert!(go_mod.contains(&format!("{required} v{version}")), "{required}");
        }
        assert!(linker_flags().contains(&format!("gitVersion=v{KUBERNETES_VERSION}")));
    }
}
