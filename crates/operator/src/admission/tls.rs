//! The certificate the webhook server shows, exchangeable while connections stay open.
//!
//! ```text
//! managed / files ──► Pair::from_pem (parses, key fits) ──► ServingCert::swap ──► the next handshake
//! ```

use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use groundcrew_core::certificates::Validity;
use jiff::Timestamp;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{RootCertStore, ServerConfig};
use tokio::sync::watch;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

#[cfg(test)]
mod tests;

/// Why a certificate or a pair cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PairError {
    #[error("no readable PEM certificate: {0}")]
    Certificate(String),
    #[error("no readable PEM private key: {0}")]
    Key(String),
    #[error("private key and certificate do not belong together: {0}")]
    Mismatch(#[source] rustls::Error),
    #[error("expired at {0}")]
    Expired(Timestamp),
}

/// What we read from a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    pub validity: Validity,
    /// DNS names and IP addresses it is valid for.
    pub names: Vec<String>,
}

/// A certificate chain with its private key: parsed, and known to fit each other.
#[derive(Clone)]
pub struct Pair {
    key: Arc<CertifiedKey>,
    facts: Facts,
}

impl fmt::Debug for Pair {
    /// Never shows the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pair").field("facts", &self.facts).finish_non_exhaustive()
    }
}

impl Pair {
    pub fn from_pem(chain: &[u8], key: &[u8]) -> Result<Self, PairError> {
        let chain = certificates(chain)?;
        let leaf = chain.first().ok_or_else(|| PairError::Certificate("none found".to_owned()))?;
        let facts = facts(leaf)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| PairError::Key(error.to_string()))?;
        let key = CertifiedKey::from_der(chain, key, &provider()).map_err(PairError::Mismatch)?;
        Ok(Self { key: Arc::new(key), facts })
    }

    /// As [`Pair::from_pem`], and refuses what has already expired.
    pub fn valid_from_pem(chain: &[u8], key: &[u8], now: Timestamp) -> Result<Self, PairError> {
        let pair = Self::from_pem(chain, key)?;
        if pair.facts.validity.expired(now) {
            return Err(PairError::Expired(pair.facts.validity.not_after));
        }
        Ok(pair)
    }

    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Whether a caller that trusts only `roots` would accept this pair, its dates aside.
    ///
    /// Asks the verifier a client would use instead of comparing names and key identifiers.
    pub fn trusted_by(&self, roots: &[CertificateDer<'_>]) -> bool {
        let mut store = RootCertStore::empty();
        store.add_parsable_certificates(roots.iter().cloned().map(CertificateDer::into_owned));
        let Some((leaf, intermediates)) = self.key.cert.split_first() else { return false };
        let Some(name) = self.facts.names.first().and_then(|name| ServerName::try_from(name.as_str()).ok()) else {
            return false;
        };
        let at = u64::try_from(self.facts.validity.not_after.as_second() - 1).unwrap_or(0);
        let at = UnixTime::since_unix_epoch(std::time::Duration::from_secs(at));
        WebPkiServerVerifier::builder_with_provider(Arc::new(store), provider())
            .build()
            .is_ok_and(|verifier| verifier.verify_server_cert(leaf, intermediates, &name, &[], at).is_ok())
    }
}

/// All certificates of a PEM text; an error if one of them is broken.
pub fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, PairError> {
    CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .map_err(|error| PairError::Certificate(error.to_string()))
}

/// Dates and names of one certificate.
pub fn facts(certificate: &CertificateDer<'_>) -> Result<Facts, PairError> {
    let (_, x509) =
        X509Certificate::from_der(certificate).map_err(|error| PairError::Certificate(error.to_string()))?;
    let at = |time: i64| Timestamp::from_second(time).map_err(|error| PairError::Certificate(error.to_string()));
    let validity = Validity {
        not_before: at(x509.validity().not_before.timestamp())?,
        not_after: at(x509.validity().not_after.timestamp())?,
    };
    let names = match x509.subject_alternative_name() {
        Ok(Some(extension)) => extension.value.general_names.iter().filter_map(name).collect(),
        _ => Vec::new(),
    };
    Ok(Facts { validity, names })
}

fn name(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(octets) => match octets.len() {
            4 => <[u8; 4]>::try_from(*octets).ok().map(|ip| std::net::Ipv4Addr::from(ip).to_string()),
            16 => <[u8; 16]>::try_from(*octets).ok().map(|ip| std::net::Ipv6Addr::from(ip).to_string()),
            _ => None,
        },
        _ => None,
    }
}

/// Holds the pair that handshakes use; empty until the first swap.
pub struct ServingCert {
    current: ArcSwapOption<Pair>,
    loaded: watch::Sender<bool>,
    expiry: Gauge,
}

impl fmt::Debug for ServingCert {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServingCert").field("facts", &self.facts()).finish_non_exhaustive()
    }
}

impl ServingCert {
    pub fn register(registry: &mut Registry) -> Arc<Self> {
        let expiry = Gauge::default();
        registry.register(
            "groundcrew_certificate_expiry_timestamp_seconds",
            "When the served webhook certificate expires, in Unix time; 0 while none is loaded",
            expiry.clone(),
        );
        Arc::new(Self { current: ArcSwapOption::empty(), loaded: watch::Sender::new(false), expiry })
    }

    /// From the next handshake on this pair is shown; open connections go on undisturbed.
    pub fn swap(&self, pair: Pair) {
        self.expiry.set(pair.facts.validity.not_after.as_second());
        self.current.store(Some(Arc::new(pair)));
        self.loaded.send_replace(true);
    }

    pub fn pair(&self) -> Option<Arc<Pair>> {
        self.current.load_full()
    }

    pub fn facts(&self) -> Option<Facts> {
        self.current.load().as_ref().map(|pair| pair.facts.clone())
    }

    /// Turns true with the first certificate and stays so.
    pub fn loaded(&self) -> watch::Receiver<bool> {
        self.loaded.subscribe()
    }

    /// TLS 1.2 and 1.3, HTTP/2 preferred. No session is resumed: the API server keeps its connections anyway, and
    /// a resumed one would go on with a certificate that has been replaced.
    pub fn server_config(self: &Arc<Self>) -> Result<ServerConfig, rustls::Error> {
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(Resolver(Arc::clone(self))));
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }
}

#[derive(Debug)]
struct Resolver(Arc<ServingCert>);

impl ResolvesServerCert for Resolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.current.load().as_ref().map(|pair| Arc::clone(&pair.key))
    }
}

/// Named in every place that needs one, so that nothing depends on a process-wide default.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}
