//! Loopback servers as pods: the test plays scheduler and kubelet, the server counts what the agent sends.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context;
use groundcrew_testbed::objects::{PodExt, pod};
use groundcrew_testbed::{Cluster, Groundcrew};
use k8s_openapi::api::core::v1::{ContainerPort, Node, Pod, PodCondition};
use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

pub const SOON: Duration = Duration::from_secs(60);
pub const NODE: &str = "node-a";
pub const GATE: &str = "kube-booster.io/warmup-ready";

/// Times that make a lost agent quick to see.
pub const QUICK: &str = "warmup: {agentTimeout: 15s}\n";

#[derive(Clone, Debug)]
pub struct Hit {
    pub at: Instant,
    pub head: String,
}

/// What a server says; header lines end with CR LF.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: String,
    pub text: String,
}

impl From<(u16, String)> for Reply {
    fn from((status, text): (u16, String)) -> Self {
        Self { status, text, ..Self::default() }
    }
}

/// A server that answers what it is told to and remembers who asked.
#[derive(Clone, Debug)]
pub struct Server {
    pub address: SocketAddr,
    pub hits: Arc<Mutex<Vec<Hit>>>,
}

impl Server {
    pub async fn start() -> anyhow::Result<Self> {
        Self::answering(|_, _| (200, "ok".to_owned())).await
    }

    /// Answers each request from its head and body.
    pub async fn answering(
        answer: impl Fn(&str, &str) -> (u16, String) + Send + Sync + 'static,
    ) -> anyhow::Result<Self> {
        Self::telling(move |head, body| Some(answer(head, body).into())).await
    }

    /// The same with headers; nothing means that the request is never answered.
    pub async fn telling(answer: impl Fn(&str, &str) -> Option<Reply> + Send + Sync + 'static) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let server = Self { address: listener.local_addr()?, hits: Arc::default() };
        let (hits, answer) = (server.hits.clone(), Arc::new(answer));
        tokio::spawn(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let (hits, answer) = (hits.clone(), answer.clone());
                tokio::spawn(async move { speak(tcp, &hits, &*answer).await });
            }
        });
        Ok(server)
    }

    pub fn hits(&self) -> Vec<Hit> {
        self.hits.lock().unwrap().clone()
    }

    pub async fn wait_hits(&self, count: usize) -> anyhow::Result<()> {
        let waiting = async {
            while self.hits().len() < count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(SOON, waiting).await.with_context(|| format!("only {} requests came", self.hits().len()))
    }
}

async fn speak(mut tcp: TcpStream, hits: &Mutex<Vec<Hit>>, answer: &(dyn Fn(&str, &str) -> Option<Reply> + Sync)) {
    loop {
        let (mut seen, mut byte) = (Vec::new(), [0_u8; 1]);
        while !seen.ends_with(b"\r\n\r\n") {
            match tcp.read(&mut byte).await {
                Ok(1) => seen.push(byte[0]),
                _ => return,
            }
        }
        let head = String::from_utf8_lossy(&seen).to_lowercase();
        let length = head.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next()?.parse().ok());
        let mut body = vec![0; length.unwrap_or(0)];
        if tcp.read_exact(&mut body).await.is_err() {
            return;
        }
        hits.lock().unwrap().push(Hit { at: Instant::now(), head: head.clone() });
        let Some(Reply { status, headers, text }) = answer(&head, &String::from_utf8_lossy(&body)) else {
            return std::future::pending().await;
        };
        let reply = format!("HTTP/1.1 {status} X\r\n{headers}content-length: {}\r\n\r\n{text}", text.len());
        if tcp.write_all(reply.as_bytes()).await.is_err() {
            return;
        }
    }
}

pub async fn add_node(cluster: &Cluster, name: &str) -> anyhow::Result<()> {
    let nodes: Api<Node> = Api::all(cluster.client());
    let node = Node {
        metadata: kube::api::ObjectMeta { name: Some(name.to_owned()), ..Default::default() },
        ..Default::default()
    };
    nodes.create(&PostParams::default(), &node).await?;
    Ok(())
}

/// A pod that asks for a warm-up, bound to the node; annotations without their prefix.
pub fn asking(name: &str, server: &Server, settings: &[(&str, &str)]) -> Pod {
    let mut pod = pod(name).annotated("kube-booster.io/warmup", "enabled");
    for (key, value) in settings {
        pod = pod.annotated(&format!("kube-booster.io/warmup-{key}"), value);
    }
    let spec = pod.spec.as_mut().unwrap();
    spec.node_name = Some(NODE.to_owned());
    let port = ContainerPort { container_port: server.address.port().into(), ..ContainerPort::default() };
    spec.containers[0].ports = Some(vec![port]);
    pod
}

/// Does what a kubelet does once the containers are up.
pub async fn make_ready(pods: &Api<Pod>, name: &str, container: &str) -> anyhow::Result<()> {
    let status = json!({"status": {
        "phase": "Running",
        "podIP": "127.0.0.1",
        "podIPs": [{"ip": "127.0.0.1"}],
        "conditions": [{"type": "ContainersReady", "status": "True"}, {"type": "Initialized", "status": "True"}],
        "containerStatuses": [{
            "name": "main", "ready": true, "started": true, "restartCount": 0, "image": "none", "imageID": "none",
            "containerID": format!("containerd://{container}"),
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
        }],
    }});
    pods.patch_status(name, &PatchParams::default(), &Patch::Strategic(status)).await?;
    Ok(())
}

pub fn condition(pod: &Pod) -> Option<&PodCondition> {
    pod.status.as_ref()?.conditions.as_ref()?.iter().find(|condition| condition.type_ == GATE)
}

pub fn reason(pod: &Pod) -> &str {
    condition(pod).and_then(|condition| condition.reason.as_deref()).unwrap_or_default()
}

pub fn message(pod: &Pod) -> &str {
    condition(pod).and_then(|condition| condition.message.as_deref()).unwrap_or_default()
}

pub fn is_open(pod: &Pod) -> bool {
    condition(pod).is_some_and(|condition| condition.status == "True")
}

pub fn is_gated(pod: &Pod) -> bool {
    let gates = pod.spec.iter().flat_map(|spec| spec.readiness_gates.iter().flatten());
    gates.into_iter().any(|gate| gate.condition_type == GATE)
}

/// A pod with the gate in place, without going through admission.
pub fn gated(pod: Pod) -> Pod {
    let mut pod = pod;
    let gate = k8s_openapi::api::core::v1::PodReadinessGate { condition_type: GATE.to_owned() };
    pod.spec.as_mut().unwrap().readiness_gates = Some(vec![gate]);
    pod
}

/// Creates the pod with its gate and makes it ready to be warmed.
pub async fn up(pods: &Api<Pod>, pod: Pod) -> anyhow::Result<()> {
    let name = pod.name_any();
    pods.create(&PostParams::default(), &gated(pod)).await?;
    make_ready(pods, &name, &format!("{name}-1")).await
}

pub async fn agent(cluster: &Cluster, name: &str) -> anyhow::Result<Groundcrew> {
    Groundcrew::builder(cluster).name(name).agent(NODE).config_yaml(QUICK).start().await
}

/// What admission says to whoever creates the object; nothing is stored.
pub async fn warnings(cluster: &Cluster, collection: &str, object: &Value) -> anyhow::Result<Vec<String>> {
    let request = http::Request::post(format!("{collection}?dryRun=All")).header("content-type", "application/json");
    let answer = cluster.client().send(request.body(serde_json::to_vec(object)?.into())?).await?;
    anyhow::ensure!(answer.status() == 201, "{} {:?}", answer.status(), answer.headers());
    let said = answer.headers().get_all("warning").iter();
    Ok(said.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned()).collect())
}

/// Applies objects as kubectl would.
pub async fn apply(cluster: &Cluster, namespace: &str, objects: Vec<Value>) -> anyhow::Result<()> {
    groundcrew_testbed::objects::apply(&cluster.client(), namespace, objects).await
}
