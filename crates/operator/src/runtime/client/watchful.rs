//! A client for lists and watches that notices when nobody answers any more.
//!
//! The watcher above has no timeout on a request whose answer never begins or on a list that stops half way, and asks
//! again at once, for ever, when a watch ends as soon as it has begun. Here, below it, both are bounded, whatever the
//! connection below is made of.

use std::{
    collections::HashMap,
    io,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Uri};
use hyper::body::{Body as HttpBody, Frame};
use kube::{Client, client::Body};
use tokio::time::{Instant, Sleep, sleep, timeout};
use tower::{BoxError, service_fn};

/// A page of 500 objects from a busy server begins well before this.
const ANSWER: Duration = Duration::from_secs(20);
/// A watch normally lasts for its whole timeout; this many may be started at once, then one per [`PACE`].
const BURST: u32 = 5;
const PACE: Duration = Duration::from_secs(1);

/// Wraps `client`: an answer begins within 20 s and is never silent for longer than `silence`.
pub(super) fn watchful(client: Client, silence: Duration) -> Client {
    let namespace = client.default_namespace().to_owned();
    let pace = Arc::new(Pace::default());
    let service = service_fn(move |request: Request<Body>| {
        let (client, pace) = (client.clone(), Arc::clone(&pace));
        async move {
            sleep(pace.wait(request.uri())).await;
            let answer = timeout(ANSWER, client.send(request)).await.map_err(|_| silent("no answer"))??;
            Ok::<_, BoxError>(answer.map(|body| Listening::new(body, silence)))
        }
    });
    Client::new(service, namespace)
}

fn silent(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("{what} from the API server"))
}

/// When the next watch of each kind may start.
#[derive(Debug, Default)]
struct Pace(Mutex<HashMap<String, Instant>>);

impl Pace {
    fn wait(&self, uri: &Uri) -> Duration {
        if !uri.query().is_some_and(|query| query.contains("watch=true")) {
            return Duration::ZERO;
        }
        let now = Instant::now();
        let mut next = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let due = next.entry(uri.path().to_owned()).or_insert(now);
        *due = (*due).max(now) + PACE;
        due.saturating_duration_since(now + PACE * BURST)
    }
}

/// A body that ends in an error when it has been silent for too long.
struct Listening {
    body: Body,
    silence: Duration,
    timer: Pin<Box<Sleep>>,
    ended: bool,
}

impl Listening {
    fn new(body: Body, silence: Duration) -> Self {
        Self { body, silence, timer: Box::pin(sleep(silence)), ended: false }
    }
}

impl HttpBody for Listening {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            let until = Instant::now() + self.silence;
            self.timer.as_mut().reset(until);
            return Poll::Ready(frame.map(|frame| frame.map_err(BoxError::from)));
        }
        ready!(self.timer.as_mut().poll(context));
        self.ended = true;
        Poll::Ready(Some(Err(silent("no news").into())))
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::Response;

    use super::*;

    fn stuck_after(lines: &'static [&'static str]) -> Client {
        let service = service_fn(move |_: Request<Body>| async move {
            let frames = lines.iter().map(|line| Ok::<_, Infallible>(Frame::data(Bytes::from_static(line.as_bytes()))));
            let body = futures::StreamExt::chain(futures::stream::iter(frames), futures::stream::pending());
            Ok::<_, Infallible>(Response::new(http_body_util::StreamBody::new(body)))
        });
        Client::new(service, "default")
    }

    fn get(uri: &str) -> Request<Vec<u8>> {
        Request::get(uri).body(Vec::new()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_that_stops_half_way_ends_in_an_error() {
        let client = watchful(stuck_after(&["{\"items\":"]), Duration::from_secs(35));
        let start = Instant::now();
        client.request_text(get("/api/v1/pods")).await.unwrap_err();
        assert_eq!(start.elapsed().as_secs(), 35);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_is_never_answered_ends_in_an_error() {
        let service =
            service_fn(async |_: Request<Body>| std::future::pending::<Result<Response<Body>, Infallible>>().await);
        let client = watchful(Client::new(service, "default"), Duration::from_secs(35));
        let start = Instant::now();
        client.request_text(get("/api/v1/pods")).await.unwrap_err();
        assert_eq!(start.elapsed(), ANSWER);
    }

    #[tokio::test(start_paused = true)]
    async fn watches_that_end_at_once_are_not_asked_for_at_once_for_ever() {
        let service = service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::empty())));
        let client = watchful(Client::new(service, "default"), Duration::from_secs(35));
        let start = Instant::now();
        for _ in 0..20 {
            client.request_text(get("/api/v1/pods?&watch=true")).await.unwrap();
            client.request_text(get("/api/v1/pods?limit=500")).await.unwrap();
        }
        assert_eq!(start.elapsed().as_secs(), 15);
        sleep(Duration::from_secs(60)).await;
        let start = Instant::now();
        client.request_text(get("/api/v1/pods?&watch=true")).await.unwrap();
        assert_eq!(start.elapsed().as_millis(), 0);
    }
}
