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
    pub node_selector: Option<TextMap<'a>>,
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

    #[test]
    fn a_null_map_reads_as_absent() {
        let pod: PodView<'_> = serde_json::from_str(r#"{"metadata":{"annotations":null}}"#).unwrap();
        assert!(pod.metadata.annotations.is_none());
    }
}
