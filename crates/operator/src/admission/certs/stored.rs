//! The Secret's layout: what is in it, what we make of it, and what a verdict turns it into.

use std::collections::BTreeMap;

use groundcrew_core::certificates::{Issuer, Leaf, Rules, Seen, Validity, Verdict};
use jiff::Timestamp;
use k8s_openapi::ByteString;
use serde_json::{Value, json};

use super::mint::{self, Minted};
use crate::admission::tls::{self, Pair};

#[cfg(test)]
mod tests;

const LEAF: (&str, &str) = ("tls.crt", "tls.key");
const ACTIVE: (&str, &str) = ("ca-active.crt", "ca-active.key");
const NEXT: (&str, &str) = ("ca-next.crt", "ca-next.key");
/// All CAs to trust, under the name other tools look for.
const BUNDLE: &str = "ca.crt";
/// `ca-retired-<Unix seconds until which it stays trusted>.crt`.
const RETIRED: (&str, &str) = ("ca-retired-", ".crt");

pub(super) type Data = BTreeMap<String, ByteString>;

/// The Secret's content as text, not yet judged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Contents {
    active: Option<Minted>,
    next: Option<Minted>,
    /// By the second until which each stays trusted.
    retired: BTreeMap<i64, String>,
    leaf: Option<Minted>,
    bundle: String,
}

impl Contents {
    pub(super) fn from_data(data: &Data) -> Self {
        let retired = data.iter().filter_map(|(key, value)| {
            let until = key.strip_prefix(RETIRED.0)?.strip_suffix(RETIRED.1)?.parse().ok()?;
            let cert = text(value)?;
            // Garbage in the bundle would make the API server refuse the whole webhook configuration.
            readable(&cert).then_some((until, cert))
        });
        Self {
            active: minted(data, ACTIVE),
            // Half a next CA is none: it was never used, so another can take its place.
            next: minted(data, NEXT).filter(|next| pair(next).is_some()),
            retired: retired.collect(),
            leaf: minted(data, LEAF),
            bundle: data.get(BUNDLE).and_then(text).unwrap_or_default(),
        }
    }

    pub(super) fn to_data(&self) -> Data {
        let mut data = Data::new();
        let pairs = [(ACTIVE, &self.active), (NEXT, &self.next), (LEAF, &self.leaf)];
        for ((cert_key, key_key), pair) in pairs {
            if let Some(pair) = pair {
                data.insert(cert_key.to_owned(), bytes(&pair.cert));
                data.insert(key_key.to_owned(), bytes(&pair.key));
            }
        }
        for (until, cert) in &self.retired {
            data.insert(format!("{}{until}{}", RETIRED.0, RETIRED.1), bytes(cert));
        }
        data.insert(BUNDLE.to_owned(), bytes(&self.bundle));
        data
    }

    /// A merge patch from what is there now; fails on any change since `resource_version`.
    pub(super) fn patch(&self, now: &Data, resource_version: &str) -> Value {
        let wanted = self.to_data();
        let mut data = serde_json::Map::new();
        for (key, value) in &wanted {
            if now.get(key) != Some(value) {
                data.insert(key.clone(), json!(value));
            }
        }
        for key in now.keys().filter(|key| ours(key) && !wanted.contains_key(*key)) {
            data.insert(key.clone(), Value::Null);
        }
        json!({ "metadata": { "resourceVersion": resource_version }, "data": data })
    }

    pub(super) fn bundle(&self) -> &str {
        &self.bundle
    }

    pub(super) fn leaf(&self) -> Option<&Minted> {
        self.leaf.as_ref()
    }

    pub(super) fn has_next(&self) -> bool {
        self.next.is_some()
    }

    fn wanted_bundle(&self) -> String {
        let cas = self.active.iter().chain(&self.next).map(|ca| &ca.cert).chain(self.retired.values());
        cas.map(|pem| format!("{}\n", pem.trim_end())).collect()
    }

    /// The contents after a verdict was carried out.
    pub(super) fn after(
        &self,
        verdict: Verdict,
        rules: &Rules,
        names: &[String],
        now: Timestamp,
    ) -> Result<Self, rcgen::Error> {
        let mut to = self.clone();
        match verdict {
            Verdict::Keep { .. } => return Ok(to),
            Verdict::RewriteBundle => {}
            Verdict::DropRetired => to.drop_retired(now),
            Verdict::PublishNextCa(_) => to.next = Some(mint::ca(rules.ca_validity(now))?),
            Verdict::RenewLeaf(_) => to.leaf = to.new_leaf(rules, names, now)?,
            Verdict::PromoteNextCa(_) | Verdict::MintAll(_) => {
                to.retire_active(rules, now);
                to.drop_retired(now);
                let next = to.next.take().filter(|_| matches!(verdict, Verdict::PromoteNextCa(_)));
                to.active = Some(next.map_or_else(|| mint::ca(rules.ca_validity(now)), Ok)?);
                to.leaf = to.new_leaf(rules, names, now)?;
            }
        }
        to.bundle = to.wanted_bundle();
        Ok(to)
    }

    fn new_leaf(&self, rules: &Rules, names: &[String], now: Timestamp) -> Result<Option<Minted>, rcgen::Error> {
        let Some(active) = &self.active else { return Ok(None) };
        let ca = validity(&active.cert).unwrap_or_else(|| rules.ca_validity(now));
        mint::leaf(active, names, rules.leaf_validity(now, ca)).map(Some)
    }

    fn drop_retired(&mut self, now: Timestamp) {
        self.retired.retain(|until, _| *until > now.as_second());
    }

    /// The active CA's certificate stays trusted even when its key is lost, as long as a leaf of it may be served.
    fn retire_active(&mut self, rules: &Rules, now: Timestamp) {
        let Some(active) = self.active.take() else { return };
        let Some(ca) = validity(&active.cert).filter(|ca| !ca.expired(now)) else { return };
        let leaf = self.leaf.as_ref().and_then(|leaf| validity(&leaf.cert));
        let mut until = rules.retire_at(now, ca, leaf).as_second() + 1;
        while self.retired.contains_key(&until) {
            until += 1;
        }
        self.retired.insert(until, active.cert);
    }
}

/// What the contents amount to: parsed, keys checked, the leaf's issuer found.
#[derive(Debug)]
pub(super) struct View {
    active: Option<Validity>,
    next: Option<Validity>,
    retired: Vec<Timestamp>,
    issuer: Issuer,
    bundle_intact: bool,
    pub(super) leaf: Option<Pair>,
}

impl View {
    pub(super) fn of(contents: &Contents) -> Self {
        let [active, next, leaf] =
            [&contents.active, &contents.next, &contents.leaf].map(|minted| minted.as_ref().and_then(pair));
        let signed_by = |ca: &Option<Minted>| {
            let roots = ca.as_ref().and_then(|ca| tls::certificates(ca.cert.as_bytes()).ok()).unwrap_or_default();
            leaf.as_ref().is_some_and(|leaf| leaf.trusted_by(&roots))
        };
        let issuer = if signed_by(&contents.active) {
            Issuer::Active
        } else if signed_by(&contents.next) {
            Issuer::Next
        } else {
            Issuer::Other
        };
        let dates = |pair: &Option<Pair>| pair.as_ref().map(|pair| pair.facts().validity);
        Self {
            active: dates(&active),
            next: dates(&next),
            retired: contents.retired.keys().filter_map(|until| Timestamp::from_second(*until).ok()).collect(),
            issuer,
            bundle_intact: contents.bundle == contents.wanted_bundle(),
            leaf,
        }
    }

    /// Whether the bundle may be published: complete, and good for the leaf that is served with it.
    pub(super) fn trustworthy(&self) -> bool {
        self.bundle_intact && self.active.is_some()
    }

    /// The facts the decision looks at.
    pub(super) fn seen<'a>(&'a self, names: &'a [String], published_for: Option<std::time::Duration>) -> Seen<'a> {
        let leaf = self.leaf.as_ref().map(|leaf| Leaf {
            validity: leaf.facts().validity,
            issuer: self.issuer,
            names: &leaf.facts().names,
        });
        Seen {
            active: self.active,
            next: self.next,
            retired: &self.retired,
            leaf,
            names,
            bundle_intact: self.bundle_intact,
            published_for,
        }
    }
}

/// Keys that this module writes; anything else in the Secret belongs to someone else.
fn ours(key: &str) -> bool {
    let fixed = [LEAF.0, LEAF.1, ACTIVE.0, ACTIVE.1, NEXT.0, NEXT.1, BUNDLE];
    fixed.contains(&key) || (key.starts_with(RETIRED.0) && key.ends_with(RETIRED.1))
}

fn minted(data: &Data, (cert, key): (&str, &str)) -> Option<Minted> {
    Some(Minted { cert: data.get(cert).and_then(text)?, key: data.get(key).and_then(text).unwrap_or_default() })
}

fn pair(minted: &Minted) -> Option<Pair> {
    Pair::from_pem(minted.cert.as_bytes(), minted.key.as_bytes()).ok()
}

fn text(value: &ByteString) -> Option<String> {
    String::from_utf8(value.0.clone()).ok()
}

fn bytes(text: &str) -> ByteString {
    ByteString(text.as_bytes().to_vec())
}

fn readable(cert: &str) -> bool {
    validity(cert).is_some()
}

fn validity(cert: &str) -> Option<Validity> {
    let certificates = tls::certificates(cert.as_bytes()).ok()?;
    Some(tls::facts(certificates.first()?).ok()?.validity)
}
