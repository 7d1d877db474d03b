//! A cluster as a test holds it.

use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};

use crate::kubeconfig::{self, Credentials};
use crate::pki::Authority;
use crate::protocol::{ClusterInfo, Order, Part, Report};
use crate::rights::ledger;
use crate::{Layer, dump, locate, ports, supervisor};

/// How long a supervisor may take to stop everything; a real node with pods needs the most.
const STOP_DEADLINE: Duration = Duration::from_secs(60);

/// A running Kubernetes, thrown away when dropped. On a panicking thread it first prints pods, events and logs.
pub struct Cluster {
    info: ClusterInfo,
    client: Client,
    supervisor: Arc<Mutex<Supervisor>>,
    /// Logs of processes that tests started, for the dump.
    logs: Mutex<Vec<PathBuf>>,
}

impl Cluster {
    /// Starts a cluster of its own for one test: about three seconds for [`Layer::Api`].
    ///
    /// # Errors
    /// The `testbed` program is not built, or a part of the cluster did not start.
    pub async fn start(layer: Layer) -> anyhow::Result<Self> {
        let (supervisor, info) = tokio::task::spawn_blocking(move || Supervisor::start(layer)).await??;
        let client = kubeconfig::client(&info.kubeconfig).await?;
        Ok(Self { info, client, supervisor: Arc::new(Mutex::new(supervisor)), logs: Mutex::default() })
    }

    /// A client with all rights. Clones share the connections of the runtime that started the cluster.
    #[must_use]
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// A client with all rights and connections of its own, for a test that shares a cluster with others.
    ///
    /// # Errors
    /// The credentials cannot be read.
    pub async fn connect(&self) -> anyhow::Result<Client> {
        kubeconfig::client(&self.info.kubeconfig).await
    }

    /// Credentials with all rights.
    #[must_use]
    pub fn kubeconfig(&self) -> &Path {
        &self.info.kubeconfig
    }

    /// Where the API server listens.
    #[must_use]
    pub fn api_addr(&self) -> SocketAddr {
        self.info.api
    }

    /// Paths, ports and process ids.
    #[must_use]
    pub fn info(&self) -> &ClusterInfo {
        &self.info
    }

    /// Writes credentials for a user with at most one group; grant it rights by RBAC.
    ///
    /// # Errors
    /// More than one group, or the files cannot be written.
    pub fn kubeconfig_for(&self, user: &str, groups: &[&str]) -> anyhow::Result<PathBuf> {
        let file = unique(&user.replace(|c: char| !c.is_ascii_alphanumeric(), "-"));
        let pair = self.authority().client(&file, user, groups)?;
        self.write_kubeconfig(&file, &Credentials::Certificate(&pair))
    }

    /// Writes credentials with a token of an existing service account, valid for an hour.
    ///
    /// # Errors
    /// The account does not exist.
    pub async fn kubeconfig_for_service_account(&self, namespace: &str, name: &str) -> anyhow::Result<PathBuf> {
        let accounts = Api::<ServiceAccount>::namespaced(self.client(), namespace);
        let spec = TokenRequestSpec { expiration_seconds: Some(3600), ..Default::default() };
        let request = TokenRequest { spec: Some(spec), ..Default::default() };
        let issued = accounts.create_token_request(name, &PostParams::default(), &request).await?;
        let token = issued.status.and_then(|status| status.token).context("the API server issued no token")?;
        self.write_kubeconfig(&unique(name), &Credentials::Token(&token))
    }

    /// Writes credentials with a token that is at hand, such as one bound to a pod.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn kubeconfig_for_token(&self, name: &str, token: &str) -> anyhow::Result<PathBuf> {
        self.write_kubeconfig(&unique(name), &Credentials::Token(token))
    }

    fn write_kubeconfig(&self, file: &str, credentials: &Credentials<'_>) -> anyhow::Result<PathBuf> {
        let path = self.info.dir.join("users").join(format!("{file}.kubeconfig"));
        let server = format!("https://{}", self.info.api);
        kubeconfig::write(&path, &server, &self.authority().certificate(), credentials)?;
        Ok(path)
    }

    fn authority(&self) -> Authority {
        Authority::open(&self.info.dir.join("pki"))
    }

    /// Makes a namespace nobody else uses. With controllers running, pods are admitted in it when this returns.
    ///
    /// # Errors
    /// The API server refused.
    pub async fn namespace(&self, prefix: &str) -> anyhow::Result<TestNamespace> {
        let name = unique(prefix);
        let metadata = ObjectMeta { name: Some(name.clone()), ..Default::default() };
        let namespace = Namespace { metadata, ..Default::default() };
        Api::<Namespace>::all(self.client()).create(&PostParams::default(), &namespace).await?;
        if self.info.layer >= Layer::Controllers {
            let accounts = Api::<ServiceAccount>::namespaced(self.client(), &name);
            let patience = Duration::from_secs(30);
            self.wait_for(&accounts, "default", "the service account exists", patience, |_: &ServiceAccount| true)
                .await?;
        }
        Ok(TestNamespace { name, client: self.client() })
    }

    /// Ends the API server gracefully; connections are closed, data stays.
    ///
    /// # Errors
    /// It does not run.
    pub async fn stop_apiserver(&self) -> anyhow::Result<()> {
        self.order(Order::Stop(Part::Apiserver)).await.map(drop)
    }

    /// Starts the API server again at its old address and waits until it is ready.
    ///
    /// # Errors
    /// It runs already, or does not become ready.
    pub async fn start_apiserver(&self) -> anyhow::Result<()> {
        self.order(Order::Start(Part::Apiserver)).await.map(drop)
    }

    /// Starts the API server anew with these flags beside its own, for example to be an older version that lacks an API.
    ///
    /// # Errors
    /// It does not become ready.
    pub async fn restart_apiserver_with(&self, flags: &[(&str, &str)]) -> anyhow::Result<()> {
        std::fs::write(supervisor::apiserver_flags(&self.info.dir), serde_json::to_vec(flags)?)?;
        self.stop_apiserver().await?;
        self.start_apiserver().await
    }

    /// Ends a part gracefully.
    ///
    /// # Errors
    /// It does not run.
    pub async fn stop(&self, part: Part) -> anyhow::Result<()> {
        self.order(Order::Stop(part)).await.map(drop)
    }

    /// Ends a part like a crash.
    ///
    /// # Errors
    /// It does not run.
    pub async fn kill(&self, part: Part) -> anyhow::Result<()> {
        self.order(Order::Kill(part)).await.map(drop)
    }

    /// Starts a part that was stopped or killed; the answer is its process id.
    ///
    /// # Errors
    /// It runs already, or does not become ready.
    pub async fn restart(&self, part: Part) -> anyhow::Result<u32> {
        self.order(Order::Start(part)).await?.context("the part ended at once")
    }

    /// Freezes a part: alive, connected and silent.
    ///
    /// # Errors
    /// It does not run.
    pub async fn pause(&self, part: Part) -> anyhow::Result<()> {
        self.order(Order::Pause(part)).await.map(drop)
    }

    /// Ends a [`Cluster::pause`].
    ///
    /// # Errors
    /// It does not run.
    pub async fn resume(&self, part: Part) -> anyhow::Result<()> {
        self.order(Order::Resume(part)).await.map(drop)
    }

    async fn order(&self, order: Order) -> anyhow::Result<Option<u32>> {
        let supervisor = Arc::clone(&self.supervisor);
        tokio::task::spawn_blocking(move || supervisor.lock().unwrap_or_else(PoisonError::into_inner).order(order))
            .await?
            .with_context(|| format!("{order:?}"))
    }

    /// Shows this log's end when the test fails.
    pub fn show_on_failure(&self, log: &Path) {
        self.logs.lock().unwrap_or_else(PoisonError::into_inner).push(log.to_owned());
    }

    /// Prints pods, events and the ends of all logs; happens by itself when a test panics.
    pub fn dump(&self) {
        let logs = self.logs.lock().unwrap_or_else(PoisonError::into_inner);
        dump::print(&self.info, &logs);
    }

    /// Returned by a test instead of panicking, an error does not show the cluster's state; wrapped by this it does.
    ///
    /// # Errors
    /// Hands on `result`.
    pub fn explain<T>(&self, result: anyhow::Result<T>) -> anyhow::Result<T> {
        if result.is_err() {
            self.dump();
        }
        result
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").field("info", &self.info).finish_non_exhaustive()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.dump();
        }
        if let Err(error) = ledger::keep(&self.info.dir, &self.info.audit_log) {
            dump::say(&format!("what groundcrew did could not be recorded: {error:#}"));
        }
        self.supervisor.lock().unwrap_or_else(PoisonError::into_inner).stop();
    }
}

/// A namespace of one test. It is deleted in the background when dropped; without controllers it stays, terminating,
/// until the cluster is thrown away.
pub struct TestNamespace {
    name: String,
    client: Client,
}

impl TestNamespace {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The API of one kind in this namespace.
    #[must_use]
    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &self.name)
    }
}

impl fmt::Debug for TestNamespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestNamespace").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Drop for TestNamespace {
    fn drop(&mut self) {
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let namespaces = Api::<Namespace>::all(self.client.clone());
            let name = self.name.clone();
            // Best effort: the whole cluster is about to go, or the next test has a namespace of its own.
            runtime.spawn(async move { namespaces.delete(&name, &Default::default()).await.map(drop) });
        }
    }
}

/// A name that no other test uses.
pub(crate) fn unique(prefix: &str) -> String {
    format!("{prefix}-{:06x}", ports::random() & 0x00ff_ffff)
}

/// The other process, spoken to by blocking calls: they work from any runtime and in `drop`.
#[derive(Debug)]
struct Supervisor {
    child: Child,
    reports: BufReader<ChildStdout>,
}

impl Supervisor {
    fn start(layer: Layer) -> anyhow::Result<(Self, ClusterInfo)> {
        let program = locate::testbed()?;
        let mut child = Command::new(&program)
            .args(["supervise", "--layer", &layer.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-c ends the test; the supervisor notices by its input and stops in order.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot run {}", program.display()))?;
        let reports = BufReader::new(child.stdout.take().context("no pipe from the supervisor")?);
        let mut supervisor = Self { child, reports };
        match supervisor.report()? {
            Report::Ready(info) => Ok((supervisor, *info)),
            Report::Failed(reason) => anyhow::bail!("no cluster of layer {layer}: {reason}"),
            Report::Done { .. } => anyhow::bail!("the supervisor answered before it was asked"),
        }
    }

    fn report(&mut self) -> anyhow::Result<Report> {
        let mut line = String::new();
        self.reports.read_line(&mut line)?;
        anyhow::ensure!(!line.is_empty(), "the supervisor ended without a word");
        serde_json::from_str(&line).with_context(|| format!("not a report: {line}"))
    }

    fn order(&mut self, order: Order) -> anyhow::Result<Option<u32>> {
        let pipe = self.child.stdin.as_mut().context("the supervisor is stopping")?;
        pipe.write_all(format!("{}\n", serde_json::to_string(&order)?).as_bytes())?;
        match self.report()? {
            Report::Done { pid } => Ok(pid),
            Report::Failed(reason) => Err(anyhow::Error::msg(reason)),
            Report::Ready(_) => anyhow::bail!("the supervisor started twice"),
        }
    }

    /// Lets go of the leash and waits until everything is gone.
    fn stop(&mut self) {
        drop(self.child.stdin.take());
        let began = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if began.elapsed() > STOP_DEADLINE {
                // Its children are on its leash and go with it.
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
