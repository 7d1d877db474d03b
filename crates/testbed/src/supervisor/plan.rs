//! Everything decided before the first process starts: directories, ports, certificates, kubeconfigs.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::assets::{Assets, Program};
use crate::kubeconfig::{self, Credentials};
use crate::pki::{Authority, Pair, TokenKeys};
use crate::ports::free_ports;
use crate::protocol::{ClusterInfo, NodeInfo, Part};
use crate::{Layer, host};

/// The real node's name.
pub(crate) const NODE_NAME: &str = "real-0";

/// Of Services; the API server itself is at the first address.
pub(crate) const SERVICE_RANGE: &str = "10.96.0.0/16";
const API_SERVICE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 96, 0, 1));

#[derive(Debug)]
pub(crate) struct Ports {
    pub(crate) etcd: u16,
    pub(crate) etcd_peer: u16,
    pub(crate) api: u16,
    pub(crate) controller_manager: u16,
    pub(crate) scheduler: u16,
    pub(crate) kwok: u16,
    pub(crate) kubelet: u16,
    pub(crate) kubelet_health: u16,
    pub(crate) proxy_health: u16,
    pub(crate) proxy_metrics: u16,
}

impl Ports {
    fn pick() -> anyhow::Result<Self> {
        let mut free = free_ports(10)?.into_iter();
        let mut next = || free.next().context("too few ports");
        Ok(Self {
            etcd: next()?,
            etcd_peer: next()?,
            api: next()?,
            controller_manager: next()?,
            scheduler: next()?,
            kwok: next()?,
            kubelet: next()?,
            kubelet_health: next()?,
            proxy_health: next()?,
            proxy_metrics: next()?,
        })
    }
}

#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) layer: Layer,
    pub(crate) dir: PathBuf,
    pub(crate) assets: Assets,
    pub(crate) ports: Ports,
    pub(crate) authority: Authority,
    pub(crate) api_pair: Pair,
    /// What the API server shows a kubelet.
    pub(crate) api_client_pair: Pair,
    pub(crate) token_keys: TokenKeys,
    /// Where pods and the node's Service rules find the API server; loopback below [`Layer::Nodes`].
    pub(crate) address: IpAddr,
}

impl Plan {
    pub(crate) fn create(layer: Layer, dir: &Path, assets: &Assets) -> anyhow::Result<Self> {
        for sub in ["logs", "etc", "users"] {
            fs::create_dir_all(dir.join(sub)).with_context(|| format!("cannot create {}", dir.display()))?;
        }
        let authority = Authority::create(&dir.join("pki"))?;
        let address = if layer == Layer::Nodes { host_address() } else { Ipv4Addr::LOCALHOST.into() };
        let names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"];
        let api_pair = authority.server("apiserver", &names, &[Ipv4Addr::LOCALHOST.into(), API_SERVICE, address])?;
        let plan = Self {
            layer,
            dir: dir.to_owned(),
            assets: assets.clone(),
            ports: Ports::pick()?,
            api_client_pair: authority.client("apiserver-client", "kube-apiserver", &["system:masters"])?,
            token_keys: authority.token_keys()?,
            api_pair,
            authority,
            address,
        };
        plan.write_kubeconfigs()?;
        Ok(plan)
    }

    /// Each part acts as the user that Kubernetes' own roles are made for, so that RBAC is exercised as in production.
    fn write_kubeconfigs(&self) -> anyhow::Result<()> {
        let node_user = format!("system:node:{NODE_NAME}");
        let users = [
            ("admin", "testbed-admin", Some("system:masters"), Layer::Api),
            ("controller-manager", "system:kube-controller-manager", None, Layer::Controllers),
            ("scheduler", "system:kube-scheduler", None, Layer::Controllers),
            // kwok patches statuses of nodes and pods, for which Kubernetes has no ready-made role.
            ("kwok", "kwok", Some("system:masters"), Layer::Controllers),
            ("kubelet", node_user.as_str(), Some("system:nodes"), Layer::Nodes),
            ("kube-proxy", "system:kube-proxy", None, Layer::Nodes),
        ];
        for (file, user, group, layer) in users {
            if layer <= self.layer {
                let groups: Vec<_> = group.into_iter().collect();
                let pair = self.authority.client(file, user, &groups)?;
                let ca = self.authority.certificate();
                kubeconfig::write(&self.kubeconfig(file), &self.server(), &ca, &Credentials::Certificate(&pair))?;
            }
        }
        Ok(())
    }

    pub(crate) fn server(&self) -> String {
        format!("https://{}", self.api())
    }

    pub(crate) fn api(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.ports.api).into()
    }

    pub(crate) fn kubeconfig(&self, user: &str) -> PathBuf {
        self.dir.join("users").join(format!("{user}.kubeconfig"))
    }

    /// A configuration file of some part.
    pub(crate) fn etc(&self, file: &str) -> PathBuf {
        self.dir.join("etc").join(file)
    }

    /// What a test has asked for, see [`Cluster::restart_apiserver_with`](crate::Cluster::restart_apiserver_with).
    pub(crate) fn apiserver_flags(&self) -> anyhow::Result<Vec<(String, String)>> {
        match fs::read(apiserver_flags(&self.dir)) {
            Ok(text) => Ok(serde_json::from_slice(&text)?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) fn log(&self, part: Part) -> PathBuf {
        self.dir.join("logs").join(format!("{part}.log"))
    }

    pub(crate) fn audit_log(&self) -> PathBuf {
        self.dir.join("logs").join("audit.jsonl")
    }

    pub(crate) fn containerd_socket(&self) -> PathBuf {
        containerd_socket(&self.dir)
    }

    pub(crate) fn parts(&self) -> impl Iterator<Item = Part> + use<> {
        let layer = self.layer;
        Part::ALL.into_iter().filter(move |part| part.layer() <= layer)
    }

    /// What tests are told; process ids are filled in by the supervisor.
    pub(crate) fn info(&self) -> anyhow::Result<ClusterInfo> {
        let node = match self.layer {
            Layer::Nodes => Some(NodeInfo {
                name: NODE_NAME.to_owned(),
                address: self.address,
                containerd: self.containerd_socket(),
                ctr: self.assets.path(Program::Ctr)?.to_owned(),
            }),
            Layer::Api | Layer::Controllers => None,
        };
        Ok(ClusterInfo {
            layer: self.layer,
            dir: self.dir.clone(),
            kubeconfig: self.kubeconfig("admin"),
            api: self.api(),
            audit_log: self.audit_log(),
            logs: self.parts().map(|part| (part, self.log(part))).collect(),
            pids: Default::default(),
            kubectl: self.assets.path(Program::Kubectl)?.to_owned(),
            node,
        })
    }
}

/// Written by a test, read by its supervisor.
pub(crate) fn apiserver_flags(dir: &Path) -> PathBuf {
    dir.join("etc").join("apiserver-flags.json")
}

/// Also known to whoever cleans up after a run that was killed.
pub(crate) fn containerd_socket(dir: &Path) -> PathBuf {
    dir.join("containerd").join("containerd.sock")
}

/// The address other machines would see. No packet is sent: connecting a UDP socket only asks the routing table.
fn host_address() -> IpAddr {
    let routed = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))
        .and_then(|socket| socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).and_then(|()| socket.local_addr()));
    // Without any route there is still the bridge's own address.
    routed.map_or(host::BRIDGE_ADDRESS.into(), |address| address.ip())
}
