//! Every annotation, label and taint users know, with one typed reader each.
//!
//! These are a contract with clusters that exist: a key is never renamed, only added.

use std::collections::BTreeMap;

/// Asks for a timestamp; any value counts, even an empty one.
pub const ADDTIME: &str = "addtime";
/// The time groundcrew wrote, or the user's own, which is never touched.
pub const TIMESTAMP: &str = "timestamp";

/// Names the template that sizes a DaemonSet's pods.
pub const RESOURCE_TEMPLATE: &str = "flexdaemonsets.xai/resource-template";

/// The template a DaemonSet or its pod asks for; an empty value means none.
pub fn resource_template(annotations: &impl Lookup) -> Option<&str> {
    annotations.value(RESOURCE_TEMPLATE).filter(|name| !name.is_empty())
}

/// A map of annotations or labels, whoever owns the strings.
pub trait Lookup {
    fn value(&self, key: &str) -> Option<&str>;

    fn has(&self, key: &str) -> bool {
        self.value(key).is_some()
    }
}

impl Lookup for BTreeMap<String, String> {
    fn value(&self, key: &str) -> Option<&str> {
        self.get(key).map(String::as_str)
    }
}

impl<L: Lookup> Lookup for &L {
    fn value(&self, key: &str) -> Option<&str> {
        (*self).value(key)
    }
}

impl<L: Lookup> Lookup for Option<L> {
    fn value(&self, key: &str) -> Option<&str> {
        self.as_ref()?.value(key)
    }
}
