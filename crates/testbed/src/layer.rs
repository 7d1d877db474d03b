//! How much of a Kubernetes a test needs, weakest first.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::host;

/// The parts that run in a [`Cluster`](crate::Cluster); each layer holds the ones before it.
///
/// Layer 1 has no cluster at all and so does not appear here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layer {
    /// Layer 2, API server and etcd: admission, patches, schemas, RBAC, watches.
    Api,
    /// Layer 3, adds controller-manager, scheduler and kwok: ReplicaSets, budgets, scheduling on thousands of fake nodes.
    Controllers,
    /// Layer 4, adds containerd, kubelet and kube-proxy: one real node with real containers. Needs root.
    Nodes,
}

impl Layer {
    /// Every layer, weakest first.
    pub const ALL: [Self; 3] = [Self::Api, Self::Controllers, Self::Nodes];

    /// The number used in documentation and on the command line.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Api => 2,
            Self::Controllers => 3,
            Self::Nodes => 4,
        }
    }

    /// Whether this machine can run the layer; the error is a one-line reason.
    ///
    /// # Errors
    /// Says what is missing: root, or the host's programs.
    pub fn available(self) -> Result<(), String> {
        match self {
            Self::Api | Self::Controllers => Ok(()),
            Self::Nodes => host::can_run_nodes(),
        }
    }

    /// For the first line of a test: `true` when the layer runs here, else one line that says why the test is skipped.
    ///
    /// # Errors
    /// With `CI` set nothing may be skipped, so there the reason is an error.
    pub fn available_or_skip(self) -> anyhow::Result<bool> {
        let Err(reason) = self.available() else { return Ok(true) };
        if std::env::var_os("CI").is_some_and(|value| !value.is_empty()) {
            anyhow::bail!("layer {self} cannot run, and on CI no layer may be skipped: {reason}");
        }
        announce_skip(self, &reason);
        Ok(false)
    }
}

#[expect(clippy::print_stderr, reason = "a skipped test must be seen in the test run's output")]
fn announce_skip(layer: Layer, reason: &str) {
    eprintln!("skipped: layer {layer} needs {reason}");
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.number())
    }
}

impl FromStr for Layer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|layer| layer.to_string() == text)
            .ok_or_else(|| format!("no layer {text:?}: use 2 (API), 3 (controllers) or 4 (real node)"))
    }
}

#[cfg(test)]
mod tests {
    use super::Layer;

    #[test]
    fn every_layer_parses_from_what_it_prints() {
        for layer in Layer::ALL {
            assert_eq!(layer.to_string().parse(), Ok(layer));
        }
        assert!("5".parse::<Layer>().is_err());
    }

    #[test]
    fn later_layers_contain_earlier_ones() {
        assert!(Layer::Api < Layer::Controllers && Layer::Controllers < Layer::Nodes);
    }
}
