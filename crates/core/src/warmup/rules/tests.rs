use std::collections::BTreeMap;

use rstest::rstest;
use serde_json::json;

use super::*;

fn containers(value: Value) -> Vec<Container<String>> {
    serde_json::from_value(value).unwrap()
}

fn one_port() -> Vec<Container<String>> {
    containers(json!([{"name": "app", "ports": [{"name": "http", "containerPort": 8080}]}]))
}

fn annotations(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
    entries.iter().map(|(k, v)| (format!("kube-booster.io/{k}"), (*v).to_owned())).collect()
}

fn read(entries: &[(&str, &str)]) -> Result<Rules, String> {
    Rules::read(&annotations(entries), &one_port()).map_err(|e| e.to_string())
}

fn read_in(entries: &[(&str, &str)], pod: Value) -> Result<Rules, String> {
    Rules::read(&annotations(entries), &containers(pod)).map_err(|e| e.to_string())
}

#[test]
fn no_annotation_means_the_documented_defaults() {
    let rules = read(&[("warmup", "enabled")]).unwrap();
    assert_eq!(rules.endpoint.as_str(), "/");
    assert_eq!(rules.requests, 3);
    assert_eq!(rules.duration, Duration::from_secs(30));
    assert_eq!(rules.timeout, Duration::from_secs(35));
    assert_eq!(rules.port, 8080);
    assert_eq!(rules.protocol, Protocol::Http);
    assert_eq!(rules.grpc_method, None);
    assert_eq!(rules.grpc_payload, "{}");
    assert_eq!(rules.config, None);
    assert_eq!(rules.mode, Mode::Paced);
    assert_eq!(rules.failure_policy, FailurePolicy::Open);
    assert_eq!(rules.retries, 0);
}

#[test]
fn every_annotation_is_read() {
    let rules = read(&[
        ("warmup-endpoint", "api/warm?x=1"),
        ("warmup-requests", "12000"),
        ("warmup-duration", "1m30s"),
        ("warmup-timeout", "5m"),
        ("warmup-port", "65535"),
        ("warmup-protocol", "grpc"),
        ("warmup-grpc-method", "shop.v1.Cart/Get"),
        ("warmup-grpc-payload", r#"{"id": 1}"#),
        ("warmup-config", "big-one"),
        ("warmup-mode", "asap"),
        ("warmup-failure-policy", "closed"),
        ("warmup-retries", "10"),
    ])
    .unwrap();
    assert_eq!(rules.endpoint.as_str(), "/api/warm?x=1");
    assert_eq!((rules.requests, rules.port, rules.retries), (12_000, 65_535, 10));
    assert_eq!((rules.duration, rules.timeout), (Duration::from_secs(90), Duration::from_secs(300)));
    assert_eq!(rules.grpc_method.unwrap().to_string(), "shop.v1.Cart/Get");
    assert_eq!(rules.grpc_payload, r#"{"id": 1}"#);
    assert_eq!(rules.config.as_deref(), Some("big-one"));
    assert_eq!((rules.protocol, rules.mode, rules.failure_policy), (Protocol::Grpc, Mode::Asap, FailurePolicy::Closed));
}

#[test]
fn an_empty_value_means_absent() {
    let all = [
        keys::WARMUP_ENDPOINT,
        keys::WARMUP_REQUESTS,
        keys::WARMUP_DURATION,
        keys::WARMUP_PORT,
        keys::WARMUP_TIMEOUT,
        keys::WARMUP_PROTOCOL,
        keys::WARMUP_GRPC_METHOD,
        keys::WARMUP_GRPC_PAYLOAD,
        keys::WARMUP_CONFIG,
        keys::WARMUP_MODE,
        keys::WARMUP_ENDPOINT_FROM,
        keys::WARMUP_FAILURE_POLICY,
        keys::WARMUP_RETRIES,
    ];
    let empty: BTreeMap<String, String> = all.iter().map(|key| ((*key).to_owned(), String::new())).collect();
    assert_eq!(Rules::read(&empty, &one_port()), Rules::read(&annotations(&[]), &one_port()));
}

#[rstest]
#[case("warmup-requests", "many", "invalid warmup-requests value \"many\": not a whole number")]
#[case("warmup-requests", "1e12", "invalid warmup-requests value \"1e12\": not a whole number")]
#[case("warmup-requests", "3.5", "invalid warmup-requests value \"3.5\": not a whole number")]
#[case(
    "warmup-requests",
    "99999999999999999999",
    "invalid warmup-requests value \"99999999999999999999\": out of range"
)]
#[case("warmup-requests", "0", "warmup-requests must be at least 1, got 0")]
#[case("warmup-requests", "-1", "warmup-requests must be at least 1, got -1")]
#[case("warmup-requests", "12001", "warmup-requests must not exceed 12000, got 12001")]
#[case("warmup-requests", "1000000000000", "warmup-requests must not exceed 12000, got 1000000000000")]
#[case(
    "warmup-duration",
    "soon",
    "invalid warmup-duration value \"soon\": not a duration; write it like 300ms, 30s or 1m30s"
)]
#[case("warmup-duration", "30", "invalid warmup-duration value \"30\": a number needs a unit: ns, us, ms, s, m or h")]
#[case("warmup-duration", "500ms", "warmup-duration must be at least 1s, got 500ms")]
#[case("warmup-duration", "1.5h", "warmup-duration must not exceed 5m, got 1h30m0s")]
#[case("warmup-timeout", "x", "invalid warmup-timeout value \"x\": not a duration; write it like 300ms, 30s or 1m30s")]
#[case("warmup-timeout", "999ms", "warmup-timeout must be at least 1s, got 999ms")]
#[case("warmup-timeout", "5m1s", "warmup-timeout must not exceed 5m, got 5m1s")]
#[case("warmup-protocol", "HTTP", "invalid warmup-protocol value \"HTTP\": must be one of http, https, h2c, grpc")]
#[case("warmup-grpc-method", "Get", "invalid warmup-grpc-method value \"Get\": must look like package.Service/Method")]
#[case(
    "warmup-grpc-method",
    "a/b/c",
    "invalid warmup-grpc-method value \"a/b/c\": must look like package.Service/Method"
)]
#[case(
    "warmup-grpc-method",
    ".a/b",
    "invalid warmup-grpc-method value \".a/b\": must look like package.Service/Method"
)]
#[case("warmup-grpc-payload", "[1]", "invalid warmup-grpc-payload value \"[1]\": must be a JSON object")]
#[case("warmup-port", "0", "warmup-port must be between 1 and 65535, got 0")]
#[case("warmup-port", "65536", "warmup-port must be between 1 and 65535, got 65536")]
#[case("warmup-port", "-1", "warmup-port must be between 1 and 65535, got -1")]
#[case("warmup-port", "99999999999999999999", "warmup-port must be between 1 and 65535, got 99999999999999999999")]
#[case("warmup-port", "web", "invalid warmup-port value \"web\": no container has a port of that name")]
#[case(
    "warmup-endpoint",
    "http://evil/",
    "invalid warmup-endpoint value \"http://evil/\": must be a path, not an absolute URL; the host is always the pod"
)]
#[case(
    "warmup-endpoint-from",
    "livenessProbe",
    "invalid warmup-endpoint-from value \"livenessProbe\": must be one of readinessProbe"
)]
#[case(
    "warmup-endpoint-from",
    "readinessProbe",
    "invalid warmup-endpoint-from value \"readinessProbe\": no container has an HTTP readiness probe"
)]
#[case("warmup-mode", "fast", "invalid warmup-mode value \"fast\": must be one of paced, asap, converge")]
#[case("warmup-failure-policy", "Open", "invalid warmup-failure-policy value \"Open\": must be one of open, closed")]
#[case("warmup-retries", "11", "warmup-retries must be between 0 and 10, got 11")]
#[case("warmup-retries", "-1", "warmup-retries must be between 0 and 10, got -1")]
#[case("warmup-retries", "x", "invalid warmup-retries value \"x\": not a whole number")]
#[case(
    "warmup-config",
    "../secrets/x",
    "invalid warmup-config value \"../secrets/x\": must be the name of a WarmupConfig in the pod's namespace"
)]
fn a_bad_value_is_named_with_its_key_and_rule(#[case] key: &str, #[case] value: &str, #[case] text: &str) {
    assert_eq!(read(&[(key, value)]), Err(text.to_owned()));
}

#[test]
fn bad_json_says_where() {
    let error = read(&[("warmup-grpc-payload", "{")]).unwrap_err();
    assert!(error.starts_with("invalid warmup-grpc-payload value \"{\": not JSON: "), "{error}");
}

#[test]
fn the_first_error_in_the_documented_order_wins() {
    let mut bad = vec![
        ("warmup-requests", "0", "requests"),
        ("warmup-duration", "0s", "duration"),
        ("warmup-timeout", "0s", "timeout"),
        ("warmup-protocol", "x", "protocol"),
        ("warmup-grpc-method", "x", "grpc-method"),
        ("warmup-grpc-payload", "x", "grpc-payload"),
        ("warmup-port", "0", "port"),
        ("warmup-endpoint", "@", "endpoint"),
        ("warmup-endpoint-from", "x", "endpoint-from"),
        ("warmup-mode", "x", "mode"),
        ("warmup-failure-policy", "x", "failure-policy"),
        ("warmup-retries", "x", "retries"),
        ("warmup-config", "X", "config"),
    ];
    while let Some((_, _, first)) = bad.first().copied() {
        let entries: Vec<(&str, &str)> = bad.iter().map(|(k, v, _)| (*k, *v)).collect();
        let Err(Problems(found)) = Rules::read(&annotations(&entries), &one_port()) else { panic!("{first}") };
        assert!(found[0].text.contains(&format!("warmup-{first} ")), "{first}: {}", found[0].text);
        assert_eq!(found.len(), bad.len());
        bad.remove(0);
    }
}

#[rstest]
#[case::two_ports(json!([{"name": "app", "ports": [{"containerPort": 1}, {"containerPort": 2}]}]),
    "container \"app\" has multiple ports, please specify warmup port using annotation kube-booster.io/warmup-port")]
#[case::two_containers(json!([{"name": "a", "ports": [{"containerPort": 1}]}, {"name": "b"}]),
    "pod has multiple containers, please specify warmup port using annotation kube-booster.io/warmup-port")]
#[case::no_ports(json!([{"name": "a"}]),
    "cannot determine warmup port: no container ports found, please specify warmup port using annotation kube-booster.io/warmup-port")]
#[case::only_udp(json!([{"name": "a", "ports": [{"containerPort": 53, "protocol": "UDP"}]}]),
    "cannot determine warmup port: no container ports found, please specify warmup port using annotation kube-booster.io/warmup-port")]
fn a_port_that_is_not_obvious_must_be_given(#[case] pod: Value, #[case] text: &str) {
    assert_eq!(read_in(&[], pod), Err(text.to_owned()));
}

#[test]
fn udp_ports_do_not_make_the_tcp_one_ambiguous() {
    let pod = json!([{"name": "a", "ports": [{"containerPort": 443}, {"containerPort": 443, "protocol": "UDP"}]}]);
    assert_eq!(read_in(&[], pod).unwrap().port, 443);
}

#[test]
fn a_port_is_found_by_name_in_any_container() {
    let two = |other: Value| {
        json!([{"name": "a", "ports": [{"containerPort": 1}, {"name": "web", "containerPort": 8081, "protocol": "TCP"}]},
               {"name": "b", "ports": [other]}])
    };
    let by_name = |other| read_in(&[("warmup-port", "web")], two(other)).map(|rules| rules.port);
    assert_eq!(by_name(json!({"containerPort": 2})), Ok(8081));
    assert_eq!(by_name(json!({"name": "web", "containerPort": 53, "protocol": "UDP"})), Ok(8081));
    let text =
        "invalid warmup-port value \"web\": several containers have different ports of that name; give the number";
    assert_eq!(by_name(json!({"name": "web", "containerPort": 9})), Err(text.to_owned()));
    let udp = json!([{"name": "a", "ports": [{"name": "dns", "containerPort": 53, "protocol": "UDP"}]}]);
    let text = "invalid warmup-port value \"dns\": the port of that name is not a TCP port";
    assert_eq!(read_in(&[("warmup-port", "dns")], udp), Err(text.to_owned()));
}

#[test]
fn the_readiness_probe_gives_path_port_and_scheme() {
    let pod = json!([
        {"name": "side", "readinessProbe": {"exec": {"command": ["true"]}}},
        {"name": "app", "ports": [{"name": "https", "containerPort": 8443}, {"containerPort": 1}],
         "readinessProbe": {"httpGet": {"path": "/ready?full=1", "port": "https", "scheme": "HTTPS", "host": "evil"}}},
    ]);
    let rules = read_in(&[("warmup-endpoint-from", "readinessProbe")], pod.clone()).unwrap();
    assert_eq!((rules.endpoint.as_str(), rules.port, rules.protocol), ("/ready?full=1", 8443, Protocol::Https));
    let own = [
        ("warmup-endpoint-from", "readinessProbe"),
        ("warmup-endpoint", "/own"),
        ("warmup-port", "1"),
        ("warmup-protocol", "h2c"),
    ];
    let rules = read_in(&own, pod).unwrap();
    assert_eq!((rules.endpoint.as_str(), rules.port, rules.protocol), ("/own", 1, Protocol::H2c));
}

#[test]
fn two_http_probes_are_ambiguous() {
    let probed = json!({"name": "a", "readinessProbe": {"httpGet": {"port": 80}}});
    let error = read_in(&[("warmup-endpoint-from", "readinessProbe")], json!([probed, probed])).unwrap_err();
    assert!(error.ends_with("several containers have an HTTP readiness probe"), "{error}");
}

#[rstest]
#[case("3", "30s", 10)]
#[case("30", "30s", 1)]
#[case("10", "30s", 3)]
#[case("12000", "1s", 1)]
#[case("1", "5m", 10)]
fn a_request_gets_its_share_of_the_duration_within_bounds(#[case] n: &str, #[case] d: &str, #[case] seconds: u64) {
    let rules = read(&[("warmup-requests", n), ("warmup-duration", d)]).unwrap();
    assert_eq!(rules.request_timeout(), Duration::from_secs(seconds));
}

#[test]
fn converging_without_a_count_takes_what_fits_into_the_duration() {
    let rules = read(&[("warmup-mode", "converge")]).unwrap();
    assert_eq!((rules.requests, rules.request_timeout()), (MAX_REQUESTS, Duration::from_secs(10)));
    assert_eq!(read(&[("warmup-mode", "converge"), ("warmup-requests", "7")]).unwrap().requests, 7);
}

#[test]
fn a_bad_policy_means_open_and_a_good_one_survives_other_problems() {
    assert_eq!(failure_policy(&annotations(&[("warmup-failure-policy", "Closed")])), FailurePolicy::Open);
    let broken = annotations(&[("warmup-failure-policy", "closed"), ("warmup-requests", "0")]);
    assert_eq!(failure_policy(&broken), FailurePolicy::Closed);
}

#[test]
fn long_values_are_quoted_in_part() {
    let error = read(&[("warmup-requests", &"x".repeat(5000))]).unwrap_err();
    assert!(error.len() < 200, "{error}");
}

#[test]
fn spellings_read_back() {
    assert!(Protocol::ALL.iter().all(|one| Protocol::parse(&one.to_string()) == Ok(*one)));
    assert!(Mode::ALL.iter().all(|one| Mode::parse(&one.to_string()) == Ok(*one)));
    assert!(FailurePolicy::ALL.iter().all(|one| FailurePolicy::parse(&one.to_string()) == Ok(*one)));
}
