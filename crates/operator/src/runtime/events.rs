//! Kubernetes events: said once, never waited for.
//!
//! # Guarantees
//! - [`Events::publish`] returns at once. When the queue is full the event is dropped and counted: an event is help for
//!   people, never worth holding up work.
//! - The same sentence about the same object is said at most once per [`REPEAT`], so a flapping state cannot flood the
//!   API server.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

/// A thousand nodes joining at once, one event each, and some room.
const QUEUE: usize = 2048;
const CALL: Duration = Duration::from_secs(5);
/// How long the same sentence is not repeated.
const REPEAT: Duration = Duration::from_secs(300);
/// Sentences remembered; beyond that the memory is cleared and some are said twice.
const REMEMBERED: usize = 10_000;

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

    fn publish(&self, regarding: ObjectReference, type_: EventType, reason: &'static str, note: String) {
        let event =
            Event { type_, reason: reason.to_owned(), note: Some(note), action: reason.to_owned(), secondary: None };
        if self.queue.try_send(Notice { regarding, event }).is_err() {
            self.dropped.inc();
        }
    }
}

/// Object, reason and sentence.
type Said = (Option<String>, Option<String>, Option<String>, String, Option<String>);

fn said(notice: &Notice) -> Said {
    let Notice { regarding, event } = notice;
    let object = (regarding.kind.clone(), regarding.namespace.clone(), regarding.name.clone());
    (object.0, object.1, object.2, event.reason.clone(), event.note.clone())
}

async fn send_all(recorder: Recorder, mut notices: mpsc::Receiver<Notice>) {
    let mut recent: HashMap<Said, Instant> = HashMap::new();
    while let Some(notice) = notices.recv().await {
        let now = Instant::now();
        let key = said(&notice);
        if recent.get(&key).is_some_and(|at| now - *at < REPEAT) {
            continue;
        }
        if recent.len() >= REMEMBERED {
            recent.retain(|_, at| now - *at < REPEAT);
        }
        if recent.len() >= REMEMBERED {
            recent.clear();
        }
        recent.insert(key, now);
        match timeout(CALL, recorder.publish(&notice.event, &notice.regarding)).await {
            Ok(Ok(())) => {}
            // A namespace on its way out takes no events.
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 403 | 404) => {
                debug!(reason = notice.event.reason, error = %status.message, "event not taken");
            }
            Ok(Err(error)) => warn!(reason = notice.event.reason, %error, "event not sent"),
            Err(_) => warn!(reason = notice.event.reason, "event not sent in time"),
        }
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
