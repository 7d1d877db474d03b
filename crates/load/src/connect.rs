//! A connection to one socket address: plain or TLS, HTTP/1.1 or HTTP/2.
//!
//! TLS is not verified, as kubelet probes do not: a pod's certificate names a service, never the pod's IP, and warm-up
//! requests carry no secrets of groundcrew's.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use http_body_util::Full;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::AbortHandle;
use tokio_rustls::TlsConnector;

use crate::client::{Target, Wire};
use crate::report::Failure;

/// A response head larger than this is an attack or a mistake.
const MAX_HEAD: usize = 64 * 1024;
/// What an HTTP/2 peer may send ahead of our reading, per stream and in all.
const STREAM_WINDOW: u32 = 64 * 1024;
const CONNECTION_WINDOW: u32 = 1024 * 1024;

/// A way to send, and the task behind it, which ends with it.
#[derive(Debug)]
pub(crate) struct Connection<S> {
    pub sender: S,
    task: AbortHandle,
}

impl<S> Drop for Connection<S> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(crate) type Http1 = Connection<http1::SendRequest<Full<Bytes>>>;
pub(crate) type Http2 = Connection<http2::SendRequest<Full<Bytes>>>;

pub(crate) enum Opened {
    Http1(Http1),
    Http2(Http2),
}

pub(crate) async fn open(target: &Target) -> Result<Opened, Failure> {
    let tcp = TcpStream::connect(target.address).await.map_err(|e| Failure::of_connect(&e))?;
    // Latency is what is measured; a failure to set it only makes it worse.
    let _ = tcp.set_nodelay(true);
    match target.wire {
        Wire::Http1 => handshake1(tcp).await,
        Wire::Http2 => handshake2(tcp).await,
        Wire::Tls => {
            let name = ServerName::from(target.address.ip());
            let tls = TlsConnector::from(tls_config()?).connect(name, tcp).await.map_err(|_| Failure::Tls)?;
            match tls.get_ref().1.alpn_protocol() {
                Some(b"h2") => handshake2(tls).await,
                _ => handshake1(tls).await,
            }
        }
    }
}

async fn handshake1(io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Result<Opened, Failure> {
    let mut builder = http1::Builder::new();
    builder.max_buf_size(MAX_HEAD);
    let (sender, connection) = builder.handshake(TokioIo::new(io)).await.map_err(|_| Failure::Protocol)?;
    let task = tokio::spawn(async move {
        // Whoever waits for the response hears of the error there.
        let _ = connection.await;
    });
    Ok(Opened::Http1(Connection { sender, task: task.abort_handle() }))
}

async fn handshake2(io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Result<Opened, Failure> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(MAX_HEAD as u32);
    let (sender, connection) = builder.handshake(TokioIo::new(io)).await.map_err(|_| Failure::Protocol)?;
    let task = tokio::spawn(async move {
        let _ = connection.await;
    });
    Ok(Opened::Http2(Connection { sender, task: task.abort_handle() }))
}

/// One configuration for all: it caches sessions and costs some kilobytes.
fn tls_config() -> Result<Arc<ClientConfig>, Failure> {
    static CONFIG: OnceLock<Option<Arc<ClientConfig>>> = OnceLock::new();
    CONFIG.get_or_init(|| build_tls_config().ok().map(Arc::new)).clone().ok_or(Failure::Tls)
}

fn build_tls_config() -> Result<ClientConfig, rustls::Error> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions()?;
    let anyone = Arc::new(Anyone(provider));
    let mut config = builder.dangerous().with_custom_certificate_verifier(anyone).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

/// Takes every certificate, but still checks that the peer holds its key.
#[derive(Debug)]
struct Anyone(Arc<CryptoProvider>);

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
