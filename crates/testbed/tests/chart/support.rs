//! The chart's files, what helm renders from them, and objects in comparable form.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::Context;
use groundcrew_testbed::objects::documents;
use groundcrew_testbed::{Helm, repository};
use serde_json::{Value, json};

pub const HOME: &str = "groundcrew-system";
pub const RELEASE: &str = "groundcrew";

pub fn chart() -> PathBuf {
    repository().join("deploy/chart")
}

pub fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// The values of values.yaml.
pub fn default_values() -> anyhow::Result<Value> {
    documents(&read(&chart().join("values.yaml"))?)?.into_iter().next().context("values.yaml is empty")
}

/// Compares a committed file with what it should be; `make chart` sets the variable that writes it instead.
pub fn committed(path: &Path, wanted: &str) -> anyhow::Result<()> {
    if std::env::var_os("GROUNDCREW_UPDATE").is_some() {
        return Ok(std::fs::write(path, wanted)?);
    }
    let found = std::fs::read_to_string(path).unwrap_or_default();
    let first = found.lines().zip(wanted.lines()).enumerate().find(|(_, (found, wanted))| found != wanted);
    let shown = first.map(|(at, (found, wanted))| format!("line {}:\n- {found}\n+ {wanted}", at + 1));
    let shown = shown.unwrap_or_else(|| "one is longer than the other".to_owned());
    anyhow::ensure!(found == wanted, "{} is stale, run `make chart`; {shown}", path.display());
    Ok(())
}

/// What `helm template` prints with these values on top of the defaults.
pub async fn template(helm: &Helm, values: &Value) -> anyhow::Result<String> {
    let file = tempfile::Builder::new().suffix(".yaml").tempfile()?;
    std::fs::write(file.path(), serde_json::to_vec(values)?)?;
    let chart = chart();
    let arguments: [&Path; 7] = [
        "template".as_ref(),
        RELEASE.as_ref(),
        &chart,
        "--namespace".as_ref(),
        HOME.as_ref(),
        "--values".as_ref(),
        file.path(),
    ];
    helm.run(arguments).await
}

pub async fn render(helm: &Helm, values: &Value) -> anyhow::Result<Vec<Value>> {
    documents(&template(helm, values).await?)
}

/// Every feature on or off.
pub fn features(on: bool) -> Value {
    let names = ["nodeStartup", "sizing", "spread", "timestamp", "warmup"];
    Value::Object(names.map(|name| (name.to_owned(), json!({"enabled": on}))).into_iter().collect())
}

/// The value at a dotted path is set, and whatever leads there made.
pub fn set(values: &mut Value, path: &str, value: &Value) {
    let mut at = values;
    for key in path.split('.') {
        if !at.is_object() {
            *at = json!({});
        }
        at = &mut at[key];
    }
    *at = value.clone();
}

/// `Kind/name`.
pub fn title(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    format!("{}/{}", text(&object["kind"]), text(&object["metadata"]["name"]))
}

pub fn by_title(objects: Vec<Value>) -> BTreeMap<String, Value> {
    objects.into_iter().map(|object| (title(&object), object)).collect()
}

/// Rules as single permissions: however they are grouped, the same rights give the same set.
pub fn permissions(rules: &Value) -> BTreeSet<[String; 4]> {
    let texts = |rule: &Value, key: &str| -> Vec<String> {
        let all = rule[key].as_array().into_iter().flatten();
        all.filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let mut all = BTreeSet::new();
    for rule in rules.as_array().into_iter().flatten() {
        let mut names = texts(rule, "resourceNames");
        if names.is_empty() {
            names.push("any name".to_owned());
        }
        for group in texts(rule, "apiGroups") {
            for resource in texts(rule, "resources") {
                for verb in texts(rule, "verbs") {
                    let one = |name: &String| [group.clone(), resource.clone(), verb.clone(), name.clone()];
                    all.extend(names.iter().map(one));
                }
            }
        }
    }
    all
}
