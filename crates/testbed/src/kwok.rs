//! Fake nodes, which kwok keeps alive.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, NodeSpec, NodeStatus, Taint};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Api;
use kube::api::{ObjectMeta, PostParams};

use crate::cluster::Cluster;

/// kwok plays the kubelet of nodes with this annotation and of no others.
pub(crate) const MANAGED: [&str; 2] = ["kwok.x-k8s.io/node", "fake"];

/// A fake node to be: 32 CPUs, 256 GiB, 110 pods unless said otherwise.
#[derive(Clone, Debug)]
pub struct KwokNode {
    node: Node,
}

impl KwokNode {
    /// A node without labels of its own beyond the usual ones.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let annotations = BTreeMap::from([MANAGED.map(str::to_owned).into()]);
        let labels = BTreeMap::from([
            ("kubernetes.io/hostname".to_owned(), name.to_owned()),
            ("kubernetes.io/os".to_owned(), "linux".to_owned()),
            ("kubernetes.io/arch".to_owned(), "amd64".to_owned()),
        ]);
        let metadata = ObjectMeta {
            name: Some(name.to_owned()),
            annotations: Some(annotations),
            labels: Some(labels),
            ..Default::default()
        };
        let node = Node { metadata, spec: None, status: None };
        Self { node }.allocatable("cpu", "32").allocatable("memory", "256Gi").allocatable("pods", "110")
    }

    /// Adds a label.
    #[must_use]
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.node.metadata.labels.get_or_insert_default().insert(key.to_owned(), value.to_owned());
        self
    }

    /// Adds an annotation.
    #[must_use]
    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        self.node.metadata.annotations.get_or_insert_default().insert(key.to_owned(), value.to_owned());
        self
    }

    /// Adds a taint.
    #[must_use]
    pub fn taint(mut self, key: &str, value: &str, effect: &str) -> Self {
        let taint = Taint {
            key: key.to_owned(),
            value: Some(value.to_owned()).filter(|value| !value.is_empty()),
            effect: effect.to_owned(),
            time_added: None,
        };
        self.node.spec.get_or_insert_with(NodeSpec::default).taints.get_or_insert_default().push(taint);
        self
    }

    /// Sets capacity and allocatable of one resource.
    #[must_use]
    pub fn allocatable(mut self, resource: &str, quantity: &str) -> Self {
        let status = self.node.status.get_or_insert_with(NodeStatus::default);
        for amounts in [&mut status.allocatable, &mut status.capacity] {
            amounts.get_or_insert_default().insert(resource.to_owned(), Quantity(quantity.to_owned()));
        }
        self
    }

    /// The object, for a test that creates it in its own way.
    #[must_use]
    pub fn into_node(self) -> Node {
        self.node
    }
}

impl Cluster {
    /// Creates the node; kwok makes it ready a moment later. At [`Layer::Api`](crate::Layer::Api) it stays as it is.
    ///
    /// # Errors
    /// The API server refused.
    pub async fn add_kwok_node(&self, node: KwokNode) -> anyhow::Result<Node> {
        Ok(Api::<Node>::all(self.client()).create(&PostParams::default(), &node.into_node()).await?)
    }
}
