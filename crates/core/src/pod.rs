//! The part of a pod that decisions look at, borrowed from the bytes it came in.

use std::borrow::{Borrow, Cow};
use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Visitor};

use crate::keys::Lookup;

/// A pod as admission sees it. Fields groundcrew does not use are skipped, not stored.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodView<'a> {
    #[serde(borrow, default)]
    pub metadata: MetaView<'a>,
    #[serde(borrow, default)]
    pub spec: SpecView<'a>,
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MetaView<'a> {
    #[serde(borrow, default)]
    pub name: Option<Text<'a>>,
    #[serde(borrow, default)]
    pub generate_name: Option<Text<'a>>,
    #[serde(borrow, default)]
    pub namespace: Option<Text<'a>>,
    #[serde(borrow, default)]
    pub annotations: Option<TextMap<'a>>,
    #[serde(borrow, default)]
    pub labels: Option<TextMap<'a>>,
    #[serde(borrow, default)]
    pub owner_references: Option<Vec<OwnerView<'a>>>,
}

#[derive(Debug, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OwnerView<'a> {
    #[serde(borrow)]
    pub api_version: Text<'a>,
    #[serde(borrow)]
    pub kind: Text<'a>,
    #[serde(borrow)]
    pub name: Text<'a>,
    #[serde(borrow)]
    pub uid: Text<'a>,
    #[serde(default)]
    pub controller: Option<bool>,
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SpecView<'a> {
    #[serde(borrow, default)]
    pub node_name: Option<Text<'a>>,
    #[serde(borrow, default)]
    pub node_selector: Option<TextMap<'a>>,
    #[serde(borrow, default)]
    pub affinity: Option<AffinityView<'a>>,
    #[serde(borrow, default)]
    pub readiness_gates: Option<Vec<Gate<Text<'a>>>>,
    #[serde(borrow, default)]
    pub containers: Option<Vec<ContainerView<'a>>>,
    #[serde(borrow, default)]
    pub init_containers: Option<Vec<ContainerView<'a>>>,
    /// Resources of the pod as a whole.
    #[serde(borrow, default)]
    pub resources: Option<ResourcesView<'a>>,
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerView<'a> {
    #[serde(borrow, default)]
    pub name: Option<Text<'a>>,
    #[serde(borrow, default)]
    pub restart_policy: Option<Text<'a>>,
    #[serde(borrow, default)]
    pub resources: Option<ResourcesView<'a>>,
    #[serde(borrow, default)]
    pub ports: Option<Vec<ContainerPort<Text<'a>>>>,
    #[serde(borrow, default)]
    pub readiness_probe: Option<Probe<Text<'a>>>,
}

impl<'a> ContainerView<'a> {
    /// The part of it that warm-up looks at.
    #[must_use]
    pub fn entrance(&self) -> Container<Text<'a>> {
        Container {
            name: self.name.clone().unwrap_or(Text(Cow::Borrowed(""))),
            ports: self.ports.clone(),
            readiness_probe: self.readiness_probe.clone(),
            restart_policy: self.restart_policy.clone(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Gate<S> {
    pub condition_type: S,
}

/// A container as far as warm-up has to find its way into it; `S` owns or borrows.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Container<S> {
    pub name: S,
    #[serde(default = "none")]
    pub ports: Option<Vec<ContainerPort<S>>>,
    #[serde(default = "none")]
    pub readiness_probe: Option<Probe<S>>,
    /// `Always` on an init container makes it a sidecar.
    #[serde(default = "none")]
    pub restart_policy: Option<S>,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerPort<S> {
    #[serde(default = "none")]
    pub name: Option<S>,
    pub container_port: i64,
    #[serde(default = "none")]
    pub protocol: Option<S>,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Probe<S> {
    #[serde(default = "none")]
    pub http_get: Option<HttpGet<S>>,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HttpGet<S> {
    #[serde(default = "none")]
    pub path: Option<S>,
    pub port: IntOrName<S>,
    #[serde(default = "none")]
    pub scheme: Option<S>,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(untagged)]
pub enum IntOrName<S> {
    Int(i64),
    Name(S),
}

/// serde's plain `default` would ask the string type to have one.
fn none<T>() -> Option<T> {
    None
}

#[derive(Debug, Default, serde::Deserialize)]
pub struct ResourcesView<'a> {
    #[serde(borrow, default)]
    pub requests: Option<TextMap<'a>>,
    #[serde(borrow, default)]
    pub limits: Option<TextMap<'a>>,
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AffinityView<'a> {
    #[serde(borrow, default)]
    pub node_affinity: Option<NodeAffinityView<'a>>,
}

#[derive(Debug, Default, serde::Deserialize)]
pub struct NodeAffinityView<'a> {
    #[serde(borrow, default, rename = "requiredDuringSchedulingIgnoredDuringExecution")]
    pub required: Option<NodeSelectorView<'a>>,
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeSelectorView<'a> {
    #[serde(borrow, default)]
    pub node_selector_terms: Option<Vec<NodeTermView<'a>>>,
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeTermView<'a> {
    #[serde(borrow, default)]
    pub match_fields: Option<Vec<RequirementView<'a>>>,
}

#[derive(Debug, serde::Deserialize)]
pub struct RequirementView<'a> {
    #[serde(borrow)]
    pub key: Text<'a>,
    #[serde(borrow)]
    pub operator: Text<'a>,
    #[serde(borrow, default)]
    pub values: Option<Vec<Text<'a>>>,
}

/// Which container of a pod, by its place in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub enum Place {
    Container(usize),
    Init(usize),
}

impl Place {
    /// The list's name in the pod's spec, and the place in it.
    #[must_use]
    pub const fn path(self) -> (&'static str, usize) {
        match self {
            Place::Container(index) => ("containers", index),
            Place::Init(index) => ("initContainers", index),
        }
    }
}

pub type TextMap<'a> = BTreeMap<Text<'a>, Text<'a>>;

impl PodView<'_> {
    /// Who controls the pod; the other owners only keep it alive.
    #[must_use]
    pub fn controller(&self) -> Option<&OwnerView<'_>> {
        self.metadata.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
    }

    /// The name, or what the API server will make it start with.
    #[must_use]
    pub fn display_name(&self) -> &str {
        let given = self.metadata.name.as_ref().or(self.metadata.generate_name.as_ref());
        given.map_or("", |name| name.as_str())
    }

    /// The one node the pod can land on: pinned by field before it is scheduled, or already bound.
    #[must_use]
    pub fn node(&self) -> Option<&str> {
        self.spec.pinned().or(self.spec.node_name.as_ref().map(Text::as_str)).filter(|name| !name.is_empty())
    }

    #[must_use]
    pub fn container(&self, place: Place) -> Option<&ContainerView<'_>> {
        match place {
            Place::Container(index) => self.spec.containers.as_ref()?.get(index),
            Place::Init(index) => self.spec.init_containers.as_ref()?.get(index),
        }
    }
}

impl SpecView<'_> {
    /// Terms are alternatives, so each of them has to name the same single node.
    fn pinned(&self) -> Option<&str> {
        let required = self.affinity.as_ref()?.node_affinity.as_ref()?.required.as_ref()?;
        let mut nodes = required.node_selector_terms.as_ref()?.iter().map(NodeTermView::node);
        let first = nodes.next()??;
        nodes.all(|node| node == Some(first)).then_some(first)
    }
}

impl NodeTermView<'_> {
    fn node(&self) -> Option<&str> {
        self.match_fields.iter().flatten().find_map(|field| match field.values.as_deref() {
            Some([only]) if field.key.as_str() == "metadata.name" && field.operator.as_str() == "In" => {
                Some(only.as_str())
            }
            _ => None,
        })
    }
}

/// A string that borrows from the input unless JSON escapes force a copy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Text<'a>(Cow<'a, str>);

impl Text<'_> {
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl AsRef<str> for Text<'_> {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for Text<'_> {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl Lookup for TextMap<'_> {
    fn value(&self, key: &str) -> Option<&str> {
        self.get(key).map(Text::as_str)
    }
}

// serde's own `Cow` borrows only as a direct field, never inside a map.
impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Borrowing;
        impl<'de> Visitor<'de> for Borrowing {
            type Value = Text<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E>(self, v: &'de str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Borrowed(v)))
            }
            fn visit_str<E>(self, v: &str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Owned(v.to_owned())))
            }
        }
        deserializer.deserialize_str(Borrowing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn annotations_borrow_unless_escaped() {
        let json = r#"{"metadata":{"annotations":{"plain":"v","esc\n":"w"}},"spec":{"unknown":[1]}}"#;
        let pod: PodView<'_> = serde_json::from_str(json).unwrap();
        let annotations = pod.metadata.annotations.unwrap();
        assert_eq!(annotations.value("plain"), Some("v"));
        assert_eq!(annotations.value("esc\n"), Some("w"));
        let kinds: Vec<bool> = annotations.keys().map(|k| matches!(k.0, Cow::Borrowed(_))).collect();
        assert_eq!(kinds, [false, true]);
    }

    fn node_of(spec: &str) -> Option<String> {
        let json = format!(r#"{{"spec":{spec}}}"#);
        let pod: PodView<'_> = serde_json::from_str(&json).unwrap();
        pod.node().map(str::to_owned)
    }

    fn pinned(terms: &str) -> String {
        format!(
            r#"{{"nodeName":"bound","affinity":{{"nodeAffinity":{{"requiredDuringSchedulingIgnoredDuringExecution":{{"nodeSelectorTerms":[{terms}]}}}}}}}}"#
        )
    }

    #[test]
    fn a_daemon_sets_pin_names_the_node_before_it_is_bound() {
        let pin = r#"{"matchFields":[{"key":"metadata.name","operator":"In","values":["a"]}]}"#;
        assert_eq!(node_of(&pinned(pin)).as_deref(), Some("a"));
        assert_eq!(node_of(&pinned(&format!("{pin},{pin}"))).as_deref(), Some("a"));
    }

    #[test]
    fn a_pin_that_leaves_a_choice_is_none() {
        let pin = r#"{"matchFields":[{"key":"metadata.name","operator":"In","values":["a"]}]}"#;
        let two = r#"{"matchFields":[{"key":"metadata.name","operator":"In","values":["a","b"]}]}"#;
        let not = r#"{"matchFields":[{"key":"metadata.name","operator":"NotIn","values":["a"]}]}"#;
        let labels = r#"{"matchExpressions":[{"key":"zone","operator":"In","values":["a"]}]}"#;
        let other = pin.replace("\"a\"", "\"b\"");
        for terms in [two, not, labels, &format!("{pin},{labels}"), &format!("{pin},{other}"), ""] {
            assert_eq!(node_of(&pinned(terms)).as_deref(), Some("bound"), "{terms}");
        }
        assert_eq!(node_of("{}"), None);
        assert_eq!(node_of(r#"{"nodeName":""}"#), None);
    }

    #[test]
    fn the_controller_is_the_owner_that_says_so() {
        let json = r#"{"metadata":{"ownerReferences":[
            {"apiVersion":"v1","kind":"ConfigMap","name":"c","uid":"1"},
            {"apiVersion":"apps/v1","kind":"DaemonSet","name":"d","uid":"2","controller":true}]}}"#;
        let pod: PodView<'_> = serde_json::from_str(json).unwrap();
        assert_eq!(pod.controller().map(|owner| owner.name.as_str()), Some("d"));
    }

    #[test]
    fn a_null_map_reads_as_absent() {
        let pod: PodView<'_> = serde_json::from_str(r#"{"metadata":{"annotations":null}}"#).unwrap();
        assert!(pod.metadata.annotations.is_none());
    }
}
