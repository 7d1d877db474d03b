//! A real Kubernetes on this machine for groundcrew's tests and demo.
//!
//! ```text
//!  test ──stdin/stdout──► testbed supervise ──► etcd, kube-apiserver                          Layer::Api
//!    │                          │          ──► kube-controller-manager, kube-scheduler, kwok  Layer::Controllers
//!    │                          │          ──► containerd, kubelet, kube-proxy                Layer::Nodes
//!    └── groundcrew run         └── stops all of it when the test ends, in whatever way
//! ```
//!
//! A test starts a [`Cluster`] of the weakest [`Layer`] that can fail it, takes a [`TestNamespace`], perhaps starts
//! [`Groundcrew`], waits with [`Cluster::wait_for`] and judges by [`Cluster::audit_events`]. When it fails, the cluster
//! prints pods, events and logs on its way out.

mod assets;
mod audit;
mod cert_manager;
mod cluster;
mod dump;
mod everything;
mod faulty;
pub mod fetch;
mod gobuild;
mod groundcrew;
mod handshake;
mod helm;
pub mod host;
mod image;
mod kubeconfig;
mod kwok;
mod layer;
mod locate;
mod node;
pub mod objects;
mod pki;
mod ports;
mod protocol;
mod proxy;
mod ready;
pub mod rights;
mod sbom;
pub mod supervisor;
mod tail;
mod wait;

pub use assets::{Assets, Program, cache_dir};
pub use audit::{AuditEvent, AuditObject, AuditUser, our_writes};
pub use cert_manager::CertManager;
pub use cluster::{Cluster, TestNamespace};
pub use faulty::FaultyApi;
pub use gobuild::KUBERNETES_VERSION;
pub use groundcrew::{Groundcrew, GroundcrewBuilder};
pub use handshake::handshake;
pub use helm::{Helm, Said};
pub use image::{Image, write_archive};
pub use kubeconfig::client as client_for;
pub use kwok::KwokNode;
pub use layer::Layer;
pub use locate::{groundcrew as groundcrew_program, repository};
pub use node::is_ready_and_free;
pub use ports::{free_port, free_ports};
pub use protocol::{ClusterInfo, NodeInfo, Part};
pub use proxy::Proxy;
pub use sbom::sbom;
