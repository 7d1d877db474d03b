//! Makes keys and certificates.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use groundcrew_core::certificates::Validity;
use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData, SanType, date_time_ymd,
};

/// A certificate and its private key, both PEM.
#[derive(Clone, PartialEq, Eq)]
pub(in crate::admission) struct Minted {
    pub(in crate::admission) cert: String,
    pub(in crate::admission) key: String,
}

impl fmt::Debug for Minted {
    /// Never shows the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Minted").field("cert", &self.cert).finish_non_exhaustive()
    }
}

/// A CA with a name of its own, so that callers with several in their bundle pick the right one at once.
pub(in crate::admission) fn ca(validity: Validity) -> Result<Minted, rcgen::Error> {
    let key = KeyPair::generate()?;
    let mut params = dated(validity);
    let tail: String = key.der_bytes().iter().rev().take(4).map(|byte| format!("{byte:02x}")).collect();
    params.distinguished_name = named(&format!("groundcrew webhook CA {tail}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let cert = params.self_signed(&key)?;
    Ok(Minted { cert: cert.pem(), key: key.serialize_pem() })
}

/// A server certificate for `names`, DNS names and IP addresses alike.
pub(in crate::admission) fn leaf(ca: &Minted, names: &[String], validity: Validity) -> Result<Minted, rcgen::Error> {
    let issuer = Issuer::from_ca_cert_pem(&ca.cert, KeyPair::from_pem(&ca.key)?)?;
    let key = KeyPair::generate()?;
    let mut params = dated(validity);
    params.distinguished_name = named("groundcrew webhook");
    params.subject_alt_names = names.iter().map(|name| san(name)).collect::<Result<_, _>>()?;
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let cert = params.signed_by(&key, &issuer)?;
    Ok(Minted { cert: cert.pem(), key: key.serialize_pem() })
}

fn dated(validity: Validity) -> CertificateParams {
    let at = |seconds: i64| date_time_ymd(1970, 1, 1) + Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
    let mut params = CertificateParams::default();
    params.not_before = at(validity.not_before.as_second());
    params.not_after = at(validity.not_after.as_second());
    params
}

fn named(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

fn san(name: &str) -> Result<SanType, rcgen::Error> {
    match name.parse::<IpAddr>() {
        Ok(ip) => Ok(SanType::IpAddress(ip)),
        Err(_) => Ok(SanType::DnsName(Ia5String::try_from(name)?)),
    }
}
