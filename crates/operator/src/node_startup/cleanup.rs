//! Leaves no taint, policy or finalizer behind; for `groundcrew cleanup`, with whatever rights its caller has.

use std::time::Duration;

use groundcrew_core::config::Config;
use groundcrew_core::node_startup::{NodeFacts, Rules, Seen, decide};
use jiff::Timestamp;
use k8s_openapi::api::admissionregistration::v1::{MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding};
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::discovery::ApiResource;
use kube::{Client, Resource, ResourceExt};
use serde_json::json;
use tokio::time::sleep;
use tracing::info;

use super::crd::NodeStartupRule;
use super::rules::FINALIZER;
use super::{engine, gather};

/// API servers learn by watch that a policy is gone.
const LINGER: Duration = Duration::from_secs(2);
const ATTEMPTS: usize = 20;

/// Policies first, so that nobody is tainted any more; then the taints; then the rules may go.
pub async fn run(client: &Client, config: &Config) -> Result<(), String> {
    if engine::served(client).await? {
        delete::<MutatingAdmissionPolicyBinding>(client).await?;
        delete::<MutatingAdmissionPolicy>(client).await?;
    }
    let own = cluster_rules(client).await?;
    sleep(LINGER).await;
    let built_in = config.node_startup.rules();
    let compiled = own.iter().map(|rule| rule.draft().compile().0);
    let mut rules = Rules { rules: built_in.rules.iter().cloned().chain(compiled).collect(), ..built_in };
    rules.rules.iter_mut().for_each(|rule| rule.retired = true);
    rules.backfill = false;
    release_all(client, &rules).await?;
    for rule in own.iter().filter(|rule| rule.finalizers().iter().any(|f| f == FINALIZER)) {
        let kept: Vec<&String> = rule.finalizers().iter().filter(|f| *f != FINALIZER).collect();
        let patch = json!({"metadata": {"finalizers": kept, "uid": rule.uid()}});
        let api: Api<NodeStartupRule> = Api::all(client.clone());
        gone_is_done(api.patch(&rule.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await)?;
    }
    Ok(())
}

async fn cluster_rules(client: &Client) -> Result<Vec<NodeStartupRule>, String> {
    match Api::<NodeStartupRule>::all(client.clone()).list(&ListParams::default()).await {
        Ok(list) => Ok(list.items),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(Vec::new()),
        Err(error) => Err(error.to_string()),
    }
}

/// Lists and releases until a list shows nobody held: another writer may have made a patch fail.
async fn release_all(client: &Client, rules: &Rules) -> Result<(), String> {
    let nodes: Api<gather::Node> = Api::all(client.clone());
    for _ in 0..ATTEMPTS {
        let all = nodes.list(&ListParams::default()).await.map_err(|e| e.to_string())?;
        let facts: Vec<NodeFacts> = all.items.into_iter().filter_map(gather::node).collect();
        let now = Timestamp::now();
        let mut held = 0;
        for node in &facts {
            let seen = Seen { node, daemon_sets: &[], pods: &[], user_pods: true };
            let Some(patch) = decide(rules, &seen, now).patch(node, now) else { continue };
            held += 1;
            match nodes.patch(&node.name, &PatchParams::default(), &Patch::<()>::Json(patch)).await {
                Ok(_) => info!(node = node.name, "Removed startup taint"),
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409 | 422) => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        if held == 0 {
            return Ok(());
        }
    }
    Err("some nodes keep changing and are still held; run it again".to_owned())
}

async fn delete<K: Resource<DynamicType = ()>>(client: &Client) -> Result<(), String> {
    let resource = ApiResource::erase::<K>(&());
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    for object in engine::owned::<K>(client).await? {
        gone_is_done(api.delete(&object.name_any(), &DeleteParams::default()).await)?;
    }
    Ok(())
}

fn gone_is_done<T>(result: kube::Result<T>) -> Result<(), String> {
    match result {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}
