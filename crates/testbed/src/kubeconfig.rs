//! Kubeconfig files, written as JSON: every reader of YAML accepts it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::{Value, json};

use crate::pki::Pair;

/// How a kubeconfig's user proves who it is.
#[derive(Debug)]
pub(crate) enum Credentials<'a> {
    Certificate(&'a Pair),
    Token(&'a str),
}

/// Writes a kubeconfig for one server and one user.
pub(crate) fn write(path: &Path, server: &str, ca: &Path, credentials: &Credentials<'_>) -> anyhow::Result<()> {
    let user = match credentials {
        Credentials::Certificate(pair) => json!({"client-certificate": pair.certificate, "client-key": pair.key}),
        Credentials::Token(token) => json!({"token": token}),
    };
    let name = "testbed";
    store(
        path,
        &json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": {"server": server, "certificate-authority": ca}}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "current-context": name,
        }),
    )
}

/// Copies a kubeconfig with the same credentials to another server address.
pub(crate) fn redirect(from: &Path, to: PathBuf, server: &str) -> anyhow::Result<PathBuf> {
    let text = fs::read_to_string(from).with_context(|| format!("cannot read {}", from.display()))?;
    let mut config: Value = serde_json::from_str(&text).context("only kubeconfigs of the testbed can be redirected")?;
    let field = config.pointer_mut("/clusters/0/cluster/server").context("the kubeconfig names no server")?;
    *field = json!(server);
    store(&to, &config)?;
    Ok(to)
}

fn store(path: &Path, config: &Value) -> anyhow::Result<()> {
    fs::write(path, serde_json::to_vec_pretty(config)?).with_context(|| format!("cannot write {}", path.display()))
}

/// A client that acts as the user of the kubeconfig at `path`.
///
/// # Errors
/// The file or the certificates it names cannot be read.
pub async fn client(path: &Path) -> anyhow::Result<kube::Client> {
    let file = kube::config::Kubeconfig::read_from(path)?;
    let config = kube::Config::from_custom_kubeconfig(file, &Default::default()).await?;
    Ok(kube::Client::try_from(config)?)
}

#[cfg(test)]
mod tests {
    use super::{Credentials, redirect, write};

    #[test]
    fn redirected_copy_keeps_credentials() {
        let dir = tempfile::tempdir().unwrap();
        let original = dir.path().join("a");
        write(&original, "https://127.0.0.1:1", &dir.path().join("ca.crt"), &Credentials::Token("t0ken")).unwrap();
        let copy = redirect(&original, dir.path().join("b"), "https://127.0.0.1:2").unwrap();
        let text = std::fs::read_to_string(copy).unwrap();
        assert!(text.contains("t0ken") && text.contains("127.0.0.1:2") && !text.contains("127.0.0.1:1\""));
    }
}
