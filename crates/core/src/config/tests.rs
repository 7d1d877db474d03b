use rstest::rstest;
use serde_json::json;

use super::*;

fn env(name: &str, text: &str) -> Override {
    Override::from_env(name, text).unwrap()
}

fn problems(file: Value, overrides: Vec<Override>) -> Vec<(String, String, String)> {
    let problems = load(file, overrides).unwrap_err();
    problems.0.into_iter().map(|p| (p.path, p.message, p.hint)).collect()
}

#[test]
fn nothing_given_means_the_documented_defaults() {
    let config = load(Value::Null, vec![]).unwrap();
    assert_eq!(config.controller.resync_period, Duration::from_secs(30));
    assert_eq!(config.controller.workers, 5);
    assert!(config.controller.leader_election.enabled);
    assert_eq!(config.webhook.port, 9443);
    assert_eq!(config.webhook.cert_dir, PathBuf::from("/tmp/k8s-webhook-server/serving-certs"));
    assert_eq!(config.webhook.certificates.source, CertificateSource::Managed);
    assert_eq!(config.webhook.exempt_namespaces, ["kube-system", "kube-public", "kube-node-lease"]);
    assert_eq!(config.node_labels.spot, ("karpenter.sh/capacity-type".to_owned(), "spot".to_owned()));
    assert_eq!(config.logging.level, LogLevel::Info);
    assert_eq!(config.logging.format, LogFormat::Json);
    assert_eq!(config.metrics.map(|m| m.port()), Some(8080));
    assert_eq!(config.health.port(), 8081);
    assert!(config.timestamp.enabled);
    assert!(config.sizing.enabled && config.sizing.resize);
    assert_eq!((config.sizing.resizes_per_second, config.sizing.warn_share), (20, 50));
    assert!(config.warmup.enabled);
    assert_eq!((config.warmup.max_concurrent, config.warmup.max_rps), (10, 100));
    assert_eq!(config.warmup.agent_timeout, Duration::from_secs(30));
}

#[test]
fn environment_wins_over_file_and_flag_over_both() {
    let file = json!({"webhook": {"port": 1}, "controller": {"workers": 2}, "health": {"port": 3}});
    let overrides = vec![
        env("GROUNDCREW_WEBHOOK__PORT", "10"),
        env("GROUNDCREW_CONTROLLER__WORKERS", "20"),
        Override::from_flag("webhook.port", "100", "--webhook-port"),
    ];
    let config = load(file, overrides).unwrap();
    assert_eq!(config.webhook.port, 100);
    assert_eq!(config.controller.workers, 20);
    assert_eq!(config.health.port(), 3);
}

#[test]
fn environment_spells_camel_case_with_or_without_underscores() {
    let overrides = vec![
        env("GROUNDCREW_CONTROLLER__RESYNC_PERIOD", "45s"),
        env("GROUNDCREW_CONTROLLER__LEADERELECTION__ENABLED", "false"),
        env("GROUNDCREW_WEBHOOK__EXEMPTNAMESPACES", "a, b"),
    ];
    let config = load(Value::Null, overrides).unwrap();
    assert_eq!(config.controller.resync_period, Duration::from_secs(45));
    assert!(!config.controller.leader_election.enabled);
    assert_eq!(config.webhook.exempt_namespaces, ["a", "b"]);
}

#[test]
fn variables_of_a_service_named_groundcrew_are_not_settings() {
    assert!(Override::from_env("GROUNDCREW_SERVICE_HOST", "10.0.0.1").is_none());
    assert!(Override::from_env("GROUNDCREW_PORT_443_TCP_ADDR", "10.0.0.1").is_none());
}

#[test]
fn every_problem_is_listed_with_path_origin_and_hint() {
    let file = json!({
        "controler": {},
        "controller": {"resyncPeriod": "3s", "worker": 5},
        "webhook": {"port": 70000},
        "logging": {"level": "loud"},
    });
    let found = problems(file, vec![env("GROUNDCREW_METRICS__PORT", "many"), env("GROUNDCREW_METRICS__PROT", "1")]);
    let shown: Vec<String> = found.iter().map(|(p, m, h)| format!("{p}: {m} [{h}]")).collect();
    assert_eq!(
        shown,
        [
            "controller.resyncPeriod: must be at least 5s, got 3s (from the config file) []",
            "controller.worker: unknown key (from the config file) [did you mean workers?]",
            "webhook.port: expected a whole number from 1 to 65535, got 70000 (from the config file) []",
            "logging.level: expected one of trace, debug, info, warn, error, got \"loud\" (from the config file) []",
            "metrics.port: expected a whole number from 1 to 65535, got \"many\" (from GROUNDCREW_METRICS__PORT) []",
            "metrics.prot: unknown key (from GROUNDCREW_METRICS__PROT) [did you mean port?]",
            "controler: unknown key (from the config file) [did you mean controller?]",
        ]
    );
}

#[rstest]
#[case(json!({"webhook": 7}), "webhook")]
#[case(json!([1]), "the file")]
#[case(json!({"controller": {"resyncPeriod": 30}}), "controller.resyncPeriod")]
#[case(json!({"nodeLabels": {"spot": "spot"}}), "nodeLabels.spot")]
#[case(json!({"nodeLabels": {"spot": "a==b"}}), "nodeLabels.spot")]
#[case(json!({"nodeLabels": {"spot": "a b=c"}}), "nodeLabels.spot")]
#[case(json!({"nodeLabels": {"onDemand": "a= b"}}), "nodeLabels.onDemand")]
#[case(json!({"nodeLabels": {"onDemand": "-a/b=c"}}), "nodeLabels.onDemand")]
#[case(json!({"webhook": {"url": "http://a:1"}}), "webhook.url")]
#[case(json!({"webhook": {"url": "https://a:1/path"}}), "webhook.url")]
#[case(json!({"webhook": {"url": "https://a:99999"}}), "webhook.url")]
#[case(json!({"webhook": {"url": "https://user@a:1"}}), "webhook.url")]
#[case(json!({"webhook": {"url": "https://a:1?q"}}), "webhook.url")]
#[case(json!({"webhook": {"url": "https://::1:1"}}), "webhook.url")]
#[case(json!({"webhook": {"url": "https://"}}), "webhook.url")]
#[case(json!({"webhook": {"exemptNamespaces": ["Kube_System"]}}), "webhook.exemptNamespaces")]
#[case(json!({"webhook": {"service": "a.b"}}), "webhook.service")]
#[case(json!({"controller": {"leaderElection": {"namespace": "A"}}}), "controller.leaderElection.namespace")]
#[case(json!({"tracing": {"otlpEndpoint": "collector:4318"}}), "tracing.otlpEndpoint")]
#[case(json!({"tracing": {"otlpEndpoint": "http://a b"}}), "tracing.otlpEndpoint")]
#[case(json!({"webhook": {"certificates": {"leafLifetime": "48h", "caLifetime": "24h"}}}), "webhook.certificates.leafLifetime")]
#[case(json!({"health": {"bindAddress": "0"}}), "health.bindAddress")]
#[case(json!({"sizing": {"warnShare": 101}}), "sizing.warnShare")]
#[case(json!({"sizing": {"resizesPerSecond": 0}}), "sizing.resizesPerSecond")]
#[case(json!({"controller": {"namespaceSelector": {"matchLabel": {}}}}), "controller.namespaceSelector")]
#[case(json!({"controller": {"namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}}), "controller.namespaceSelector")]
fn a_bad_value_is_named_by_its_path(#[case] file: Value, #[case] path: &str) {
    assert_eq!(problems(file, vec![]).iter().map(|p| p.0.as_str()).collect::<Vec<_>>(), [path]);
}

#[rstest]
#[case("https://hooks.example:8443", "hooks.example")]
#[case("https://Hooks.Example", "hooks.example")]
#[case("https://hooks.example.:8443", "hooks.example")]
#[case("https://10.0.0.1:1", "10.0.0.1")]
#[case("https://[FD00::1]:8443", "fd00::1")]
fn a_webhook_url_tells_the_name_its_certificate_must_have(#[case] url: &str, #[case] host: &str) {
    let read = load(json!({"webhook": {"url": url}}), vec![]).unwrap().webhook.url;
    assert_eq!(read, Some(BaseUrl { base: url.to_owned(), host: host.to_owned() }));
}

#[test]
fn an_empty_text_leaves_a_setting_as_it_was() {
    let file = json!({"controller": {"leaderElection": {"namespace": ""}}, "webhook": {"certDir": "", "url": ""}});
    let config = load(file, vec![env("GROUNDCREW_LOGGING__LEVEL", "")]).unwrap();
    assert_eq!((config.controller.leader_election.namespace, config.webhook.url), (None, None));
    assert_eq!(config.webhook.certificates.source, CertificateSource::Managed);
}

#[test]
fn what_is_handed_on_says_the_same_without_environment_and_flags() {
    let file = json!({"webhook": {"port": 1, "service": "kept"}, "spread": null});
    let overrides = vec![
        env("GROUNDCREW_WEBHOOK__PORT", "2"),
        Override::from_flag("webhook.port", "3", "--webhook-port"),
        env("GROUNDCREW_NODE_STARTUP__ENABLED", "true"),
        env("GROUNDCREW_CONTROLLER__LEADER_ELECTION__ENABLED", "false"),
        env("GROUNDCREW_SPREAD__MODE", "observe"),
        env("GROUNDCREW_LOGGING__LEVEL", ""),
    ];
    let merged = load(file, overrides).unwrap();
    assert_eq!(merged.webhook.port, 3);
    let mut again = load(merged.given.clone(), vec![]).unwrap();
    again.given = merged.given.clone();
    assert_eq!(format!("{again:?}"), format!("{merged:?}"));
    assert_eq!(load(Value::Null, vec![]).unwrap().given, Value::Null);
}

#[test]
fn naming_a_certificate_directory_means_using_it() {
    let config = load(json!({"webhook": {"certDir": "/certs"}}), vec![]).unwrap();
    assert_eq!(config.webhook.certificates.source, CertificateSource::Files);
    let kept = json!({"webhook": {"certDir": "/certs", "certificates": {"source": "managed"}}});
    assert_eq!(load(kept, vec![]).unwrap().webhook.certificates.source, CertificateSource::Managed);
}

#[test]
fn metrics_can_be_bound_or_turned_off() {
    let bound =
        |text| load(Value::Null, vec![Override::from_flag("metrics.bindAddress", text, "--metrics-bind-address")]);
    assert_eq!(bound("127.0.0.1:9").unwrap().metrics, Some("127.0.0.1:9".parse().unwrap()));
    assert_eq!(bound(":9").unwrap().metrics, Some("[::]:9".parse().unwrap()));
    assert_eq!(bound("0").unwrap().metrics, None);
    assert!(bound("nine").is_err());
    assert_eq!(load(json!({"metrics": {"enabled": false}}), vec![]).unwrap().metrics, None);
}

#[test]
fn a_namespace_selector_takes_labels_and_expressions() {
    let file = json!({"controller": {"namespaceSelector": {
        "matchLabels": {"team": "a"},
        "matchExpressions": [{"key": "env", "operator": "NotIn", "values": ["dev"]}],
    }}});
    assert!(load(file, vec![]).unwrap().controller.namespace_selector.is_some());
}
