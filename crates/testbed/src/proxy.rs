//! A loopback TCP proxy that can misbehave like a network.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Context;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::cluster::{Cluster, unique};
use crate::kubeconfig;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Forward,
    Freeze,
    Refuse,
}

/// What all connections look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State {
    mode: Mode,
    /// Connections made under an older number are dropped.
    generation: u64,
}

/// Forwards connections to one of its backends in turn, skipping those that do not answer: a Service in miniature.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    state: watch::Sender<State>,
    acceptor: JoinHandle<()>,
}

impl Proxy {
    /// A proxy in front of one address.
    ///
    /// # Errors
    /// No port is free.
    pub async fn to(backend: SocketAddr) -> anyhow::Result<Self> {
        Self::balance([backend]).await
    }

    /// A proxy in front of several addresses.
    ///
    /// # Errors
    /// No port is free.
    pub async fn balance(backends: impl IntoIterator<Item = SocketAddr>) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let (state, watched) = watch::channel(State { mode: Mode::Forward, generation: 0 });
        let backends = Arc::new(Backends { addresses: backends.into_iter().collect(), next: AtomicUsize::new(0) });
        let acceptor = tokio::spawn(accept(listener, address, backends, watched));
        Ok(Self { address, state, acceptor })
    }

    /// Where clients connect.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.address
    }

    /// Drops every connection now; new ones are served.
    pub fn cut(&self) {
        self.change(|state| state.generation += 1);
    }

    /// Stops forwarding in both directions; connections stay open and new ones are accepted, but silent.
    pub fn freeze(&self) {
        self.change(|state| state.mode = Mode::Freeze);
    }

    /// Forwards again, held back bytes first.
    pub fn thaw(&self) {
        self.change(|state| state.mode = Mode::Forward);
    }

    /// Drops every connection and refuses new ones until [`Proxy::thaw`].
    pub fn refuse(&self) {
        self.change(|state| *state = State { mode: Mode::Refuse, generation: state.generation + 1 });
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        self.state.send_modify(change);
    }

    /// A copy of the cluster's admin credentials that goes through this proxy.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn kubeconfig(&self, cluster: &Cluster) -> anyhow::Result<PathBuf> {
        self.redirect(cluster.kubeconfig())
    }

    /// A copy of any kubeconfig made by the testbed that goes through this proxy.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn redirect(&self, original: &Path) -> anyhow::Result<PathBuf> {
        let directory = original.parent().context("a kubeconfig lies in a directory")?;
        let copy = directory.join(format!("{}.kubeconfig", unique("proxied")));
        kubeconfig::redirect(original, copy, &format!("https://{}", self.address))
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // Connections notice that the state's sender is gone.
        self.acceptor.abort();
    }
}

struct Backends {
    addresses: Vec<SocketAddr>,
    next: AtomicUsize,
}

impl Backends {
    async fn connect(&self) -> Option<TcpStream> {
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        for offset in 0..self.addresses.len() {
            let address = self.addresses.get((first + offset) % self.addresses.len())?;
            if let Ok(stream) = TcpStream::connect(address).await {
                return Some(stream);
            }
        }
        None
    }
}

async fn accept(
    listener: TcpListener,
    address: SocketAddr,
    backends: Arc<Backends>,
    mut state: watch::Receiver<State>,
) {
    let mut listener = Some(listener);
    loop {
        let mode = state.borrow_and_update().mode;
        // Only a closed socket refuses; one that accepts and closes looks like a crash to clients.
        listener = match (mode, listener.take()) {
            (Mode::Refuse, _) => None,
            (_, Some(open)) => Some(open),
            (_, None) => TcpListener::bind(address).await.ok(),
        };
        let accepted = async {
            match &listener {
                Some(open) => open.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            Ok((client, _)) = accepted => {
                tokio::spawn(forward(client, Arc::clone(&backends), state.clone()));
            }
            changed = state.changed() => if changed.is_err() { return },
        }
    }
}

async fn forward(client: TcpStream, backends: Arc<Backends>, state: watch::Receiver<State>) {
    let born = state.borrow().generation;
    let work = async {
        let mut opened = state.clone();
        opened.wait_for(|now| now.mode == Mode::Forward).await.ok()?;
        let server = backends.connect().await?;
        let _ = client.set_nodelay(true);
        let _ = server.set_nodelay(true);
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        let _ = tokio::join!(copy(from_client, to_server, state.clone()), copy(from_server, to_client, state.clone()),);
        Some(())
    };
    let mut cut = state.clone();
    tokio::select! {
        _ = work => {}
        // Also resolves when the proxy is dropped.
        _ = cut.wait_for(|now| now.generation != born) => {}
    }
}

/// Copies until the end of the stream, holding bytes back while frozen.
async fn copy(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut state: watch::Receiver<State>,
) -> anyhow::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let length = from.read(&mut buffer).await?;
        state.wait_for(|now| now.mode == Mode::Forward).await?;
        if length == 0 {
            to.shutdown().await?;
            return Ok(());
        }
        to.write_all(buffer.get(..length).context("read past the buffer")?).await?;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::time::timeout;

    use super::Proxy;

    /// A server that sends back what it gets.
    async fn echo() -> std::net::SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut read, mut write) = stream.split();
                    let _ = tokio::io::copy(&mut read, &mut write).await;
                });
            }
        });
        address
    }

    /// Far more than an echo takes on two busy cores.
    const SOON: Duration = Duration::from_secs(30);

    async fn ping(stream: &mut TcpStream) -> Option<u8> {
        ping_within(SOON, stream).await
    }

    async fn ping_within(limit: Duration, stream: &mut TcpStream) -> Option<u8> {
        stream.write_all(b"x").await.ok()?;
        timeout(limit, stream.read_u8()).await.ok()?.ok()
    }

    #[tokio::test]
    async fn frozen_bytes_arrive_after_the_thaw() {
        let proxy = Proxy::to(echo().await).await.unwrap();
        let mut stream = TcpStream::connect(proxy.addr()).await.unwrap();
        assert_eq!(ping(&mut stream).await, Some(b'x'));
        proxy.freeze();
        assert_eq!(ping_within(Duration::from_millis(200), &mut stream).await, None);
        proxy.thaw();
        assert_eq!(timeout(SOON, stream.read_u8()).await.unwrap().unwrap(), b'x');
    }

    #[tokio::test]
    async fn cut_ends_old_connections_only() {
        let proxy = Proxy::to(echo().await).await.unwrap();
        let mut old = TcpStream::connect(proxy.addr()).await.unwrap();
        assert_eq!(ping(&mut old).await, Some(b'x'));
        proxy.cut();
        assert!(timeout(SOON, old.read_u8()).await.unwrap().is_err());
        let mut new = TcpStream::connect(proxy.addr()).await.unwrap();
        assert_eq!(ping(&mut new).await, Some(b'x'));
    }

    #[tokio::test]
    async fn refused_until_thawed() {
        let proxy = Proxy::to(echo().await).await.unwrap();
        proxy.refuse();
        let refused = async {
            while TcpStream::connect(proxy.addr()).await.is_ok() {
                tokio::task::yield_now().await;
            }
        };
        timeout(SOON, refused).await.unwrap();
        proxy.thaw();
        let served = async {
            loop {
                if let Ok(stream) = TcpStream::connect(proxy.addr()).await {
                    break stream;
                }
                tokio::task::yield_now().await;
            }
        };
        let mut stream = timeout(SOON, served).await.unwrap();
        assert_eq!(ping(&mut stream).await, Some(b'x'));
    }

    #[tokio::test]
    async fn balances_around_a_dead_backend() {
        let dead = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let proxy = Proxy::balance([dead, echo().await]).await.unwrap();
        for _ in 0..4 {
            let mut stream = TcpStream::connect(proxy.addr()).await.unwrap();
            assert_eq!(ping(&mut stream).await, Some(b'x'));
        }
    }
}
