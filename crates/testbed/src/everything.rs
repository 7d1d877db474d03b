//! Every object of a cluster by name, to see what an installation leaves behind.

use std::collections::BTreeSet;

use kube::ResourceExt;
use kube::api::{Api, DynamicObject, ListParams};
use kube::discovery::{ApiGroup, Discovery, verbs};

use crate::cluster::Cluster;

/// Written by the cluster itself at any time.
const OF_THE_CLUSTER: [&str; 3] = ["Event", "EndpointSlice", "Endpoints"];

impl Cluster {
    /// `Kind.group namespace/name` of everything outside these namespaces.
    ///
    /// # Errors
    /// The API server does not answer.
    pub async fn everything(&self, except: &[&str]) -> anyhow::Result<BTreeSet<String>> {
        let client = self.client();
        let known = Discovery::new(client.clone()).run().await?;
        let mut all = BTreeSet::new();
        for (resource, capabilities) in known.groups().flat_map(ApiGroup::recommended_resources) {
            if !capabilities.supports_operation(verbs::LIST) || OF_THE_CLUSTER.contains(&resource.kind.as_str()) {
                continue;
            }
            let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
            for object in api.list_metadata(&ListParams::default()).await? {
                let namespace = object.namespace().unwrap_or_default();
                if !except.contains(&namespace.as_str()) && namespace != "kube-node-lease" {
                    all.insert(format!("{}.{} {namespace}/{}", resource.kind, resource.group, object.name_any()));
                }
            }
        }
        Ok(all)
    }
}
