use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::time::{Instant, sleep};

use super::*;

const S: Duration = Duration::from_secs(1);

fn key(name: &str) -> Key {
    Key { namespace: "ns".into(), name: name.into() }
}

struct Bench {
    changes: Arc<Changes>,
    leader: watch::Sender<bool>,
    stop: CancellationToken,
}

impl Bench {
    fn new(leads: bool) -> Self {
        Self { changes: Arc::default(), leader: watch::Sender::new(leads), stop: CancellationToken::new() }
    }

    fn run<W>(
        &self,
        workers: usize,
        reconcile: impl Fn(Key) -> W + Send + Sync + 'static,
    ) -> tokio::task::JoinHandle<()>
    where
        W: Future<Output = Result<Next, String>> + Send + 'static,
    {
        tokio::spawn(self.queue(workers).run(Arc::clone(&self.changes), reconcile))
    }

    fn queue(&self, workers: usize) -> Queue {
        let (leader, stop) = (self.leader.subscribe(), self.stop.clone());
        Queue { name: "test", workers, leader, stop, there: There::default() }
    }
}

#[tokio::test(start_paused = true)]
async fn one_key_is_never_in_two_workers_and_a_change_meanwhile_is_not_lost() {
    let bench = Bench::new(true);
    let (now, most, runs) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (n, m, r) = (Arc::clone(&now), Arc::clone(&most), Arc::clone(&runs));
    bench.run(8, move |_| {
        let (now, most, runs) = (Arc::clone(&n), Arc::clone(&m), Arc::clone(&r));
        async move {
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            sleep(S).await;
            now.fetch_sub(1, Ordering::SeqCst);
            runs.fetch_add(1, Ordering::SeqCst);
            Ok(Next::Change)
        }
    });
    for _ in 0..5 {
        bench.changes.mark(key("a"));
        sleep(S / 10).await;
    }
    sleep(5 * S).await;
    assert_eq!((most.load(Ordering::SeqCst), runs.load(Ordering::SeqCst)), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn no_more_run_at_once_than_there_are_workers() {
    let bench = Bench::new(true);
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (n, m) = (Arc::clone(&now), Arc::clone(&most));
    bench.run(3, move |_| {
        let (now, most) = (Arc::clone(&n), Arc::clone(&m));
        async move {
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            sleep(S).await;
            now.fetch_sub(1, Ordering::SeqCst);
            Ok(Next::Change)
        }
    });
    (0..20).for_each(|i| bench.changes.mark(key(&i.to_string())));
    sleep(20 * S).await;
    assert_eq!(most.load(Ordering::SeqCst), 3);
}

#[tokio::test(start_paused = true)]
async fn nothing_starts_before_leading_and_what_waited_is_done_then() {
    let bench = Bench::new(false);
    let done: Arc<Mutex<Vec<String>>> = Arc::default();
    let seen = Arc::clone(&done);
    bench.run(2, move |key| {
        seen.lock().unwrap().push(key.name);
        async { Ok(Next::Change) }
    });
    bench.changes.mark(key("a"));
    sleep(S).await;
    assert!(done.lock().unwrap().is_empty());
    bench.leader.send_replace(true);
    sleep(S).await;
    assert_eq!(*done.lock().unwrap(), ["a"]);
    bench.leader.send_replace(false);
    sleep(S).await;
    bench.changes.mark(key("b"));
    sleep(S).await;
    assert_eq!(*done.lock().unwrap(), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn who_does_not_lead_forgets_what_is_gone_and_nothing_else() {
    let bench = Bench::new(false);
    let done: Arc<Mutex<Vec<String>>> = Arc::default();
    let seen = Arc::clone(&done);
    let queue = bench.queue(2).forgetting(|key| key.name.starts_with("stays"));
    tokio::spawn(queue.run(Arc::clone(&bench.changes), move |key| {
        seen.lock().unwrap().push(key.name);
        async { Ok::<_, String>(Next::Change) }
    }));
    for at in 0..10_000 {
        bench.changes.mark(key(&format!("{}-{at}", if at % 1000 == 0 { "stays" } else { "goes" })));
    }
    sleep(2 * TIDY_EVERY).await;
    assert_eq!(bench.changes.len(), 10);
    bench.changes.mark(key("goes-1"));
    bench.leader.send_replace(true);
    sleep(2 * TIDY_EVERY).await;
    let mut done = done.lock().unwrap().clone();
    assert_eq!(done.pop().as_deref(), Some("goes-1"), "a leader is told of what went, too");
    assert_eq!(done, (0..10).map(|at| format!("stays-{}", at * 1000)).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn failures_and_panics_come_back_later_and_later_and_block_nobody() {
    let bench = Bench::new(true);
    let times: Arc<Mutex<Vec<Instant>>> = Arc::default();
    let seen = Arc::clone(&times);
    bench.run(1, move |key| {
        let seen = Arc::clone(&seen);
        async move {
            if key.name != "bad" {
                return Ok(Next::Change);
            }
            let mut times = seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            times.push(Instant::now());
            assert!(times.len() != 2, "on purpose");
            Err("no".to_owned())
        }
    });
    bench.changes.mark(key("bad"));
    sleep(30 * S).await;
    let times = times.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let gaps: Vec<Duration> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.len() >= 4 && gaps[3] > 2 * gaps[0], "{gaps:?}");
}

#[tokio::test(start_paused = true)]
async fn a_change_does_not_wait_for_the_appointed_time() {
    let bench = Bench::new(true);
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&runs);
    bench.run(1, move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
        async { Ok(Next::After(60 * S)) }
    });
    bench.changes.mark(key("a"));
    sleep(S).await;
    bench.changes.mark(key("a"));
    sleep(S).await;
    assert_eq!(runs.load(Ordering::SeqCst), 2);
    sleep(60 * S).await;
    assert_eq!(runs.load(Ordering::SeqCst), 3);
}

#[tokio::test(start_paused = true)]
async fn work_under_way_is_finished_at_the_end() {
    let bench = Bench::new(true);
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&runs);
    let running = bench.run(1, move |_| {
        let counted = Arc::clone(&counted);
        async move {
            sleep(S).await;
            counted.fetch_add(1, Ordering::SeqCst);
            Ok(Next::Change)
        }
    });
    bench.changes.mark(key("a"));
    sleep(S / 2).await;
    bench.stop.cancel();
    running.await.unwrap();
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}
