//! Files that are made from the code, and must follow it: `make chart` writes them.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context;
use groundcrew::{cleanup, manifests};
use groundcrew_core::config;
use groundcrew_testbed::objects::documents;
use groundcrew_testbed::repository;
use rstest::rstest;
use serde_json::{Value, json};

use crate::support::{chart, committed, default_values, features, read, set, title};

/// Replaced by the release's namespace when the chart is rendered.
const NAMESPACE: &str = "@namespace@";
/// Replaced by that of the replicas' lease.
const ELECTION: (&str, &str) = ("controller.leaderElection.namespace", "@election@");

/// Who may do what. Workloads are templates, because people want to change them; everything else of an installation is
/// made by the operator itself.
const KINDS: [&str; 7] = [
    "ServiceAccount",
    "ClusterRole",
    "ClusterRoleBinding",
    "Role",
    "RoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
];

type When = BTreeMap<&'static str, Value>;

/// Settings on which rights depend, from the general to the special.
fn switches() -> Vec<When> {
    let enabled = ["nodeStartup.enabled", "sizing.enabled", "spread.enabled", "timestamp.enabled", "warmup.enabled"];
    let mut all = vec![When::new()];
    all.extend(enabled.map(|path| When::from([(path, json!(true))])));
    all.push(When::from([("sizing.enabled", json!(true)), ("sizing.resize", json!(true))]));
    all.push(When::from([("spread.enabled", json!(true)), ("spread.mode", json!("enforce"))]));
    all.extend(enabled.map(|path| When::from([(path, json!(true)), ("crds.manage", json!(true))])));
    all
}

/// The objects of an installation in which these settings are on and all others are off.
fn installation(when: &When) -> anyhow::Result<Vec<Value>> {
    let mut file = features(false);
    for (path, off) in
        [("sizing.resize", json!(false)), ("spread.mode", json!("observe")), ("crds.manage", json!(false))]
    {
        set(&mut file, path, &off);
    }
    for (path, on) in when {
        set(&mut file, path, on);
    }
    set(&mut file, ELECTION.0, &json!(ELECTION.1));
    let config = config::load(file, vec![])?;
    let all = manifests::objects(&config, NAMESPACE, "image");
    Ok(all.into_iter().filter(|object| KINDS.iter().any(|kind| object["kind"] == *kind)).collect())
}

fn without(object: &Value, keys: [&str; 2]) -> Value {
    let mut object = object.clone();
    if let Some(map) = object.as_object_mut() {
        map.remove(keys[0]);
    }
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.remove(keys[1]);
    }
    object
}

/// What `templates/rights.yaml` goes through: an object, when it exists, and when a role holds which rules.
fn rights() -> anyhow::Result<Vec<Value>> {
    let mut entries: Vec<Value> = Vec::new();
    let mut given: Vec<(String, When, Value)> = Vec::new();
    for when in switches() {
        for object in installation(&when)? {
            let name = title(&object);
            let new: Vec<&Value> = object["rules"]
                .as_array()
                .into_iter()
                .flatten()
                .filter(|rule| {
                    let holds = |earlier: &When| earlier.iter().all(|(path, value)| when.get(path) == Some(value));
                    !given.iter().any(|(to, earlier, known)| *to == name && known == *rule && holds(earlier))
                })
                .collect();
            let grant = json!({"when": when, "rules": new});
            match entries.iter().position(|entry| title(&entry["object"]) == name) {
                Some(at) if !new.is_empty() => {
                    let grants = entries[at]["grants"].as_array_mut().context("an object gained rules")?;
                    grants.push(grant);
                }
                Some(_) => {}
                None => {
                    let mut entry = json!({"when": when, "object": without(&object, ["rules", "labels"])});
                    if object.get("rules").is_some() {
                        entry["grants"] = json!([grant]);
                    }
                    entries.push(entry);
                }
            }
            given.extend(new.into_iter().map(|rule| (name.clone(), when.clone(), rule.clone())));
        }
    }
    let mut file = json!({});
    set(&mut file, ELECTION.0, &json!(ELECTION.1));
    for object in cleanup::manifests::objects(&config::load(file, vec![])?, NAMESPACE, "image") {
        if KINDS.iter().any(|kind| object["kind"] == *kind) {
            let mut entry = json!({"when": {}, "cleanup": true, "object": without(&object, ["rules", "labels"])});
            if let Some(rules) = object.get("rules") {
                entry["grants"] = json!([{"when": {}, "rules": rules}]);
            }
            entries.push(entry);
        }
    }
    Ok(entries)
}

#[test]
fn the_charts_rights_are_those_of_the_table_of_features() -> anyhow::Result<()> {
    let path = chart().join("files/rights.yaml");
    let rights = rights()?;
    if std::env::var_os("GROUNDCREW_UPDATE").is_some() {
        let text = serde_saphyr::to_string(&rights)?;
        return Ok(std::fs::write(
            path,
            format!("# Made by `make chart` from crates/operator/src/features.rs.\n{text}"),
        )?);
    }
    let committed: Vec<Value> = documents(&read(&path)?)?;
    assert_eq!(committed, [Value::Array(rights)], "{} is stale, run `make chart`", path.display());
    Ok(())
}

#[test]
fn the_chart_is_of_the_release_of_the_code() -> anyhow::Result<()> {
    let about = documents(&read(&chart().join("Chart.yaml"))?)?;
    for key in ["version", "appVersion"] {
        assert_eq!(about[0][key], env!("CARGO_PKG_VERSION"), "{key} in Chart.yaml");
    }
    let makefile = read(&repository().join("Makefile"))?;
    assert!(makefile.contains(concat!("IMG ?= groundcrew:", env!("CARGO_PKG_VERSION"), "\n")), "IMG in the Makefile");
    let samples = makefile.lines().find_map(|line| line.strip_prefix("SAMPLES ?= ")).context("no SAMPLES")?;
    for sample in samples.split(' ') {
        assert!(repository().join("deploy/samples").join(sample).is_file(), "{sample} of SAMPLES is gone");
    }
    Ok(())
}

/// A directory of the same name, like `fuzz`, would count as made.
#[test]
fn no_target_of_the_makefile_is_taken_for_a_file() -> anyhow::Result<()> {
    let makefile = read(&repository().join("Makefile"))?.replace("\\\n", " ");
    let phony = makefile.lines().find_map(|line| line.strip_prefix(".PHONY: ")).context("no .PHONY")?;
    let phony: BTreeSet<&str> = phony.split_whitespace().collect();
    let targets = makefile.lines().filter(|line| line.contains(" ## "));
    let targets: BTreeSet<&str> = targets.filter_map(|line| line.split(':').next()).collect();
    assert!(targets.len() > 10, "{targets:?}");
    assert_eq!(targets, phony);
    Ok(())
}

#[rstest]
#[case("groundcrew:0.1.0", "groundcrew", "0.1.0")]
#[case("registry.example:5000/ops/groundcrew:1", "registry.example:5000/ops/groundcrew", "1")]
#[case("registry.example:5000/groundcrew", "registry.example:5000/groundcrew", "")]
#[case("groundcrew", "groundcrew", "")]
fn deploy_tells_an_image_s_tag_from_a_port(
    #[case] image: &str,
    #[case] repository_name: &str,
    #[case] tag: &str,
) -> anyhow::Result<()> {
    // Instead of helm, a program that prints its arguments.
    let directory = tempfile::tempdir()?;
    std::os::unix::fs::symlink("/bin/echo", directory.path().join("helm"))?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::iter::once(directory.path().to_owned()).chain(std::env::split_paths(&path));
    let mut make = std::process::Command::new("make");
    make.arg("-sC").arg(repository()).arg("deploy").arg(format!("IMG={image}"));
    let output = make.env("PATH", std::env::join_paths(places)?).output()?;
    let said = String::from_utf8(output.stdout)?;
    let wanted = format!("--set image.repository={repository_name} --set-string image.tag={tag} ");
    assert!(said.replace('\n', " ").contains(&wanted), "{said}");
    Ok(())
}

/// One line per value: its path, its default, what it is.
fn lines(path: &str, schema: &Value, default: Option<&Value>, out: &mut Vec<String>) {
    let description = schema["description"].as_str().unwrap_or_default();
    let properties: BTreeMap<&String, &Value> = schema["properties"].as_object().into_iter().flatten().collect();
    if !properties.is_empty() && default.is_none_or(|value| value.as_object().is_some_and(|map| !map.is_empty())) {
        out.push(format!("| **`{path}`** | | {description} |"));
        for (key, below) in properties {
            lines(&format!("{path}.{key}"), below, default.and_then(|value| value.get(key)), out);
        }
        return;
    }
    let allowed = schema["enum"].as_array().map(|all| {
        let names: Vec<_> = all.iter().filter_map(Value::as_str).map(|name| format!("`{name}`")).collect();
        format!(" One of {}.", names.join(", "))
    });
    let range = schema["minimum"].as_u64().zip(schema["maximum"].as_u64());
    let range = range.map(|(least, most)| format!(" From {least} to {most}."));
    let default = match default {
        None => String::new(),
        Some(Value::String(text)) if text.is_empty() => String::new(),
        Some(Value::String(text)) => format!("`{text}`"),
        Some(value) => format!("`{value}`"),
    };
    out.push(format!(
        "| `{path}` | {default} | {description}{}{} |",
        allowed.unwrap_or_default(),
        range.unwrap_or_default()
    ));
}

#[test]
fn the_values_reference_is_that_of_the_schema() -> anyhow::Result<()> {
    let schema: Value = serde_json::from_str(&read(&chart().join("values.schema.json"))?)?;
    let values = default_values()?;
    let mut out = vec![
        "# Values of the chart".to_owned(),
        String::new(),
        "Made by `make chart` from `deploy/chart/values.schema.json` and `values.yaml`. `config` is the configuration file"
            .to_owned(),
        "of [Operating groundcrew](operations.md), key by key; durations are written like `300ms`, `30s`, `1m30s`."
            .to_owned(),
        String::new(),
        "| value | default | what it is |".to_owned(),
        "|---|---|---|".to_owned(),
    ];
    let sections: BTreeMap<&String, &Value> = schema["properties"].as_object().into_iter().flatten().collect();
    for (name, section) in sections.into_iter().filter(|(name, _)| *name != "global") {
        lines(name, section, values.get(name), &mut out);
    }
    committed(&repository().join("docs/values.md"), &format!("{}\n", out.join("\n")))
}
