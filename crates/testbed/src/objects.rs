//! Builders that let a test show only what matters.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use kube::api::ObjectMeta;

/// The smallest legal pod.
#[must_use]
pub fn pod(name: &str) -> Pod {
    let container = Container {
        name: "main".to_owned(),
        image: Some("none".to_owned()),
        image_pull_policy: Some("Never".to_owned()),
        ..Container::default()
    };
    Pod {
        metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
        spec: Some(PodSpec { containers: vec![container], ..PodSpec::default() }),
        status: None,
    }
}

/// Adds to a pod, in the order a sentence would.
pub trait PodExt: Sized {
    #[must_use]
    fn annotated(self, key: &str, value: &str) -> Self;
    #[must_use]
    fn with_image(self, image: &str, command: &[&str]) -> Self;
}

impl PodExt for Pod {
    fn annotated(mut self, key: &str, value: &str) -> Self {
        let annotations = self.metadata.annotations.get_or_insert_with(BTreeMap::new);
        annotations.insert(key.to_owned(), value.to_owned());
        self
    }

    fn with_image(mut self, image: &str, command: &[&str]) -> Self {
        for container in self.spec.iter_mut().flat_map(|spec| &mut spec.containers) {
            container.image = Some(image.to_owned());
            container.command = Some(command.iter().map(|word| (*word).to_owned()).collect());
        }
        self
    }
}
