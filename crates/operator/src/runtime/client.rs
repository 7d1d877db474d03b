//! The four ways this process talks to the API server, each with the timeouts its use needs.
//!
//! | client | retries | why |
//! |---|---|---|
//! | `read` | 429, 503, 504 | a read may be repeated; callers still bound it with a timeout |
//! | `watch` | none | the caches back off themselves; silence ends in an error, see [`watchful`] |
//! | `write` | none | a retried eviction lands long after the decision behind it |
//! | `lease` | none | connections of its own, so that a renewal never queues behind other calls |

mod watchful;

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    time::Duration,
};

use http::{HeaderValue, header::USER_AGENT};
use kube::{
    Client, Config,
    config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use watchful::watchful;

/// Named in the API server's audit log.
pub const AGENT: &str = concat!("groundcrew/", env!("CARGO_PKG_VERSION"));

/// Longer than any server-side watch we ask for, so that only a dead connection reaches it.
const WATCH_READ_SLACK: Duration = Duration::from_secs(5);
/// A connect that takes longer eats the whole deadline of a write.
const CONNECT: Duration = Duration::from_secs(4);
/// Also bounds how long an idle connection of unknown health stays in the pool.
const IDLE: Duration = Duration::from_secs(30);

/// Clients with connection pools of their own.
#[derive(Clone)]
pub struct Clients {
    pub read: Client,
    pub watch: Client,
    pub write: Client,
    pub lease: Client,
}

impl std::fmt::Debug for Clients {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Clients").field("namespace", &self.read.default_namespace()).finish_non_exhaustive()
    }
}

impl Clients {
    /// `watch_timeout` is the longest server-side watch that will be asked for.
    pub fn new(config: &Config, watch_timeout: Duration) -> Result<Self, ConfigError> {
        Ok(Self {
            read: build(config, IDLE, true)?,
            watch: watchful(build(config, watch_timeout + WATCH_READ_SLACK, false)?, watch_timeout + WATCH_READ_SLACK),
            write: build(config, IDLE, false)?,
            lease: build(config, IDLE, false)?,
        })
    }

    /// One client for all uses: in-memory clusters of tests and simulations.
    #[must_use]
    pub fn same(client: Client, watch_timeout: Duration) -> Self {
        let watch = watchful(client.clone(), watch_timeout + WATCH_READ_SLACK);
        Self { read: client.clone(), watch, write: client.clone(), lease: client }
    }
}

fn build(config: &Config, read_timeout: Duration, retries: bool) -> Result<Client, ConfigError> {
    let mut config = config.clone();
    config.default_retry = retries;
    config.connect_timeout = Some(CONNECT);
    config.read_timeout = Some(read_timeout);
    // Else the time a pooled connection sat idle counts against the next answer.
    config.reset_reader_on_write = true;
    config.headers.push((USER_AGENT, HeaderValue::from_static(AGENT)));
    Client::try_from(config).map_err(ConfigError::Client)
}

/// Why there is no cluster to talk to.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("no cluster: not running in a pod and no kubeconfig found (use --kubeconfig or KUBECONFIG)")]
    NoCluster,
    #[error("cannot use kubeconfig {path}: {source}")]
    Kubeconfig { path: PathBuf, source: KubeconfigError },
    #[error("cannot use the pod's service account: {0}")]
    InCluster(#[source] InClusterError),
    #[error("cannot build a client from the configuration: {0}")]
    Client(#[source] kube::Error),
}

/// Where the configuration comes from.
#[derive(Debug, PartialEq, Eq)]
enum Source {
    File(PathBuf),
    /// `KUBECONFIG` may name several files that are merged.
    Environment(PathBuf),
    Pod,
    Home(PathBuf),
    Nowhere,
}

/// Flag, then environment, then pod, then home: a pod that happens to have a home must still use its own account.
fn source(flag: Option<&Path>, env: impl Fn(&str) -> Option<OsString>, exists: impl Fn(&Path) -> bool) -> Source {
    let set = |name| env(name).filter(|value| !value.is_empty());
    if let Some(path) = flag {
        return Source::File(path.to_owned());
    }
    if let Some(paths) = set("KUBECONFIG") {
        return Source::Environment(paths.into());
    }
    if set("KUBERNETES_SERVICE_HOST").is_some() {
        return Source::Pod;
    }
    match set("HOME").map(|home| Path::new(&home).join(".kube/config")) {
        Some(path) if exists(&path) => Source::Home(path),
        _ => Source::Nowhere,
    }
}

/// Finds the cluster: `--kubeconfig`, else `KUBECONFIG`, else the pod we run in, else `~/.kube/config`.
pub async fn load(kubeconfig: Option<&Path>) -> Result<Config, ConfigError> {
    let options = KubeConfigOptions::default();
    match source(kubeconfig, |name| std::env::var_os(name), Path::exists) {
        Source::File(path) | Source::Home(path) => {
            let wrap = |source| ConfigError::Kubeconfig { path: path.clone(), source };
            let file = Kubeconfig::read_from(&path).map_err(wrap)?;
            Config::from_custom_kubeconfig(file, &options).await.map_err(wrap)
        }
        Source::Environment(path) => {
            Config::from_kubeconfig(&options).await.map_err(|source| ConfigError::Kubeconfig { path, source })
        }
        Source::Pod => Config::incluster().map_err(ConfigError::InCluster),
        Source::Nowhere => Err(ConfigError::NoCluster),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(flag: Option<&str>, env: &[(&str, &str)], home_has_config: bool) -> Source {
        let env = |name: &str| env.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value));
        source(flag.map(Path::new), env, |_| home_has_config)
    }

    #[test]
    fn the_flag_wins_over_the_environment_and_the_pod() {
        let env = [("KUBECONFIG", "/env"), ("KUBERNETES_SERVICE_HOST", "10.96.0.1"), ("HOME", "/home/me")];
        assert_eq!(found(Some("/flag"), &env, true), Source::File("/flag".into()));
        assert_eq!(found(None, &env, true), Source::Environment("/env".into()));
        assert_eq!(found(None, &env[1..], true), Source::Pod);
        assert_eq!(found(None, &env[2..], true), Source::Home("/home/me/.kube/config".into()));
        assert_eq!(found(None, &env[2..], false), Source::Nowhere);
        assert_eq!(found(None, &[("KUBECONFIG", "")], false), Source::Nowhere);
    }

    #[tokio::test]
    async fn a_missing_kubeconfig_names_its_path() {
        let error = load(Some(Path::new("/nonexistent/kubeconfig"))).await.unwrap_err();
        assert!(error.to_string().contains("/nonexistent/kubeconfig"), "{error}");
    }

    #[tokio::test]
    async fn only_reads_are_retried_and_every_call_says_who_asks() {
        use std::sync::{Arc, Mutex};

        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::clone(&asked);
        tokio::spawn(async move {
            use tokio::io::{AsyncReadExt, AsyncWriteExt};
            while let Ok((mut socket, _)) = listener.accept().await {
                let mut buffer = [0; 2048];
                let n = socket.read(&mut buffer).await.unwrap_or(0);
                seen.lock().unwrap().push(String::from_utf8_lossy(&buffer[..n]).to_lowercase());
                let answer = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
                let _ = socket.write_all(answer.as_bytes()).await;
            }
        });
        let config = Config::new(format!("http://{address}").parse().unwrap());
        let clients = Clients::new(&config, Duration::from_secs(25)).unwrap();
        for client in [&clients.write, &clients.watch, &clients.lease] {
            asked.lock().unwrap().clear();
            let request = http::Request::get("/version").body(Vec::new()).unwrap();
            client.request_text(request).await.unwrap_err();
            assert_eq!(asked.lock().unwrap().len(), 1);
            assert!(asked.lock().unwrap()[0].contains(&format!("user-agent: {AGENT}")));
        }
    }
}
