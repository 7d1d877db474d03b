use futures::channel::mpsc;
use http_body_util::StreamBody;
use hyper::body::Frame;
use tokio::task::JoinHandle;

use super::*;

type Sender = mpsc::UnboundedSender<Result<Frame<Bytes>, std::convert::Infallible>>;

const KIB: usize = 1 << 10;
const LIMIT: usize = 256 * KIB;

fn limits() -> Limits {
    Limits { budget: Budget::new(LIMIT), ..Limits::default() }
}

fn post(body: Body) -> Request<Body> {
    Request::post("/").header(CONTENT_TYPE, "application/json").body(body).unwrap()
}

/// A body that has begun and goes on when the sender says so.
async fn begun(limits: &Limits, bytes: usize) -> (Sender, JoinHandle<Result<Bytes, Refusal>>) {
    let (sender, frames) = mpsc::unbounded();
    let before = limits.budget.used();
    sender.unbounded_send(Ok(Frame::data(Bytes::from(vec![b' '; bytes])))).unwrap();
    let (body, limits) = (Body::new(StreamBody::new(frames)), limits.clone());
    let budget = limits.budget.clone();
    let reading = tokio::spawn(async move { read(post(body), &limits).await });
    while budget.used() == before {
        tokio::task::yield_now().await;
    }
    (sender, reading)
}

#[tokio::test(start_paused = true)]
async fn many_half_sent_bodies_hold_no_more_than_the_budget_and_a_normal_one_is_read() {
    let limits = limits();
    let mut half_sent = Vec::new();
    for count in 1..=100 {
        half_sent.push(begun(&limits, 7 * KIB + count).await);
        assert!(limits.budget.used() <= LIMIT, "{} bytes are held", limits.budget.used());
    }
    let normal = read(post(Body::from("{}")), &limits).await.unwrap();
    assert_eq!(normal, "{}");
    let (_, first) = half_sent.remove(0);
    assert!(matches!(first.await.unwrap(), Err(Refusal::Crowded)));
    let (sender, last) = half_sent.pop().unwrap();
    drop(sender);
    assert_eq!(last.await.unwrap().unwrap().len(), 7 * KIB + 100, "who came last was not in anybody's way");
}

#[tokio::test(start_paused = true)]
async fn what_a_body_held_is_given_back_however_it_ends() {
    let limits = limits();
    let (whole, read_whole) = begun(&limits, KIB).await;
    let (broken_off, gone) = begun(&limits, 2 * KIB).await;
    let (_silent, too_slow) = begun(&limits, 3 * KIB).await;
    drop(whole);
    assert!(read_whole.await.unwrap().is_ok());
    gone.abort();
    assert!(gone.await.unwrap_err().is_cancelled());
    drop(broken_off);
    assert!(matches!(too_slow.await.unwrap(), Err(Refusal::TooSlow)));
    assert_eq!(limits.budget.used(), 0);
}

#[tokio::test(start_paused = true)]
async fn one_that_is_larger_than_the_budget_is_refused_while_it_comes() {
    let limits = limits();
    let (sender, reading) = begun(&limits, KIB).await;
    sender.unbounded_send(Ok(Frame::data(Bytes::from(vec![b' '; LIMIT])))).unwrap();
    assert!(matches!(reading.await.unwrap(), Err(Refusal::Crowded)));
    assert_eq!(limits.budget.used(), 0);
}
