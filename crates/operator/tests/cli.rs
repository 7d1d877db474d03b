//! The binary as a person at a terminal meets it.
#![expect(clippy::unwrap_used, reason = "a test ends where its assumption fails")]

use std::process::{Command, Output};

use groundcrew_core::config;
use serde_json::Value;

fn groundcrew(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_groundcrew"))
        .args(arguments)
        .env_clear()
        .envs(environment.iter().copied())
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_version_names_the_commit_and_needs_no_cluster() {
    let output = groundcrew(&["--version"], &[]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success());
    assert!(text.starts_with(concat!("groundcrew ", env!("CARGO_PKG_VERSION"), " (commit ")), "{text}");
}

#[test]
fn without_a_cluster_there_is_one_clear_sentence() {
    for command in [vec!["run"], vec!["agent", "--node-name", "a"]] {
        let output = groundcrew(&command, &[("HOME", "/nonexistent")]);
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains("no cluster") && said(&output).lines().count() == 1, "{}", said(&output));
    }
}

#[test]
fn a_bad_configuration_lists_every_problem_and_starts_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.yaml");
    std::fs::write(&file, "controller: {resyncPeriod: 1s, workerz: 2}\n").unwrap();
    let output = groundcrew(
        &["run", "--config", file.to_str().unwrap(), "--webhook-port", "0", "--kubeconfig", "/nonexistent"],
        &[("GROUNDCREW_LOGGING__LEVEL", "loud")],
    );
    let text = said(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    for path in ["controller.resyncPeriod", "controller.workerz", "webhook.port", "logging.level", "--webhook-port"] {
        assert!(text.contains(path), "{path} is missing in:\n{text}");
    }
    assert!(text.contains("did you mean workers?"), "{text}");
}

#[test]
fn what_is_not_utf8_in_the_environment_is_a_bad_value_at_most() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let odd = OsStr::from_bytes(b"\xff");
    let run = |name: &OsStr| {
        Command::new(env!("CARGO_BIN_EXE_groundcrew")).arg("manifests").env_clear().env(name, odd).output().unwrap()
    };
    for others in [OsStr::new("LS_COLORS"), odd] {
        assert!(run(others).status.success(), "{}", said(&run(others)));
    }
    let ours = run(OsStr::new("GROUNDCREW_WEBHOOK__PORT"));
    assert_eq!(ours.status.code(), Some(2), "{}", said(&ours));
}

#[test]
fn a_missing_or_broken_file_is_named() {
    let output = groundcrew(&["run", "--config", "/nonexistent.yaml"], &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("/nonexistent.yaml"));
}

#[test]
fn the_agent_asks_for_its_node() {
    let output = groundcrew(&["agent"], &[("HOME", "/nonexistent")]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("--node-name"), "{}", said(&output));
}

#[test]
fn manifests_need_no_cluster_and_follow_the_configuration() {
    let all = groundcrew(&["manifests", "--namespace", "ops", "--image", "example/groundcrew:1"], &[]);
    let text = String::from_utf8_lossy(&all.stdout).into_owned();
    assert!(all.status.success(), "{}", said(&all));
    for part in ["kind: ClusterRole", "kind: MutatingWebhookConfiguration", "example/groundcrew:1", "namespace: ops"] {
        assert!(text.contains(part), "{part} is missing in:\n{text}");
    }
    let features = ["NODESTARTUP", "SIZING", "SPREAD", "TIMESTAMP", "WARMUP"];
    let off = features.map(|feature| format!("GROUNDCREW_{feature}__ENABLED"));
    let off: Vec<(&str, &str)> = off.iter().map(|name| (name.as_str(), "false")).collect();
    let off = groundcrew(&["manifests"], &off);
    let off = String::from_utf8_lossy(&off.stdout).into_owned();
    assert!(!off.contains("kind: MutatingWebhookConfiguration") && !off.contains("kind: DaemonSet"), "{off}");
    let documents: Vec<Value> = serde_saphyr::from_multiple(&off).unwrap();
    let rules = documents.iter().filter_map(|object| object.get("rules")).flat_map(|rules| rules.as_array().unwrap());
    let names = |rule: &Value, key: &str, name: &str| rule[key].as_array().unwrap().iter().any(|one| one == name);
    let watched: Vec<_> =
        rules.filter(|rule| names(rule, "resources", "pods") && names(rule, "verbs", "watch")).collect();
    assert!(watched.is_empty(), "{watched:?}");
}

#[test]
fn manifests_hand_on_what_flags_and_environment_say() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.yaml");
    std::fs::write(&file, "webhook: {port: 9443, service: hook}\nspread: {enabled: false}\n").unwrap();
    let output = groundcrew(
        &["manifests", "--config", file.to_str().unwrap(), "--webhook-port", "8443", "--leader-elect=false"],
        &[("GROUNDCREW_NODE_STARTUP__ENABLED", "true")],
    );
    assert!(output.status.success(), "{}", said(&output));
    let documents: Vec<Value> = serde_saphyr::from_multiple(&String::from_utf8(output.stdout).unwrap()).unwrap();
    let text = documents.iter().find_map(|object| object.pointer("/data/config.yaml")).and_then(Value::as_str);
    let handed_on = config::load(serde_saphyr::from_str(text.unwrap()).unwrap(), vec![]).unwrap();
    assert_eq!((handed_on.webhook.port, handed_on.webhook.service.as_str()), (8443, "hook"));
    assert!(handed_on.node_startup.enabled && !handed_on.spread.enabled);
    assert!(!handed_on.controller.leader_election.enabled);
}
