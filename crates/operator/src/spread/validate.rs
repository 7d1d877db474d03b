//! A rule that cannot be read is answered with a warning where it is written: later only an event tells.

use groundcrew_core::feature::Feature;
use groundcrew_core::keys::SPREAD_ENABLED;
use groundcrew_core::pod::MetaView;
use groundcrew_core::spread::rule;
use serde::Deserialize;

use crate::admission::registration::{Entry, Namespaces};
use crate::admission::validate::{Judged, Refusal, Validator};

/// Workloads that name the opt-in key, whatever its value.
pub fn entry(namespaces: Namespaces) -> Entry {
    let names = |map: &str| format!("has(object.metadata.{map}) && '{SPREAD_ENABLED}' in object.metadata.{map}");
    let condition = format!("({}) || ({})", names("annotations"), names("labels"));
    Entry::workload_written(Feature::Spread, condition, namespaces)
}

/// Reads the rule as the controller will.
#[derive(Debug)]
pub struct RuleReader;

#[derive(Deserialize)]
struct Workload<'a> {
    #[serde(borrow)]
    metadata: MetaView<'a>,
}

impl Validator for RuleReader {
    fn feature(&self) -> Feature {
        Feature::Spread
    }

    fn judges(&self) -> Judged<'static> {
        Judged::WORKLOADS
    }

    fn validate(&self, object: &str) -> Result<(), Refusal> {
        let Workload { metadata } = serde_json::from_str(object).map_err(|e| Refusal::Unreadable(e.to_string()))?;
        if !rule::enabled(&metadata.annotations, &metadata.labels) {
            return Ok(());
        }
        let read = rule::read(&metadata.annotations);
        read.map(drop).map_err(|invalid| Refusal::Doubtful(format!("not split between spot and on-demand: {invalid}")))
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    #[rstest]
    #[case::right(json!({"spotalis.io/enabled": "true", "spotalis.io/spot-percentage": "70%"}), None)]
    #[case::wrong(json!({"spotalis.io/enabled": "true", "spotalis.io/spot-percentage": "150"}), Some("\"150\""))]
    #[case::half(json!({"spotalis.io/enabled": "true", "spotalis.io/min-on-demand": "1",
        "spotalis.io/disruption-duration": "1h"}), Some("without spotalis.io/disruption-schedule"))]
    #[case::not_asked(json!({"spotalis.io/enabled": "false", "spotalis.io/spot-percentage": "150"}), None)]
    fn a_rule_that_cannot_be_read_is_named(#[case] annotations: serde_json::Value, #[case] why: Option<&str>) {
        let object = json!({"metadata": {"name": "web", "annotations": annotations}, "spec": {}}).to_string();
        match (RuleReader.validate(&object), why) {
            (Ok(()), None) => {}
            (Err(Refusal::Doubtful(text)), Some(why)) => assert!(text.contains(why), "{text}"),
            other => panic!("{other:?}"),
        }
    }
}
