//! A caller as strict as an API server, which tells what it was shown.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

const DEADLINE: Duration = Duration::from_secs(30);

/// One TLS handshake with the server of this name or address that trusts the PEM certificates of `bundle` and nobody
/// else; returns the certificate that was shown.
///
/// # Errors
/// Nobody answers, or not with a certificate that can be trusted.
pub async fn handshake(address: SocketAddr, name: &str, bundle: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut roots = rustls::RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(bundle) {
        roots.add(certificate?)?;
    }
    let config = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from(name.to_owned())?;
    let shown = async {
        let socket = TcpStream::connect(address).await?;
        let stream = TlsConnector::from(Arc::new(config)).connect(name, socket).await?;
        let shown = stream.get_ref().1.peer_certificates().and_then(<[_]>::first).context("no certificate")?;
        anyhow::Ok(shown.to_vec())
    };
    timeout(DEADLINE, shown).await?
}
