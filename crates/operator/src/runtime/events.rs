//! Kubernetes events: said once, never waited for.
//!
//! # Guarantees
//! - [`Events::publish`] returns at once. When the queue is full the event is dropped and counted: an event is help for
//!   people, never worth holding up work.
//! - The same sentence about the same object is said at most once per [`REPEAT`], and for one reason at most
//!   [`DIFFERENT`] different ones, so neither a flapping state nor a changing number in it can flood the API server.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

/// A thousand nodes joining at once, one event each, and some room.
const QUEUE: usize = 2048;
const CALL: Duration = Duration::from_secs(5);
/// Before an event is tried once more.
const PAUSE: Duration = Duration::from_secs(1);
/// How long the same sentence is not repeated.
const REPEAT: Duration = Duration::from_secs(300);
/// Sentences about one object for one reason in that time.
const DIFFERENT: usize = 10;
/// Objects and reasons remembered; beyond that the memory is cleared and some things are said twice.
const REMEMBERED: usize = 10_000;
/// The API server refuses longer ones.
const LONGEST: usize = 1024;

/// One sentence about one object.
struct Notice {
    regarding: ObjectReference,
    event: Event,
}

/// Where features say what they did; cheap to clone.
#[derive(Clone, Debug)]
pub struct Events {
    queue: mpsc::Sender<Notice>,
    dropped: Counter,
}

impl Events {
    /// The handle, and the task that sends.
    pub fn prepare(
        client: Client,
        registry: &mut Registry,
        stop: CancellationToken,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let (queue, notices) = mpsc::channel(QUEUE);
        let dropped = Counter::default();
        registry.register("groundcrew_events_dropped", "Events not sent because too many waited", dropped.clone());
        let instance = std::env::var("POD_NAME").ok();
        let recorder = Recorder::new(client, Reporter { controller: "groundcrew".to_owned(), instance });
        let events = Self { queue, dropped };
        (events, async move {
            stop.run_until_cancelled(send_all(recorder, notices)).await.unwrap_or(());
        })
    }

    /// Something went as it should.
    pub fn normal(&self, regarding: ObjectReference, reason: &'static str, note: String) {
        self.publish(regarding, EventType::Normal, reason, note);
    }

    /// Somebody should look at this.
    pub fn warning(&self, regarding: ObjectReference, reason: &'static str, note: String) {
        self.publish(regarding, EventType::Warning, reason, note);
    }

    fn publish(&self, regarding: ObjectReference, type_: EventType, reason: &'static str, mut note: String) {
        note.truncate(note.floor_char_boundary(LONGEST));
        let event =
            Event { type_, reason: reason.to_owned(), note: Some(note), action: reason.to_owned(), secondary: None };
        if self.queue.try_send(Notice { regarding, event }).is_err() {
            self.dropped.inc();
        }
    }
}

/// Object and reason. The uid, because a new object under an old name has its own story.
type Topic = (Option<String>, Option<String>, Option<String>, Option<String>, String);

/// What was said of late.
#[derive(Debug, Default)]
struct Said(HashMap<Topic, Vec<(Option<String>, Instant)>>);

impl Said {
    /// Whether this is worth saying now; if so it counts as said.
    fn is_news(&mut self, notice: &Notice, now: Instant) -> bool {
        let Notice { regarding, event } = notice;
        let ObjectReference { kind, namespace, name, uid, .. } = regarding.clone();
        let topic = (kind, namespace, name, uid, event.reason.clone());
        let recent = |at: &Instant| now - *at < REPEAT;
        if self.0.len() >= REMEMBERED && !self.0.contains_key(&topic) {
            self.0.retain(|_, notes| notes.iter().any(|(_, at)| recent(at)));
        }
        if self.0.len() >= REMEMBERED && !self.0.contains_key(&topic) {
            self.0.clear();
        }
        let notes = self.0.entry(topic).or_default();
        notes.retain(|(_, at)| recent(at));
        let news = notes.len() < DIFFERENT && notes.iter().all(|(note, _)| *note != event.note);
        if news {
            notes.push((event.note.clone(), now));
        }
        news
    }
}

async fn send_all(recorder: Recorder, mut notices: mpsc::Receiver<Notice>) {
    let mut said = Said::default();
    while let Some(notice) = notices.recv().await {
        if said.is_news(&notice, Instant::now()) && send(&recorder, &notice).await.is_err() {
            sleep(PAUSE).await;
            // It counts as said, so this is its last chance for a while.
            if let Err(error) = send(&recorder, &notice).await {
                warn!(reason = notice.event.reason, error, "event not sent");
            }
        }
    }
}

/// Why it may help to try again; what is refused is refused for good.
async fn send(recorder: &Recorder, Notice { event, regarding }: &Notice) -> Result<(), String> {
    match timeout(CALL, recorder.publish(event, regarding)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(kube::Error::Api(status))) if (400..500).contains(&status.code) && status.code != 429 => {
            let (reason, error) = (&event.reason, &status.message);
            // A namespace on its way out takes no events.
            match matches!(status.code, 403 | 404) {
                true => debug!(reason, error, "event not taken"),
                false => warn!(reason, error, "event not taken"),
            }
            Ok(())
        }
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("no answer in time".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use http::Response;
    use kube::client::Body;
    use tower::service_fn;

    use super::*;

    fn object(name: &str) -> ObjectReference {
        ObjectReference { kind: Some("Node".into()), name: Some(name.into()), ..ObjectReference::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn the_same_sentence_is_said_once_in_five_minutes() {
        let sent: Arc<Mutex<usize>> = Arc::default();
        let counted = Arc::clone(&sent);
        let service = service_fn(move |_: http::Request<Body>| {
            *counted.lock().unwrap() += 1;
            async { Ok::<_, std::convert::Infallible>(Response::new(Body::from(b"{\"metadata\":{}}".to_vec()))) }
        });
        let stop = CancellationToken::new();
        let (events, task) = Events::prepare(Client::new(service, "default"), &mut Registry::default(), stop.clone());
        let task = tokio::spawn(task);
        for _ in 0..50 {
            events.normal(object("a"), "Held", "waiting".into());
        }
        events.normal(object("b"), "Held", "waiting".into());
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(*sent.lock().unwrap(), 2);
        tokio::time::sleep(REPEAT).await;
        events.normal(object("a"), "Held", "waiting".into());
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(*sent.lock().unwrap(), 3);
        stop.cancel();
        task.await.unwrap();
    }

    #[rstest::rstest]
    #[case::a_server_in_trouble(503, 2)]
    #[case::too_many_requests(429, 2)]
    #[case::a_namespace_on_its_way_out(403, 1)]
    #[case::a_bad_event(422, 1)]
    #[tokio::test(start_paused = true)]
    async fn an_event_that_was_not_taken_is_sent_once_more_if_that_may_help(#[case] code: u16, #[case] times: usize) {
        let sent: Arc<Mutex<usize>> = Arc::default();
        let counted = Arc::clone(&sent);
        let service = service_fn(move |_: http::Request<Body>| {
            *counted.lock().unwrap() += 1;
            let status = format!("{{\"kind\":\"Status\",\"status\":\"Failure\",\"code\":{code}}}");
            let answer = Response::builder().status(code).body(Body::from(status.into_bytes())).unwrap();
            async { Ok::<_, std::convert::Infallible>(answer) }
        });
        let stop = CancellationToken::new();
        let (events, task) = Events::prepare(Client::new(service, "default"), &mut Registry::default(), stop.clone());
        let task = tokio::spawn(task);
        events.normal(object("a"), "Held", "waiting".into());
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(*sent.lock().unwrap(), times);
        stop.cancel();
        task.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_sentence_that_keeps_changing_is_cut_short_and_a_new_object_is_heard() {
        let mut said = Said::default();
        let notice = |uid: &str, note: String| {
            let event = Event {
                type_: EventType::Normal,
                reason: "Held".into(),
                note: Some(note),
                action: "Held".into(),
                secondary: None,
            };
            Notice { regarding: ObjectReference { uid: Some(uid.into()), ..object("a") }, event }
        };
        let now = Instant::now();
        let heard = (0..100).filter(|n| said.is_news(&notice("1", format!("waiting for {n}")), now)).count();
        assert_eq!(heard, DIFFERENT);
        assert!(said.is_news(&notice("2", "waiting for 0".into()), now));
        assert!(said.is_news(&notice("1", "waiting for 0".into()), now + REPEAT));
    }

    #[tokio::test]
    async fn a_full_queue_drops_and_counts_instead_of_waiting() {
        let service = service_fn(async |_: http::Request<Body>| {
            std::future::pending::<Result<Response<Body>, std::convert::Infallible>>().await
        });
        let stop = CancellationToken::new();
        let (events, _task) = Events::prepare(Client::new(service, "default"), &mut Registry::default(), stop);
        for i in 0..QUEUE + 7 {
            events.warning(object(&i.to_string()), "Many", "m".into());
        }
        assert_eq!(events.dropped.get(), 7);
    }
}
