//! What a test and its supervisor say to each other, one JSON object per line.
//!
//! ```text
//! test ──stdin──►  {"stop":"apiserver"}          (end of input: stop everything)
//!      ◄─stdout──  {"ready":{…}} once, then {"done":{"pid":42}} or {"failed":"why"} per command
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::Layer;

/// A process of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// The key-value store.
    Etcd,
    /// kube-apiserver.
    Apiserver,
    /// kube-controller-manager.
    ControllerManager,
    /// kube-scheduler.
    Scheduler,
    /// The kubelet of fake nodes.
    Kwok,
    /// The container runtime.
    Containerd,
    /// The real node's agent.
    Kubelet,
    /// kube-proxy.
    KubeProxy,
}

impl Part {
    /// Every part, in the order in which they start.
    pub const ALL: [Self; 8] = [
        Self::Etcd,
        Self::Apiserver,
        Self::ControllerManager,
        Self::Scheduler,
        Self::Kwok,
        Self::Containerd,
        Self::Kubelet,
        Self::KubeProxy,
    ];

    /// The first layer that has this part.
    #[must_use]
    pub fn layer(self) -> Layer {
        match self {
            Self::Etcd | Self::Apiserver => Layer::Api,
            Self::ControllerManager | Self::Scheduler | Self::Kwok => Layer::Controllers,
            Self::Containerd | Self::Kubelet | Self::KubeProxy => Layer::Nodes,
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Etcd => "etcd",
            Self::Apiserver => "apiserver",
            Self::ControllerManager => "controller-manager",
            Self::Scheduler => "scheduler",
            Self::Kwok => "kwok",
            Self::Containerd => "containerd",
            Self::Kubelet => "kubelet",
            Self::KubeProxy => "kube-proxy",
        })
    }
}

/// What a test may ask its supervisor to do with one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Order {
    /// Asks it to end and waits until it did.
    Stop(Part),
    /// SIGKILL, like a crash.
    Kill(Part),
    /// Starts it again at the same address and waits until it serves.
    Start(Part),
    /// SIGSTOP: alive, connected and silent.
    Pause(Part),
    /// SIGCONT.
    Resume(Part),
}

/// A line from the supervisor.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Report {
    Ready(Box<ClusterInfo>),
    Done { pid: Option<u32> },
    Failed(String),
}

/// Where everything of a running cluster is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClusterInfo {
    /// The layer that runs.
    pub layer: Layer,
    /// Everything of this cluster lies below it.
    pub dir: PathBuf,
    /// Credentials of a member of `system:masters`.
    pub kubeconfig: PathBuf,
    /// The API server on the loopback address.
    pub api: SocketAddr,
    /// One JSON event per line.
    pub audit_log: PathBuf,
    /// A log file per part.
    pub logs: BTreeMap<Part, PathBuf>,
    /// Process ids at the time the cluster became ready.
    pub pids: BTreeMap<Part, u32>,
    /// The kubectl that fits.
    pub kubectl: PathBuf,
    /// Only at [`Layer::Nodes`].
    pub node: Option<NodeInfo>,
}

/// The real node of [`Layer::Nodes`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeInfo {
    /// Its name in the API.
    pub name: String,
    /// Its address, which pods reach as well.
    pub address: std::net::IpAddr,
    /// containerd's socket.
    pub containerd: PathBuf,
    /// containerd's command line client.
    pub ctr: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::{Order, Part};

    #[test]
    fn orders_survive_the_pipe() {
        for part in Part::ALL {
            for order in
                [Order::Stop(part), Order::Kill(part), Order::Start(part), Order::Pause(part), Order::Resume(part)]
            {
                let line = serde_json::to_string(&order).unwrap();
                assert_eq!(serde_json::from_str::<Order>(&line).unwrap(), order);
                assert!(line.contains(&part.to_string()), "the name in logs is the name on the wire: {line}");
            }
        }
    }
}
