//! The certificates of one throw-away cluster.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SanType,
};

/// Files of one certificate and its key.
#[derive(Clone, Debug)]
pub(crate) struct Pair {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

/// Files of the keys behind service-account tokens.
#[derive(Clone, Debug)]
pub(crate) struct TokenKeys {
    pub(crate) public: PathBuf,
    pub(crate) private: PathBuf,
}

/// A certificate authority kept in a directory, so that supervisor and test can both sign with it.
#[derive(Clone, Debug)]
pub(crate) struct Authority {
    dir: PathBuf,
}

impl Authority {
    /// Makes the authority; everything it signs lies in `dir` too.
    pub(crate) fn create(dir: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(dir)?;
        let authority = Self::open(dir);
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name = common_name("groundcrew-testbed");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        write_public(&authority.certificate(), &params.self_signed(&key)?.pem())?;
        write_secret(&authority.key(), &key.serialize_pem())?;
        Ok(authority)
    }

    /// An authority that [`Authority::create`] made before.
    pub(crate) fn open(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    pub(crate) fn certificate(&self) -> PathBuf {
        self.dir.join("ca.crt")
    }

    pub(crate) fn key(&self) -> PathBuf {
        self.dir.join("ca.key")
    }

    /// A serving certificate for these names and addresses.
    pub(crate) fn server(&self, file: &str, names: &[&str], addresses: &[IpAddr]) -> anyhow::Result<Pair> {
        let mut params = CertificateParams::new(names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>())?;
        params.subject_alt_names.extend(addresses.iter().copied().map(SanType::IpAddress));
        params.distinguished_name = common_name(file);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(file, params)
    }

    /// A client certificate: Kubernetes reads the user from the common name and groups from the organisations.
    pub(crate) fn client(&self, file: &str, user: &str, groups: &[&str]) -> anyhow::Result<Pair> {
        let mut params = CertificateParams::default();
        params.distinguished_name = common_name(user);
        if let Some((first, others)) = groups.split_first() {
            params.distinguished_name.push(DnType::OrganizationName, *first);
            // rcgen keeps one value per attribute, and Kubernetes reads one group per value.
            anyhow::ensure!(others.is_empty(), "a client certificate here carries one group, got {groups:?}");
        }
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(file, params)
    }

    /// The keys that service-account tokens are signed and checked with.
    pub(crate) fn token_keys(&self) -> anyhow::Result<TokenKeys> {
        let keys =
            TokenKeys { public: self.dir.join("service-account.pub"), private: self.dir.join("service-account.key") };
        let pair = KeyPair::generate()?;
        write_public(&keys.public, &pair.public_key_pem())?;
        write_secret(&keys.private, &pair.serialize_pem())?;
        Ok(keys)
    }

    fn sign(&self, file: &str, mut params: CertificateParams) -> anyhow::Result<Pair> {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        let authority_key = KeyPair::from_pem(&fs::read_to_string(self.key())?)?;
        let issuer = Issuer::from_ca_cert_pem(&fs::read_to_string(self.certificate())?, authority_key)?;
        let key = KeyPair::generate()?;
        let pair =
            Pair { certificate: self.dir.join(format!("{file}.crt")), key: self.dir.join(format!("{file}.key")) };
        write_public(&pair.certificate, &params.signed_by(&key, &issuer)?.pem())?;
        write_secret(&pair.key, &key.serialize_pem())?;
        Ok(pair)
    }
}

fn common_name(name: &str) -> rcgen::DistinguishedName {
    let mut subject = rcgen::DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    subject
}

fn write_public(path: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

fn write_secret(path: &Path, text: &str) -> anyhow::Result<()> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(path).with_context(|| format!("cannot write {}", path.display()))?;
    std::io::Write::write_all(&mut file, text.as_bytes())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::Authority;

    #[test]
    fn reopened_authority_signs_clients_and_servers() {
        let dir = tempfile::tempdir().unwrap();
        Authority::create(dir.path()).unwrap();
        let authority = Authority::open(dir.path());
        let client = authority.client("someone", "someone", &["some-group"]).unwrap();
        let server = authority.server("api", &["localhost"], &["127.0.0.1".parse().unwrap()]).unwrap();
        for pair in [client, server] {
            assert!(std::fs::read_to_string(pair.certificate).unwrap().contains("BEGIN CERTIFICATE"));
            assert!(std::fs::read_to_string(pair.key).unwrap().contains("PRIVATE KEY"));
        }
    }
}
