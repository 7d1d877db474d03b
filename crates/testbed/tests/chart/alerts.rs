//! Alerts and dashboards ask for metrics that exist.

use std::collections::BTreeSet;

use anyhow::Context;
use groundcrew_testbed::{Cluster, Groundcrew, Helm, Layer, repository};
use serde_json::{Value, json};

use crate::support::{read, render};

/// Words that name a metric of ours.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let ours = |word: &&str| ["groundcrew_", "kube_booster_", "spotalis_"].iter().any(|start| word.starts_with(start));
    words.filter(ours).map(str::to_owned).collect()
}

/// Names that the code registers, without the suffix a kind of metric adds; a family is not shown before it has counted.
fn registered() -> anyhow::Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    let mut directories = vec![repository().join("crates/operator/src")];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory)? {
            let path = entry?.path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = read(&path)?;
                let prefixes: Vec<_> = literals(&text, "sub_registry_with_prefix(").collect();
                for name in literals(&text, ".register(") {
                    names.extend(prefixes.iter().map(|prefix| format!("{prefix}_{name}")));
                    names.insert(name.to_owned());
                }
            }
        }
    }
    Ok(names)
}

/// First arguments that are plain texts.
fn literals<'t>(text: &'t str, call: &'t str) -> impl Iterator<Item = &'t str> {
    let after = text.split(call).skip(1);
    after.filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next())
}

/// Sample names of everything that a process shows.
fn declared(page: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for line in page.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let Some((name, kind)) = line.split_once(' ') else { continue };
        match kind {
            "counter" => drop(names.insert(format!("{name}_total"))),
            "histogram" => names.extend(["bucket", "sum", "count"].map(|part| format!("{name}_{part}"))),
            _ => drop(names.insert(name.to_owned())),
        }
    }
    names
}

fn expressions(value: &Value, out: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            out.extend(map.get("expr").and_then(Value::as_str).map(str::to_owned));
            map.values().for_each(|below| expressions(below, out));
        }
        Value::Array(items) => items.iter().for_each(|below| expressions(below, out)),
        _ => {}
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_alert_and_panel_asks_for_a_metric_that_is_served() -> anyhow::Result<()> {
    let values = json!({"monitoring": {"prometheusRule": {"enabled": true}, "dashboards": {"enabled": true}}});
    let objects = render(&Helm::ensure()?, &values).await?;
    let rule = objects.iter().find(|object| object["kind"] == "PrometheusRule").context("no alerts")?;
    let dashboard =
        objects.iter().find_map(|object| object["data"]["groundcrew.json"].as_str()).context("no dashboard")?;
    let mut asked = Vec::new();
    expressions(rule, &mut asked);
    expressions(&serde_json::from_str(dashboard)?, &mut asked);
    assert!(asked.len() > 10, "{asked:?}");

    let cluster = Cluster::start(Layer::Api).await?;
    let groundcrew = Groundcrew::builder(&cluster).config_yaml("nodeStartup: {enabled: true}\n").start().await?;
    let served = declared(&groundcrew.metrics().await?);
    let agent = Groundcrew::builder(&cluster).name("agent").agent("a").start().await?;
    let shown = declared(&agent.metrics().await?);
    assert!(!shown.contains("groundcrew_leader"), "an agent would hide that no replica leads: {shown:?}");
    let registered = registered()?;
    let base = |name: &str| {
        let suffixes = ["_total", "_bucket", "_sum", "_count"];
        suffixes.iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name).to_owned()
    };
    // Where a process shows the metric, its whole name must fit.
    let shown: BTreeSet<String> = served.iter().map(|name| base(name)).collect();
    let known =
        |name: &&String| served.contains(*name) || registered.contains(&base(name)) && !shown.contains(&base(name));
    for expression in asked {
        let metrics = metrics_in(&expression);
        assert!(!metrics.is_empty(), "{expression}");
        let missing: Vec<_> = metrics.iter().filter(|name| !known(name)).collect();
        assert!(missing.is_empty(), "{expression}: {missing:?} not in {served:?} nor {registered:?}");
    }
    Ok(())
}

#[tokio::test]
async fn every_alert_has_its_page_in_the_runbook() -> anyhow::Result<()> {
    let values = json!({"monitoring": {"prometheusRule": {"enabled": true}}});
    let objects = render(&Helm::ensure()?, &values).await?;
    let rule = objects.iter().find(|object| object["kind"] == "PrometheusRule").context("no alerts")?;
    let runbook = read(&repository().join("docs/runbook.md"))?;
    for alert in rule["spec"]["groups"][0]["rules"].as_array().context("no rules")? {
        let name = alert["alert"].as_str().context("no name")?;
        assert!(runbook.contains(&format!("\n## {name}\n")), "{name} is not in docs/runbook.md");
    }
    Ok(())
}
