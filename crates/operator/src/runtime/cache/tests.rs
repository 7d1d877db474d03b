use std::collections::BTreeSet;
use std::convert::Infallible;

use bytes::Bytes;
use futures::stream;
use http::{Request, Response, StatusCode};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tower::service_fn;

use super::*;

const WATCH: Duration = Duration::from_secs(20);

type Script = Box<dyn Fn(usize, &str) -> Answer + Send + Sync>;

enum Answer {
    Json(u16, Value),
    /// Lines of a watch that then stays open.
    Watch(Vec<Value>),
    /// Lines of a watch that then ends.
    Ended(Vec<Value>),
}

/// A server that answers by script: the number of the request and its path and query.
fn server(script: Script) -> (Client, mpsc::UnboundedReceiver<String>) {
    let (asked, requests) = mpsc::unbounded_channel();
    let script = Arc::new((script, std::sync::atomic::AtomicUsize::new(0)));
    let service = service_fn(move |request: Request<Body>| {
        let uri = request.uri().to_string();
        let number = script.1.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        let answer = (script.0)(number, &uri);
        let _ = asked.send(uri);
        async move { Ok::<_, Infallible>(respond(answer)) }
    });
    (Client::new(service, "default"), requests)
}

fn respond(answer: Answer) -> Response<axum::body::Body> {
    let (lines, stays) = match answer {
        Answer::Json(code, value) => {
            let body = axum::body::Body::from(value.to_string());
            return Response::builder().status(StatusCode::from_u16(code).unwrap()).body(body).unwrap();
        }
        Answer::Watch(lines) => (lines, true),
        Answer::Ended(lines) => (lines, false),
    };
    let lines = lines.into_iter().map(|line| Ok::<_, Infallible>(Bytes::from(format!("{line}\n"))));
    let lines = stream::iter(lines).chain(stream::once(async move {
        if stays {
            std::future::pending::<()>().await;
        }
        Ok(Bytes::new())
    }));
    Response::new(axum::body::Body::from_stream(lines))
}

fn object(name: &str, version: u32) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"namespace": "ns", "name": name, "resourceVersion": version.to_string()}})
}

#[expect(clippy::needless_pass_by_value, reason = "reads like the line it makes")]
fn event(kind: &str, object: Value) -> Value {
    json!({"type": kind, "object": object})
}

/// Ends the list part of a streamed list.
fn listed(version: u32) -> Value {
    let mut mark = object("", version);
    mark["metadata"]["annotations"] = json!({"k8s.io/initial-events-end": "true"});
    event("BOOKMARK", mark)
}

fn gone() -> Answer {
    Answer::Json(
        410,
        json!({"kind": "Status", "status": "Failure", "code": 410, "reason": "Expired", "message": "old"}),
    )
}

fn start(client: Client) -> (Arc<Cache<String>>, Arc<Changes>) {
    let cache = Cache::new("test");
    let changes = cache.subscribe();
    let api: Api<DeserializeGuard<ConfigMap>> = Api::all(client);
    let project = |map: ConfigMap| (map.name_any() != "boring").then(|| map.resource_version().unwrap_or_default());
    let feed = Feed { watch_timeout: Some(WATCH), ..Feed::default() };
    tokio::spawn(fill(Arc::clone(&cache), api, feed, project));
    (cache, changes)
}

async fn next(changes: &Changes) -> String {
    timeout(Duration::from_secs(60), changes.next()).await.unwrap().name
}

async fn next_n(changes: &Changes, n: usize) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for _ in 0..n {
        names.insert(next(changes).await);
    }
    names
}

fn names(cache: &Cache<String>) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    cache.for_each(|key, _| {
        names.insert(key.name.clone());
    });
    names
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[tokio::test(start_paused = true)]
async fn events_follow_the_list_and_what_is_of_no_interest_is_not_kept() {
    let (client, _) = server(Box::new(|_, _| {
        Answer::Watch(vec![
            event("ADDED", object("a", 1)),
            event("ADDED", object("boring", 2)),
            listed(3),
            event("ADDED", object("b", 4)),
            event("DELETED", object("a", 5)),
            event("MODIFIED", object("boring", 6)),
            event("MODIFIED", object("b", 7)),
        ])
    }));
    let (cache, changes) = start(client);
    next_n(&changes, 2).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(names(&cache), set(&["b"]));
    let key = Key { namespace: "ns".into(), name: "b".into() };
    assert_eq!(cache.get(&key).as_deref().map(String::as_str), Some("7"));
    assert!(*cache.synced().borrow());
}

#[tokio::test(start_paused = true)]
async fn an_object_that_cannot_be_read_is_left_out_and_the_watch_goes_on() {
    let bad = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": "ns", "name": "bad",
        "resourceVersion": "2"}, "data": [1, 2]});
    let (client, mut requests) = server(Box::new(move |_, _| {
        Answer::Watch(vec![
            event("ADDED", bad.clone()),
            event("ADDED", object("a", 3)),
            listed(4),
            event("ADDED", object("b", 5)),
        ])
    }));
    let (cache, changes) = start(client);
    next_n(&changes, 2).await;
    assert_eq!(names(&cache), set(&["a", "b"]));
    assert!(requests.recv().await.is_some() && requests.try_recv().is_err(), "the watch was started anew");
}

#[tokio::test(start_paused = true)]
async fn a_watch_request_answered_410_leads_to_a_new_list_that_tells_what_is_gone() {
    let (client, _) = server(Box::new(|number, uri| match number {
        0 => Answer::Ended(vec![event("ADDED", object("old", 1)), event("ADDED", object("kept", 2)), listed(3)]),
        _ if !uri.contains("sendInitialEvents") => gone(),
        _ => Answer::Watch(vec![event("ADDED", object("kept", 2)), event("ADDED", object("new", 9)), listed(10)]),
    }));
    let (cache, changes) = start(client);
    assert_eq!(next_n(&changes, 2).await, set(&["old", "kept"]));
    assert_eq!(next_n(&changes, 3).await, set(&["old", "kept", "new"]));
    assert_eq!(names(&cache), set(&["kept", "new"]));
}

#[tokio::test(start_paused = true)]
async fn a_server_that_cannot_stream_lists_is_asked_for_pages() {
    let (client, mut requests) = server(Box::new(|_, uri| {
        if uri.contains("sendInitialEvents") {
            return Answer::Json(
                422,
                json!({"kind": "Status", "status": "Failure", "code": 422, "reason": "Invalid", "message": "no"}),
            );
        }
        if uri.contains("watch=") {
            return Answer::Watch(vec![event("ADDED", object("b", 5))]);
        }
        let items = [object("a", 1)];
        Answer::Json(
            200,
            json!({"apiVersion": "v1", "kind": "ConfigMapList", "metadata": {"resourceVersion": "4"}, "items": items}),
        )
    }));
    let (cache, changes) = start(client);
    assert_eq!(next_n(&changes, 2).await, set(&["a", "b"]));
    assert_eq!(names(&cache), set(&["a", "b"]));
    let mut paged = false;
    while let Ok(uri) = requests.try_recv() {
        paged |= uri.contains("limit=500");
    }
    assert!(paged);
}

#[tokio::test(start_paused = true)]
async fn an_outage_ends_in_a_fresh_list_and_keeps_the_old_state_meanwhile() {
    let (client, _) = server(Box::new(|number, _| match number {
        0 => Answer::Ended(vec![event("ADDED", object("a", 1)), listed(2)]),
        1..=6 => Answer::Json(503, json!({"kind": "Status", "status": "Failure", "code": 503, "message": "away"})),
        _ => Answer::Watch(vec![event("ADDED", object("b", 3)), listed(4)]),
    }));
    let (cache, changes) = start(client);
    assert_eq!(next(&changes).await, "a");
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(names(&cache), set(&["a"]));
    assert_eq!(next_n(&changes, 2).await, set(&["a", "b"]));
    assert_eq!(names(&cache), set(&["b"]));
}

#[tokio::test(start_paused = true)]
async fn a_running_watch_that_reports_410_leads_to_a_new_list() {
    let expired = json!({"kind": "Status", "status": "Failure", "code": 410, "reason": "Expired", "message": "old"});
    let (client, _) = server(Box::new(move |number, _| match number {
        0 => Answer::Watch(vec![event("ADDED", object("a", 1)), listed(2), event("ERROR", expired.clone())]),
        _ => Answer::Watch(vec![event("ADDED", object("b", 9)), listed(10)]),
    }));
    let (cache, changes) = start(client);
    next_n(&changes, 3).await;
    assert_eq!(names(&cache), set(&["b"]));
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_falls_silent_is_asked_for_again_where_it_stopped() {
    let (client, mut requests) = server(Box::new(|number, _| match number {
        0 => Answer::Watch(vec![event("ADDED", object("a", 1)), listed(2), event("ADDED", object("b", 3))]),
        _ => Answer::Watch(vec![event("ADDED", object("c", 4))]),
    }));
    let (cache, changes) = start(client);
    assert_eq!(next_n(&changes, 2).await, set(&["a", "b"]));
    let silent = Instant::now();
    assert_eq!(next(&changes).await, "c");
    assert!(silent.elapsed() < WATCH + Duration::from_secs(6), "{:?}", silent.elapsed());
    assert_eq!(names(&cache), set(&["a", "b", "c"]));
    let (first, second) = (requests.recv().await.unwrap(), requests.recv().await.unwrap());
    assert!(first.contains("sendInitialEvents=true") && second.contains("resourceVersion=3"), "{second}");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_away_is_asked_less_and_less_often() {
    let away = || Answer::Json(503, json!({"kind": "Status", "status": "Failure", "code": 503, "message": "away"}));
    let (client, mut requests) = server(Box::new(move |number, uri| match number {
        0 => Answer::Json(422, json!({"kind": "Status", "status": "Failure", "code": 422, "message": uri})),
        _ => away(),
    }));
    let (cache, _changes) = start(client);
    sleep(Duration::from_secs(300)).await;
    assert!(!*cache.synced().borrow());
    let mut asked = 0;
    while requests.try_recv().is_ok() {
        asked += 1;
    }
    assert!((15..60).contains(&asked), "{asked} requests in five minutes");
}

#[tokio::test]
async fn a_key_waits_once_however_often_it_changes_and_in_order() {
    let changes = Changes::default();
    let key = |name: &str| Key { namespace: String::new(), name: name.into() };
    for name in ["a", "b", "a", "a", "c", "b"] {
        changes.mark(key(name));
    }
    let order = [changes.next().await, changes.next().await, changes.next().await].map(|key| key.to_string());
    assert_eq!(order, ["a", "b", "c"]);
    assert!(timeout(Duration::from_millis(20), changes.next()).await.is_err());
    changes.mark(key("a"));
    assert_eq!(changes.next().await.name, "a");
}
