//! Configuration and command lines of containerd, kubelet and kube-proxy.

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use anyhow::Context;
use serde_json::json;

use super::cleanup::SHIM_SOCKETS;
use super::plan::{NODE_NAME, Plan};
use super::process::Launch;
use crate::assets::Program;
use crate::host;
use crate::image::Image;

/// Holds a pod's namespaces open; busybox can sleep as well as anybody.
const PAUSE_IMAGE: &str = "groundcrew.test/pause:1";

/// Of the CNI network; its plugins name their left-overs after it.
pub(crate) const NETWORK: &str = "groundcrew-testbed";
const POD_SUBNET: &str = "10.244.0.0/24";

pub(crate) async fn load_pause_image(plan: &Plan) -> anyhow::Result<()> {
    let image = Image::busybox(PAUSE_IMAGE)?.entrypoint(["/bin/busybox", "sleep", "2147483647"]);
    image.import(plan.assets.path(Program::Ctr)?, &plan.containerd_socket()).await
}

pub(crate) fn containerd(plan: &Plan) -> anyhow::Result<Launch> {
    let dir = plan.dir.join("containerd");
    fs::create_dir_all(&dir)?;
    fs::create_dir_all(plan.etc("cni"))?;
    fs::write(plan.etc("cni/10-testbed.conflist"), serde_json::to_vec_pretty(&cni_network(plan))?)?;
    fs::write(plan.etc("containerd.toml"), containerd_config(plan)?)?;
    let launch = Launch::new(plan.assets.path(Program::Containerd)?).flag("config", plan.etc("containerd.toml"));
    // It finds its shim on PATH.
    Ok(launch.env("PATH", search_path(Some(plan.assets.dir()))?))
}

fn containerd_config(plan: &Plan) -> anyhow::Result<String> {
    let dir = plan.dir.join("containerd");
    let runc = host::find_program("runc").context("no runc here; see `testbed host-packages`")?;
    let plugins = host::cni_plugins().context("no CNI plugins here; see `testbed host-packages`")?;
    let (dir, cni, plugins) = (dir.display(), plan.etc("cni"), plugins.display());
    let (socket, cni, runc) = (plan.containerd_socket(), cni.display(), runc.display());
    let socket = socket.display();
    Ok(format!(
        r#"version = 3
root = "{dir}/root"
state = "{dir}/state"

[grpc]
address = "{socket}"

# Nobody here extends the runtime, and their default places belong to the machine's own containerd.
[plugins."io.containerd.nri.v1.nri"]
disable = true
[plugins."io.containerd.internal.v1.opt"]
path = "{dir}/opt"
[plugins."io.containerd.shim.v1.manager"]
socket_dir = "{SHIM_SOCKETS}"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE_IMAGE}"

[plugins."io.containerd.cri.v1.runtime"]
# In a container even root may not lower its score, and without this no pod sandbox starts.
restrict_oom_score_adj = true
# So that unmounting everything below one directory frees the network namespaces too.
netns_mounts_under_state_dir = true

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{plugins}"]
conf_dir = "{cni}"
# The plugin for it would leave a file outside of our directory for every pod.
use_internal_loopback = true

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
BinaryName = "{runc}"
Root = "{dir}/runc"
SystemdCgroup = false
"#
    ))
}

/// One bridge, reachable from the host; pods need no way out of the machine, so no masquerading.
fn cni_network(plan: &Plan) -> serde_json::Value {
    json!({
        "cniVersion": "1.0.0",
        "name": NETWORK,
        "plugins": [{
            "type": "bridge",
            "bridge": host::BRIDGE,
            "isDefaultGateway": true,
            "hairpinMode": true,
            "ipam": {
                "type": "host-local",
                "dataDir": plan.dir.join("addresses"),
                "ranges": [[{"subnet": POD_SUBNET, "gateway": host::BRIDGE_ADDRESS}]],
            },
        }],
    })
}

pub(crate) fn kubelet(plan: &Plan) -> anyhow::Result<Launch> {
    let root = plan.dir.join("kubelet");
    fs::write(plan.etc("kubelet.json"), serde_json::to_vec_pretty(&kubelet_config(plan))?)?;
    Ok(Launch::new(plan.assets.path(Program::Kubelet)?)
        .flag("config", plan.etc("kubelet.json"))
        .flag("kubeconfig", plan.kubeconfig("kubelet"))
        .flag("root-dir", &root)
        .flag("cert-dir", root.join("pki"))
        .flag("hostname-override", NODE_NAME)
        .flag("node-ip", plan.address.to_string())
        .env("PATH", search_path(None)?))
}

fn kubelet_config(plan: &Plan) -> serde_json::Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": format!("unix://{}", plan.containerd_socket().display()),
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": plan.authority.certificate()},
        },
        "authorization": {"mode": "Webhook"},
        "port": plan.ports.kubelet,
        "readOnlyPort": 0,
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": plan.ports.kubelet_health,
        "podLogsDir": plan.dir.join("logs").join("pods"),
        "volumePluginDir": plan.dir.join("kubelet").join("volume-plugins"),
        // The machine may have either generation of cgroups, swap, and a root file system that is no disk.
        "failCgroupV1": false,
        "cgroupDriver": "cgroupfs",
        "failSwapOn": false,
        "localStorageCapacityIsolation": false,
        // A full disk of the machine is no reason to evict a test's pods or to delete images that nobody can pull.
        "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        // kube-proxy makes the chains it needs and takes them away again; the kubelet's would stay.
        "makeIPTablesUtilChains": false,
        // Tests wait for what the node reports.
        "nodeStatusUpdateFrequency": "2s",
    })
}

pub(crate) fn kube_proxy(plan: &Plan) -> anyhow::Result<Launch> {
    Ok(kube_proxy_program(plan.assets.path(Program::KubeProxy)?)?
        .flag("kubeconfig", plan.kubeconfig("kube-proxy"))
        .flag("hostname-override", NODE_NAME)
        .flag("healthz-bind-address", format!("127.0.0.1:{}", plan.ports.proxy_health))
        .flag("metrics-bind-address", format!("127.0.0.1:{}", plan.ports.proxy_metrics))
        .flag("iptables-min-sync-period", "0s")
        // All pods share one bridge: without it the answer of a Service's pod would bypass the address translation.
        .flag("masquerade-all", "true")
        // Would change a kernel setting of the machine.
        .flag("iptables-localhost-nodeports", "false")
        // Zero leaves the machine's connection tracking limits alone.
        .flag("conntrack-max-per-core", "0")
        .flag("conntrack-tcp-timeout-established", "0")
        .flag("conntrack-tcp-timeout-close-wait", "0"))
}

/// Also run to remove its rules again.
pub(crate) fn kube_proxy_program(program: &Path) -> anyhow::Result<Launch> {
    Ok(Launch::new(program).flag("proxy-mode", "iptables").env("PATH", search_path(None)?))
}

/// Our own PATH and the places of system tools, which a user's PATH may lack.
fn search_path(first: Option<&Path>) -> anyhow::Result<OsString> {
    let own = std::env::var_os("PATH").unwrap_or_default();
    let places = first.into_iter().map(Path::to_owned).chain(std::env::split_paths(&own));
    Ok(std::env::join_paths(places.chain(host::SYSTEM_DIRS.iter().map(Into::into)))?)
}
