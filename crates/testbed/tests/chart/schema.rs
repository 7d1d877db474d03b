//! The schema refuses what the operator would refuse, and knows what the operator knows.

use std::collections::BTreeSet;

use anyhow::Context;
use groundcrew_core::config;
use groundcrew_testbed::{Helm, repository};
use serde_json::{Value, json};

use crate::support::{chart, default_values, read, render, set, template};

/// Set by the chart itself: they have to agree with its Service, ports and volumes.
const OF_THE_CHART: [&str; 5] =
    ["health.bindAddress", "metrics.bindAddress", "webhook.certDir", "webhook.certificates.source", "webhook.url"];

fn schema() -> anyhow::Result<Value> {
    Ok(serde_json::from_str(&read(&chart().join("values.schema.json"))?)?)
}

/// The keys that the operator knows below `path`, from its own complaint about one it does not know.
fn known_keys(path: &str) -> anyhow::Result<BTreeSet<String>> {
    let mut file = json!({});
    let odd = "§";
    set(&mut file, &if path.is_empty() { odd.to_owned() } else { format!("{path}.{odd}") }, &json!(1));
    let problems = config::load(file, vec![]).err().context("an unknown key was taken")?;
    let hint = problems.0.iter().find_map(|problem| problem.hint.strip_prefix("known keys here: "));
    let hint = hint.with_context(|| format!("{path} takes any key: {problems}"))?;
    Ok(hint.split(", ").map(str::to_owned).collect())
}

fn same_keys(path: &str, schema: &Value, nested: &mut usize) -> anyhow::Result<()> {
    let of_chart = |key: &String| {
        let full = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        OF_THE_CHART.contains(&full.as_str())
    };
    let known: BTreeSet<String> = known_keys(path)?.into_iter().filter(|key| !of_chart(key)).collect();
    let properties = schema["properties"].as_object().with_context(|| format!("{path} has no properties"))?;
    assert_eq!(
        known,
        properties.keys().cloned().collect(),
        "keys of {path:?}: the operator's left, the schema's right"
    );
    assert_eq!(schema["additionalProperties"], json!(false), "{path} takes any key");
    for (key, below) in properties {
        assert!(below["description"].is_string(), "{path}.{key} is not described");
        // A label selector is a value of its own to the operator.
        if below.get("properties").is_some() && key != "namespaceSelector" {
            *nested += 1;
            same_keys(&if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, below, nested)?;
        }
    }
    Ok(())
}

#[test]
fn the_schema_has_every_key_of_the_configuration_and_no_other() -> anyhow::Result<()> {
    let mut nested = 0;
    same_keys("", &schema()?["properties"]["config"], &mut nested)?;
    assert!(nested > 10, "only {nested} sections compared");
    Ok(())
}

#[test]
fn the_charts_defaults_are_those_of_the_operator() -> anyhow::Result<()> {
    let mut given = config::load(default_values()?["config"].clone(), vec![])?;
    let mut own = config::load(Value::Null, vec![])?;
    (given.given, own.given) = (Value::Null, Value::Null);
    assert_eq!(format!("{given:#?}"), format!("{own:#?}"));
    Ok(())
}

#[test]
fn the_documented_configuration_is_the_default() -> anyhow::Result<()> {
    let page = read(&repository().join("docs/operations.md"))?;
    let example = page.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).context("no example")?;
    let mut documented = config::load(serde_saphyr::from_str(example)?, vec![])?;
    let mut own = config::load(Value::Null, vec![])?;
    (documented.given, own.given) = (Value::Null, Value::Null);
    assert_eq!(format!("{documented:#?}"), format!("{own:#?}"));
    Ok(())
}

/// Names that the schema allows are names that the operator takes.
#[test]
fn every_choice_of_the_schema_is_one_of_the_operators() -> anyhow::Result<()> {
    fn walk(path: &str, schema: &Value, tried: &mut usize) -> anyhow::Result<()> {
        for choice in schema["enum"].as_array().into_iter().flatten() {
            let mut file = json!({});
            set(&mut file, path, choice);
            config::load(file, vec![]).with_context(|| format!("{path}: {choice}"))?;
            *tried += 1;
        }
        for (key, below) in schema["properties"].as_object().into_iter().flatten() {
            walk(&if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, below, tried)?;
        }
        Ok(())
    }
    let mut tried = 0;
    walk("", &schema()?["properties"]["config"], &mut tried)?;
    assert!(tried > 10, "only {tried} choices tried");
    Ok(())
}

#[tokio::test]
async fn helm_refuses_a_mistake_and_says_where_it_is() -> anyhow::Result<()> {
    let helm = Helm::ensure()?;
    let mistakes = [
        (json!({"operatr": {}}), "operatr"),
        (json!({"operator": {"replica": 3}}), "replica"),
        (json!({"operator": {"replicas": "three"}}), "/operator/replicas"),
        (json!({"image": {"pullPolicy": "Sometimes"}}), "/image/pullPolicy"),
        (json!({"config": {"warmpu": {}}}), "warmpu"),
        (json!({"config": {"warmup": {"enabled": "yes"}}}), "/config/warmup/enabled"),
        (json!({"config": {"warmup": {"maxRps": 0}}}), "/config/warmup/maxRps"),
        (json!({"config": {"warmup": {"agentTimeout": "30"}}}), "/config/warmup/agentTimeout"),
        (json!({"config": {"spread": {"mode": "watch"}}}), "/config/spread/mode"),
        (json!({"config": {"webhook": {"certDir": "/x"}}}), "certDir"),
        (json!({"config": {"nodeLabels": {"spot": "a==b"}}}), "/config/nodeLabels/spot"),
        (json!({"config": {"nodeStartup": {"phases": ["warming"]}}}), "/config/nodeStartup/phases/0"),
    ];
    for (values, named) in mistakes {
        let complaint =
            template(&helm, &values).await.err().with_context(|| format!("{values} was taken"))?.to_string();
        assert!(complaint.contains(named) && complaint.contains("schema"), "{values}: {complaint}");
    }
    Ok(())
}

/// What the operator reads is what the values say, whatever they are.
#[tokio::test]
async fn the_rendered_file_is_taken_by_the_operator() -> anyhow::Result<()> {
    let helm = Helm::ensure()?;
    for values in [
        json!({}),
        json!({"config": {"warmup": {"maxRps": 7}, "nodeStartup": {"phases": ["preinit", "initializing"]}}}),
        json!({"certificates": {"secretName": "mine"}, "config": {"tracing": {"otlpEndpoint": "http://x:4318"}}}),
        json!({"config": {"controller": {"namespaceSelector": {"matchLabels": {"team": "a"}}}}}),
    ] {
        let objects = render(&helm, &values).await?;
        let map = objects.iter().find(|object| object["kind"] == "ConfigMap").context("no ConfigMap")?;
        let text = map["data"]["config.yaml"].as_str().context("no file")?;
        let read = config::load(serde_saphyr::from_str(text)?, vec![])?;
        let mut wanted = default_values()?["config"].clone();
        merge(&mut wanted, &values["config"]);
        if values["certificates"].is_object() {
            set(&mut wanted, "webhook.certDir", &json!("/certs"));
        }
        let mut wanted = config::load(wanted, vec![])?;
        wanted.given = read.given.clone();
        assert_eq!(format!("{read:#?}"), format!("{wanted:#?}"), "{values}");
    }
    Ok(())
}

fn merge(into: &mut Value, from: &Value) {
    match (into.as_object_mut(), from.as_object()) {
        (Some(map), Some(from)) => {
            for (key, value) in from {
                merge(map.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        _ if !from.is_null() => *into = from.clone(),
        _ => {}
    }
}
