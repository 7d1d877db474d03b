//! Requests as a well-behaved server sees them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use groundcrew_core::warmup::outcome::Cut;
use groundcrew_core::warmup::scenario::Scenario;
use serde_json::json;
use support::{Server, listener, reply, run, run_virtually, run_with, serve, serve_on, timed};
use tokio_util::sync::CancellationToken;

#[tokio::test(start_paused = true)]
async fn exactly_n_requests_are_spread_evenly_over_the_duration() {
    let (address, arrivals) = timed(|_| Duration::from_millis(350)).await;
    let ran = run_virtually(address, &[("requests", "20"), ("duration", "2s")]).await;
    assert_eq!((ran.tally().sent, ran.tally().succeeded), (20, 20));
    assert!(ran.progress.sent() == 20 && ran.progress.succeeded() == 20);
    let arrivals = arrivals.lock().unwrap().clone();
    assert_eq!(arrivals.len(), 20);
    for (k, at) in (0..).zip(&arrivals) {
        let off = (*at - arrivals[0]).abs_diff(Duration::from_millis(100) * k);
        assert!(off <= Duration::from_millis(2), "request {k} came {off:?} off its time");
    }
}

#[tokio::test]
async fn the_documented_headers_are_sent() {
    let server = serve(|_, _| reply(200, "")).await;
    run(server.address, &[("requests", "3"), ("duration", "1s"), ("endpoint", "warm?x=1")]).await;
    let hits = server.hits();
    let mut spans = BTreeSet::new();
    for hit in &hits {
        assert_eq!((hit.head.method.as_str(), hit.head.uri.to_string().as_str()), ("GET", "/warm?x=1"));
        assert_eq!(hit.header("host"), server.address.to_string());
        assert_eq!(hit.header("user-agent"), "kube-booster/1.0");
        assert_eq!(hit.header("x-warmup-request"), "true");
        assert_eq!(hit.header("accept-encoding"), "");
        let trace: Vec<&str> = hit.header("traceparent").split('-').collect();
        assert_eq!((trace[0], trace[1], trace[3]), ("00", "00000000000000000000000000000abc", "01"));
        assert!(trace[2].len() == 16 && spans.insert(trace[2].to_owned()), "{trace:?}");
    }
    let connections: BTreeSet<usize> = hits.iter().map(|hit| hit.connection).collect();
    assert_eq!(connections.len(), 1, "keep-alive");
}

#[tokio::test]
async fn back_to_back_takes_no_longer_than_the_server() {
    let server = serve(|_, _| reply(204, "")).await;
    let ran = run(server.address, &[("requests", "200"), ("mode", "asap")]).await;
    assert_eq!((server.hits().len(), ran.tally().succeeded), (200, 200));
    // Paced it would take the thirty seconds of the default.
    assert!(ran.took < Duration::from_secs(20), "{:?}", ran.took);
}

#[tokio::test]
async fn statuses_count_as_documented_and_redirects_are_answers() {
    let server = serve(|n, _| {
        let mut reply = reply([200, 301, 307, 399, 400, 404, 500, 503][n % 8], "");
        reply.headers_mut().insert("location", "http://169.254.169.254/latest/".parse().unwrap());
        reply
    })
    .await;
    let ran = run(server.address, &[("requests", "8"), ("mode", "asap")]).await;
    assert_eq!((server.hits().len(), ran.tally().sent, ran.tally().succeeded), (8, 8, 4));
    assert!(ran.tally().failure.as_ref().unwrap().starts_with("status "));
}

#[tokio::test]
async fn a_server_that_only_fails_is_named() {
    let server = serve(|_, _| reply(503, "")).await;
    let ran = run(server.address, &[("requests", "3"), ("duration", "1s")]).await;
    assert_eq!((ran.tally().sent, ran.tally().succeeded), (3, 0));
    assert_eq!(ran.tally().failure.as_deref(), Some("status 503 (3)"));
}

#[tokio::test]
async fn nobody_listening_is_refused_n_times() {
    let address = listener("127.0.0.1").await.local_addr().unwrap();
    let ran = run(address, &[("requests", "3"), ("duration", "1s")]).await;
    assert_eq!((ran.tally().sent, ran.tally().failure.as_deref()), (3, Some("connection refused (3)")));
}

#[tokio::test]
async fn ipv6_works() {
    let server = serve_on("[::1]", |_, _| reply(200, "")).await;
    let ran = run(server.address, &[("requests", "2"), ("duration", "1s")]).await;
    assert_eq!(ran.tally().succeeded, 2);
    assert_eq!(server.hits()[0].header("host"), format!("[::1]:{}", server.address.port()));
}

#[tokio::test]
async fn h2c_uses_one_connection() {
    let server = serve(|_, _| reply(200, "ok")).await;
    let ran = run(server.address, &[("requests", "10"), ("duration", "1s"), ("protocol", "h2c")]).await;
    let hits = server.hits();
    assert_eq!(ran.tally().succeeded, 10);
    assert!(hits.iter().all(|hit| hit.head.version == http::Version::HTTP_2 && hit.connection == 0));
    assert_eq!(hits[0].head.uri.authority().unwrap().as_str(), server.address.to_string());
}

async fn serve_tls(alpn: &[&str]) -> Server {
    let key = rcgen::generate_simple_self_signed(["expired.example".to_owned()]).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![key.cert.der().clone()], key.signing_key.serialize_der().try_into().unwrap())
        .unwrap();
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    let (acceptor, listener) = (tokio_rustls::TlsAcceptor::from(Arc::new(config)), listener("127.0.0.1").await);
    let server = Server { address: listener.local_addr().unwrap(), hits: Arc::default() };
    let hits = server.hits.clone();
    tokio::spawn(async move {
        for connection in 0.. {
            let (tcp, _) = listener.accept().await.unwrap();
            if let Ok(tls) = acceptor.accept(tcp).await {
                tokio::spawn(support::speak(tls, connection, hits.clone(), Arc::new(|_, _: &_| reply(200, "ok"))));
            }
        }
    });
    server
}

#[tokio::test]
async fn https_takes_any_certificate_and_both_versions() {
    for (alpn, version) in [
        (&[][..], http::Version::HTTP_11),
        (&["http/1.1"][..], http::Version::HTTP_11),
        (&["h2", "http/1.1"][..], http::Version::HTTP_2),
    ] {
        let server = serve_tls(alpn).await;
        let ran = run(server.address, &[("requests", "5"), ("mode", "asap"), ("protocol", "https")]).await;
        assert_eq!(ran.tally().succeeded, 5, "{alpn:?}: {:?}", ran.tally());
        let hits = server.hits();
        assert!(hits.iter().all(|hit| hit.head.version == version && hit.connection == 0), "{alpn:?}");
    }
}

#[tokio::test]
async fn plain_text_to_a_tls_client_is_a_tls_failure() {
    let server = serve(|_, _| reply(200, "")).await;
    let ran = run(server.address, &[("requests", "1"), ("mode", "asap"), ("protocol", "https")]).await;
    assert_eq!(ran.tally().failure.as_deref(), Some("TLS handshake failed (1)"));
}

#[tokio::test(start_paused = true)]
async fn converging_stops_when_the_server_is_warm() {
    let (address, _) = timed(|n| Duration::from_millis(200).mul_f64(1.0 + 5.0 * (-(n as f64) / 20.0).exp())).await;
    let ran = run_virtually(address, &[("mode", "converge"), ("requests", "130"), ("duration", "5m")]).await;
    let curve = ran.tally().curve.unwrap();
    // 20·ln(5/0.05) is 92.
    assert!(curve.flattened && (79..=106).contains(&ran.tally().sent), "{:?}", ran.tally());
    assert!(curve.cold_p95 > curve.warm_p95 * 2, "{curve:?}");
}

#[tokio::test]
async fn a_budget_of_time_ends_converging_without_a_cap() {
    let server = serve(|n, _| {
        // Grows by more than any noise, so that it never looks flat.
        std::thread::sleep(Duration::from_millis(20 * (n as u64 + 1)));
        reply(200, "")
    })
    .await;
    let ran = run(server.address, &[("mode", "converge"), ("duration", "1s")]).await;
    assert!(ran.took < Duration::from_secs(30), "{:?}", ran.took);
    assert!(!ran.tally().curve.unwrap().flattened && ran.tally().cut.is_none(), "{:?}", ran.tally());
}

#[tokio::test]
async fn cancelling_stops_requests_at_once() {
    let server = serve(|_, _| reply(200, "")).await;
    let cancel = CancellationToken::new();
    let (address, stop) = (server.address, cancel.clone());
    let run =
        tokio::spawn(async move { run_with(address, &[("requests", "3000"), ("duration", "30s")], None, &stop).await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    cancel.cancel();
    let ran = run.await.unwrap();
    assert_eq!(ran.ended, groundcrew_load::warm::Ended::Cancelled);
    // The plan is for thirty seconds.
    assert!(ran.took < Duration::from_secs(15), "{:?}", ran.took);
    // What was under way may still arrive.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let (seen, sent) = (server.hits().len(), ran.progress.sent());
    assert!(seen <= sent as usize && sent < 3000, "{seen} of {sent} sent");
}

fn scenario(spec: serde_json::Value) -> Scenario {
    Scenario::read(&serde_json::from_value(spec).unwrap()).unwrap()
}

fn shop() -> impl Fn(usize, &support::Hit) -> support::Reply {
    |_, hit| match hit.head.uri.path() {
        "/login" if hit.body.as_ref() == b"{\"user\":\"warm\"}" => reply(201, r#"{"auth":{"token":"s3cret"}}"#),
        "/cart" if hit.header("authorization") == "Bearer s3cret" => reply(200, "{}"),
        _ => reply(401, "{}"),
    }
}

fn login(path: &str) -> Scenario {
    scenario(json!({"steps": [
        {"name": "login", "requests": [{"name": "token", "method": "POST", "endpoint": "/login", "expectedStatus": 201,
            "body": "{\"user\":\"warm\"}", "extract": {"token": path}}]},
        {"name": "use", "requests": [
            {"name": "cart", "endpoint": "/cart", "count": 5, "headers": {"Authorization": "Bearer {{token}}"}},
            {"name": "refused", "endpoint": "/admin", "expectedStatus": 401},
        ]},
    ]}))
}

#[tokio::test]
async fn a_scenario_logs_in_and_uses_the_token() {
    let server = serve(shop()).await;
    let ran = run_with(server.address, &[], Some(&login("$.auth.token")), &CancellationToken::new()).await;
    assert_eq!((ran.tally().planned, ran.tally().sent, ran.tally().succeeded), (7, 7, 7));
    assert_eq!(server.hits()[0].header("user-agent"), "kube-booster/1.0");
}

#[tokio::test]
async fn a_scenario_whose_token_is_missing_says_so_and_stops() {
    let server = serve(shop()).await;
    let ran = run_with(server.address, &[], Some(&login("$.nowhere")), &CancellationToken::new()).await;
    assert_eq!(ran.unable(), "step \"login\", request \"token\": cannot extract token: nothing is there");
    assert_eq!(server.hits().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_its_timeout_ended_is_named_and_the_others_go_on() {
    let server = serve(|number, _| {
        std::thread::sleep(Duration::from_millis(if number < 10 { 300 } else { 0 }));
        reply(200, "")
    })
    .await;
    let steps = scenario(json!({"steps": [
        {"name": "slow", "timeout": "1s", "requests": [{"name": "a", "count": 60}]},
        {"name": "after", "requests": [{"name": "b", "endpoint": "/b"}]},
    ]}));
    let ran = run_with(server.address, &[], Some(&steps), &CancellationToken::new()).await;
    assert_eq!(ran.tally().cut, Some(Cut::Step("slow".to_owned(), Duration::from_secs(1))), "{:?}", ran.tally());
    assert_eq!(server.hits().last().unwrap().head.uri.path(), "/b");
}
