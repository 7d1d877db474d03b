//! `testbed`: a real Kubernetes on this machine, for groundcrew's tests and for trying things by hand.
#![expect(clippy::print_stdout, reason = "the command line's own output")]

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use groundcrew_testbed::rights::ledger;
use groundcrew_testbed::supervisor::{self, Options, leash};
use groundcrew_testbed::{Assets, CertManager, ClusterInfo, Helm, Image, Layer, host, sbom, write_archive};

#[derive(Parser)]
#[command(name = "testbed", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build Kubernetes and its companions from source into the cache; quick when they are there.
    Build {
        /// Up to which layer: 2 API server and etcd, 3 adds controllers and kwok, 4 adds a real node.
        #[arg(long, default_value = "4")]
        layer: Layer,
    },
    /// Show which Debian packages layer 4 still needs on this machine.
    HostPackages {
        /// Install them by apt-get; needs root.
        #[arg(long)]
        install: bool,
    },
    /// Run a cluster until ctrl-c.
    Up {
        /// 2 API server and etcd, 3 adds controllers and kwok, 4 adds a real node.
        #[arg(long, default_value = "3")]
        layer: Layer,
        /// Keep logs and data here instead of in a temporary directory.
        #[arg(long)]
        dir: Option<PathBuf>,
    },
    /// Write groundcrew's image as an OCI archive, without a container engine.
    Image {
        #[arg(long, default_value = concat!("groundcrew:", env!("CARGO_PKG_VERSION")))]
        name: String,
        archive: PathBuf,
        /// groundcrew itself, static; one for each machine that the image is for.
        #[arg(required = true)]
        programs: Vec<PathBuf>,
    },
    /// List what groundcrew is made of, as CycloneDX.
    Sbom {
        /// For which of rustc's targets; several are merged.
        #[arg(long = "target", required = true)]
        targets: Vec<String>,
        file: PathBuf,
    },
    /// Compare the rights that groundcrew's parts used in tests with those an installation grants.
    Rights {
        /// What the tests recorded.
        recorded: PathBuf,
    },
    /// Run a cluster for a test that holds the other end of standard input.
    #[command(hide = true)]
    Supervise {
        #[arg(long)]
        layer: Layer,
        #[arg(long)]
        dir: Option<PathBuf>,
    },
    /// Become a program that is killed together with its parent.
    #[command(hide = true, name = leash::SUBCOMMAND)]
    Leashed {
        parent: i32,
        program: PathBuf,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Build { layer } => {
            let assets = Assets::ensure(layer)?;
            if layer == Layer::Nodes {
                Helm::ensure()?;
                CertManager::ensure()?;
            }
            println!("{}", assets.dir().display());
            Ok(())
        }
        Command::HostPackages { install } => host_packages(install),
        Command::Up { layer, dir } => supervise(Options { layer, dir, leashed_to_stdin: false }, show),
        Command::Image { name, archive, programs } => write_image(&name, &archive, &programs),
        Command::Sbom { targets, file } => {
            std::fs::write(&file, serde_json::to_vec_pretty(&sbom(&targets)?)?)?;
            println!("{}", file.display());
            Ok(())
        }
        Command::Rights { recorded } => {
            println!("{}", ledger::compare(&recorded)?);
            Ok(())
        }
        Command::Supervise { layer, dir } => {
            let done = supervise(Options { layer, dir, leashed_to_stdin: true }, supervisor::announce_ready);
            if let Err(error) = &done {
                supervisor::announce_failure(error)?;
            }
            done
        }
        Command::Leashed { parent, program, arguments } => {
            match leash::become_program(parent, &program, &arguments)? {}
        }
    }
}

fn write_image(name: &str, archive: &Path, programs: &[PathBuf]) -> anyhow::Result<()> {
    let mut machines = Vec::new();
    for program in programs {
        let image = Image::of_program(name, program)?;
        println!("{:>9} for {}: {}", mebibytes(program)?, image.architecture(), program.display());
        machines.push(image);
    }
    let mut file = std::io::BufWriter::new(std::fs::File::create(archive)?);
    write_archive(&machines, &mut file)?;
    file.flush()?;
    println!("{:>9} as {name}: {}", mebibytes(archive)?, archive.display());
    Ok(())
}

fn mebibytes(file: &Path) -> anyhow::Result<String> {
    Ok(format!("{:.1} MiB", file.metadata()?.len() as f64 / f64::from(1 << 20)))
}

fn supervise(options: Options, announce: impl Fn(&ClusterInfo) -> anyhow::Result<()>) -> anyhow::Result<()> {
    // One thread: a child on the leash is killed when the thread that started it ends.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let done = runtime.block_on(supervisor::run(options, announce));
    // A wait for the machine's lock or a build must not keep us from ending.
    runtime.shutdown_timeout(Duration::ZERO);
    done
}

fn show(info: &ClusterInfo) -> anyhow::Result<()> {
    println!("layer {} is up; stop it with ctrl-c", info.layer);
    println!("  export KUBECONFIG={}", info.kubeconfig.display());
    println!("  {} get pods --all-namespaces", info.kubectl.display());
    println!("  logs in {}", info.dir.join("logs").display());
    Ok(())
}

fn host_packages(install: bool) -> anyhow::Result<()> {
    if install {
        return host::install_packages();
    }
    println!("{}", host::missing_packages().join(" "));
    Ok(())
}

#[expect(clippy::print_stderr, reason = "the command line's own output")]
fn complain(error: &anyhow::Error) {
    eprintln!("testbed: {error:#}");
}
