use rstest::rstest;
use serde_json::json;

use super::*;

fn read(spec: Value) -> Result<Scenario, String> {
    Scenario::read(&serde_json::from_value(spec).unwrap())
}

#[expect(clippy::needless_pass_by_value, reason = "json! makes values")]
fn one(request: Value) -> Value {
    json!({"steps": [{"name": "s", "requests": [request]}]})
}

fn login() -> Scenario {
    read(json!({"timeout": "1m", "steps": [
        {"name": "login", "timeout": "5s", "requests": [{
            "name": "token", "endpoint": "/login", "method": "POST", "body": "{\"user\":\"warm\"}",
            "headers": {"Content-Type": "application/json"}, "extract": {"token": "$.auth.token", "id": "$.ids[1]"},
        }]},
        {"name": "use", "requests": [{
            "name": "cart", "endpoint": "/cart/{{id}}?v={{ id }}", "count": 5,
            "headers": {"Authorization": "Bearer {{token}}"}, "body": "{{token}}", "grpcPayload": "{\"t\":\"{{token}}\"}",
        }]},
    ]}))
    .unwrap()
}

#[test]
fn defaults_are_the_documented_ones() {
    let scenario = read(one(json!({"name": "r"}))).unwrap();
    let request = &scenario.steps[0].requests[0];
    assert_eq!((scenario.timeout, scenario.steps[0].timeout), (Duration::from_secs(120), Duration::from_secs(30)));
    assert_eq!((request.method.as_str(), request.count, request.expected_status), ("GET", 1, None));
    assert!(request.accepts(200) && request.accepts(399) && !request.accepts(400) && !request.accepts(199));
    assert_eq!(request.fill(&Variables::new()).unwrap().endpoint.as_str(), "/");
}

#[test]
fn a_token_travels_from_one_response_into_later_requests() {
    let scenario = login();
    assert_eq!(scenario.planned(), 6);
    let mut variables = Variables::new();
    let body = br#"{"auth": {"token": "s3cret"}, "ids": [1, 42]}"#;
    scenario.steps[0].requests[0].extract(body, &mut variables).unwrap();
    let filled = scenario.steps[1].requests[0].fill(&variables).unwrap();
    assert_eq!(filled.endpoint.as_str(), "/cart/42?v=42");
    assert_eq!(filled.headers, [("Authorization".to_owned(), "Bearer s3cret".to_owned())]);
    assert_eq!((filled.body.as_str(), filled.grpc_payload.as_str()), ("s3cret", r#"{"t":"s3cret"}"#));
}

#[rstest]
#[case("@evil")]
#[case("a\r\nHost: evil")]
#[case("\u{0}")]
fn an_extracted_value_cannot_lead_elsewhere(#[case] value: &str) {
    let variables = [("id", value), ("token", "t")].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    assert!(login().steps[1].requests[0].fill(&variables).is_err());
    let variables = [("id", "1"), ("token", "a\r\nX: y")].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    assert!(login().steps[1].requests[0].fill(&variables).is_err());
}

#[test]
fn a_whole_endpoint_from_a_variable_is_still_a_path() {
    let spec = json!({"steps": [{"name": "s", "requests": [
        {"name": "a", "extract": {"next": "$.next"}}, {"name": "b", "endpoint": "{{next}}"},
    ]}]});
    let request = read(spec).unwrap().steps[0].requests[1].clone();
    let next = |value: &str| request.fill(&[("next".to_owned(), value.to_owned())].into());
    assert_eq!(next("/page/2").unwrap().endpoint.as_str(), "/page/2");
    assert!(next("http://evil/").is_err());
    assert!(next("//evil/").is_err());
}

#[test]
fn what_cannot_be_extracted_is_named() {
    let scenario = login();
    let request = &scenario.steps[0].requests[0];
    let error = |body: &[u8]| request.extract(body, &mut Variables::new()).unwrap_err();
    assert!(error(b"<html>").starts_with("request \"token\": the response is not JSON: "));
    assert_eq!(error(b"{}"), "request \"token\": cannot extract id: nothing is there");
    let list = br#"{"ids": [1, [2]], "auth": {"token": "t"}}"#;
    assert_eq!(error(list), "request \"token\": cannot extract id: it is no text, number or truth value");
}

#[rstest]
#[case(json!({"steps": []}), "spec.steps: at least one step is needed")]
#[case(json!({"steps": [{"name": "s", "requests": []}]}), "spec.steps[0].requests: at least one request is needed")]
#[case(json!({"timeout": "6m", "steps": []}), "spec.timeout: must be more than 0s and at most 5m, got 6m0s")]
#[case(one(json!({"name": "r", "count": 0})), "spec.steps[0].requests[0].count: must be 1 to 12000, got 0")]
#[case(one(json!({"name": "r", "count": 12_001})), "spec.steps[0].requests[0].count: must be 1 to 12000, got 12001")]
#[case(one(json!({"name": "r", "protocol": "ftp"})),
    "spec.steps[0].requests[0].protocol: must be one of http, https, h2c, grpc, got \"ftp\"")]
#[case(one(json!({"name": "r", "endpoint": "http://evil/"})),
    "spec.steps[0].requests[0].endpoint: must be a path, not an absolute URL; the host is always the pod")]
#[case(one(json!({"name": "r", "method": "GET /x"})), "spec.steps[0].requests[0].method: \"GET /x\" is no HTTP method")]
#[case(one(json!({"name": "r", "headers": {"Transfer-Encoding": "chunked"}})),
    "spec.steps[0].requests[0].headers: \"Transfer-Encoding\" cannot be set")]
#[case(one(json!({"name": "r", "headers": {"X": "a\nb"}})),
    "spec.steps[0].requests[0].headers: \"X\" has a control character in its value")]
#[case(one(json!({"name": "r", "expectedStatus": 99})),
    "spec.steps[0].requests[0].expectedStatus: must be 0 or 100 to 599")]
#[case(one(json!({"name": "r", "extract": {"a": "b"}})),
    "spec.steps[0].requests[0].extract.a: \"b\" must look like $.a.b or $.a[0].b")]
#[case(one(json!({"name": "r", "body": "{{token}}"})),
    "spec.steps[0].requests[0]: {{token}} is not extracted by any request before it")]
fn problems_name_their_place(#[case] spec: Value, #[case] text: &str) {
    assert_eq!(read(spec), Err(text.to_owned()));
}

#[test]
fn too_much_is_refused() {
    let headers: BTreeMap<String, String> = (0..51).map(|i| (format!("x-{i}"), String::new())).collect();
    assert!(
        read(one(json!({"name": "r", "headers": headers}))).unwrap_err().contains("at most 50 are allowed, got 51")
    );
    assert!(read(one(json!({"name": "r", "body": "x".repeat(65_537)}))).unwrap_err().contains("longer than 65536"));
    assert!(read(one(json!({"name": "r", "body": "x".repeat(65_536)}))).is_ok());
}

#[test]
fn braces_that_name_no_variable_are_text() {
    let request =
        read(one(json!({"name": "r", "body": "{{}} {{a b}} {{{\"x\":1}}}"}))).unwrap().steps[0].requests[0].clone();
    assert_eq!(request.fill(&Variables::new()).unwrap().body, "{{}} {{a b}} {{{\"x\":1}}}");
}

#[test]
fn an_expected_status_counts_exactly() {
    let request = read(one(json!({"name": "r", "expectedStatus": 401}))).unwrap().steps[0].requests[0].clone();
    assert!(request.accepts(401) && !request.accepts(200));
}

#[rstest]
#[case("$", true)]
#[case("$.a", true)]
#[case("$.a.b[0][1].c", true)]
#[case("a.b", false)]
#[case("$a", false)]
#[case("$.", false)]
#[case("$..a", false)]
#[case("$[x]", false)]
#[case("$[0", false)]
fn paths_are_simple(#[case] text: &str, #[case] ok: bool) {
    assert_eq!(Path::parse(text).is_ok(), ok);
}

#[test]
fn values_are_small_and_what_they_are_filled_into_stays_so() {
    let bomb = read(json!({"steps": [{"name": "s", "requests": [
        {"name": "a", "extract": {"a": "$.a"}},
        {"name": "b", "body": "{{a}}".repeat(13_107)},
    ]}]}));
    let requests = bomb.unwrap().steps.remove(0).requests;
    let mut variables = Variables::new();
    let body = |length: usize| json!({"a": "x".repeat(length)}).to_string();
    requests[0].extract(body(8 * 1024).as_bytes(), &mut variables).unwrap();
    let grown = requests[1].fill(&variables).unwrap_err();
    assert_eq!(grown, "the values filled in are longer than 131072 bytes");
    let large = requests[0].extract(body(8 * 1024 + 1).as_bytes(), &mut variables).unwrap_err();
    assert!(large.starts_with("request \"a\": cannot extract a: a value may have 8192 bytes"), "{large}");
    let larger = requests[0].extract(body(256 * 1024).as_bytes(), &mut variables).unwrap_err();
    assert!(larger.contains("the response is longer than 262144 bytes"), "{larger}");
}
