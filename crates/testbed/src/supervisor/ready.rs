//! When a started part counts as serving.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::core::v1::{Node, ServiceAccount};
use kube::Api;
use kube::runtime::wait::await_condition;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

use super::plan::{NODE_NAME, Plan};
use super::process::Process;
use crate::protocol::Part;
use crate::{fetch, kubeconfig, node};

/// Two busy cores need seconds for an API server; a minute means that it will not come.
const DEADLINE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(20);

/// Asks `part` until it serves; gives up when its process ends or the deadline passes.
pub(crate) async fn wait(plan: &Plan, part: Part, process: &mut Process) -> anyhow::Result<()> {
    let began = Instant::now();
    loop {
        let reason = match probe(plan, part).await {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        if let Some(end) = process.ended()? {
            anyhow::bail!("{part} {end}");
        }
        if began.elapsed() > DEADLINE {
            return Err(reason.context(format!("{part} does not serve after {} s", DEADLINE.as_secs())));
        }
        sleep(PAUSE).await;
    }
}

async fn probe(plan: &Plan, part: Part) -> anyhow::Result<()> {
    let ports = &plan.ports;
    match part {
        Part::Etcd => healthy(ports.etcd, "/readyz").await,
        Part::Apiserver => apiserver(plan).await,
        // They serve their health by TLS only; without leader election they work as soon as they listen.
        Part::ControllerManager => listens(ports.controller_manager).await,
        Part::Scheduler => listens(ports.scheduler).await,
        Part::Kwok => healthy(ports.kwok, "/healthz").await,
        Part::Containerd => {
            tokio::net::UnixStream::connect(plan.containerd_socket()).await.map(drop).map_err(Into::into)
        }
        Part::Kubelet => healthy(ports.kubelet_health, "/healthz").await,
        Part::KubeProxy => healthy(ports.proxy_health, "/healthz").await,
    }
}

async fn listens(port: u16) -> anyhow::Result<()> {
    TcpStream::connect(loopback(port)).await?;
    Ok(())
}

async fn healthy(port: u16, path: &str) -> anyhow::Result<()> {
    let (status, body) = fetch::get(loopback(port), path).await?;
    anyhow::ensure!(status == 200, "{path} answers {status}: {body}");
    Ok(())
}

async fn apiserver(plan: &Plan) -> anyhow::Result<()> {
    // Spares a TLS client per attempt while nobody listens.
    listens(plan.ports.api).await?;
    let client = kubeconfig::client(&plan.kubeconfig("admin")).await?;
    client.request_text(http_get("/readyz")?).await?;
    Ok(())
}

fn http_get(path: &str) -> anyhow::Result<http::Request<Vec<u8>>> {
    Ok(http::Request::get(path).body(Vec::new())?)
}

/// What tests rely on beyond serving processes: pods are admitted, and the real node takes them.
pub(crate) async fn cluster(plan: &Plan) -> anyhow::Result<()> {
    let client = kubeconfig::client(&plan.kubeconfig("admin")).await?;
    if plan.parts().any(|part| part == Part::ControllerManager) {
        let accounts = Api::<ServiceAccount>::namespaced(client.clone(), "default");
        let exists = await_condition(accounts, "default", |account: Option<&ServiceAccount>| account.is_some());
        tokio::time::timeout(DEADLINE, exists).await.context("no service account `default` appeared")??;
    }
    if plan.parts().any(|part| part == Part::Kubelet) {
        let ready = await_condition(Api::<Node>::all(client), NODE_NAME, node::is_ready_and_free);
        tokio::time::timeout(DEADLINE, ready).await.context("the real node does not become ready")??;
    }
    Ok(())
}

fn loopback(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}
