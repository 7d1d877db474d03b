//! The custom resource definitions follow the release: whoever leads applies them once, by server-side apply.
//!
//! # Guarantees
//! - They are never deleted: users' objects would go with them.
//! - A definition of a newer release is left alone, so that a step back takes no field away from stored objects.

use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ObjectMeta};
use kube::core::PartialObjectMeta;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use crate::features::{self, Row};
use crate::run::Context;
use crate::runtime::apply::{Outcome, Target, Write};

/// On a definition: the release it came with.
const RELEASE: &str = "groundcrew.io/release";
const CALL: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_secs(5);

/// What a feature's row brings, marked with this release.
pub fn of(row: &Row) -> impl Iterator<Item = CustomResourceDefinition> {
    (row.crds)().into_iter().map(|mut definition| {
        let annotations = definition.metadata.annotations.get_or_insert_default();
        annotations.insert(RELEASE.to_owned(), env!("CARGO_PKG_VERSION").to_owned());
        definition
    })
}

/// Applies them as soon as this replica leads, until all are in place.
pub fn start(context: &Context) {
    if !context.config.crds.manage {
        return;
    }
    let context = context.clone();
    context.tasks.clone().spawn(context.stopping.clone().run_until_cancelled_owned(async move {
        let mut leader = context.leadership.watch();
        loop {
            let _ = leader.wait_for(|leads| *leads).await;
            match apply_all(&context).await {
                Ok(()) => return,
                Err(error) => warn!(error, "the custom resource definitions are not in place yet, trying again"),
            }
            sleep(RETRY).await;
        }
    }));
}

async fn apply_all(context: &Context) -> Result<(), String> {
    let api: Api<CustomResourceDefinition> = Api::all(context.clients.write.clone());
    for row in features::enabled(&context.config) {
        for definition in of(row) {
            let name = definition.metadata.name.clone().unwrap_or_default();
            let known = timeout(CALL, api.get_metadata_opt(&name)).await.map_err(|_| format!("{name}: no answer"))?;
            if let Some(release) = newer(known.map_err(|e| format!("{name}: {e}"))?.as_ref()) {
                info!(definition = name, release, "left alone: it is of a newer release");
                continue;
            }
            let object = serde_json::to_value(&definition).map_err(|e| e.to_string())?;
            let target = Target::of::<CustomResourceDefinition>(None, &name, "");
            match context.writer.write(row.feature, &target, &Write::Apply(object)).await {
                Ok(Outcome::Done(_)) => {}
                Ok(other) => return Err(format!("{name}: {other:?}")),
                Err(error) => return Err(format!("{name}: {error}")),
            }
        }
    }
    Ok(())
}

/// The release of the definition in the cluster, if it is past ours.
fn newer(known: Option<&PartialObjectMeta<CustomResourceDefinition>>) -> Option<String> {
    let release = release(&known?.metadata)?;
    let is_newer = parts(&release)? > parts(env!("CARGO_PKG_VERSION"))?;
    is_newer.then_some(release)
}

fn release(metadata: &ObjectMeta) -> Option<String> {
    metadata.annotations.as_ref()?.get(RELEASE).cloned()
}

/// Major, minor and patch; what follows a dash does not count.
fn parts(release: &str) -> Option<[u64; 3]> {
    let numbers = release.split_once('-').map_or(release, |(numbers, _)| numbers);
    let all: Vec<u64> = numbers.split('.').map(|number| number.parse().ok()).collect::<Option<_>>()?;
    all.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(release: &str) -> PartialObjectMeta<CustomResourceDefinition> {
        let annotations = Some([(RELEASE.to_owned(), release.to_owned())].into());
        PartialObjectMeta { metadata: ObjectMeta { annotations, ..ObjectMeta::default() }, ..Default::default() }
    }

    #[test]
    fn only_a_definition_of_a_newer_release_is_left_alone() {
        assert_eq!(newer(Some(&known("99.0.0"))), Some("99.0.0".to_owned()));
        for ours in [env!("CARGO_PKG_VERSION"), "0.0.1", "", "not a release", "99"] {
            assert_eq!(newer(Some(&known(ours))), None, "{ours}");
        }
        assert_eq!(newer(None), None);
    }

    #[test]
    fn every_definition_says_which_release_it_came_with() {
        let all: Vec<_> = features::TABLE.iter().flat_map(of).collect();
        assert!(all.len() >= 2);
        assert!(all.iter().all(|d| release(&d.metadata).as_deref() == Some(env!("CARGO_PKG_VERSION"))));
    }
}
