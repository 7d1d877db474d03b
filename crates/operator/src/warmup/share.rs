//! A node's places and its requests per second, shared between the warm-ups of this process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use groundcrew_core::warmup::fair::{Move, Places, Rate};
use groundcrew_load::engine::Throttle;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout};

/// Where one warm-up stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Waiting,
    Running,
    Suspended,
}

/// Told apart by number: a pod may be warmed again before its last warm-up has left.
pub(super) type Ticket = u64;

#[derive(Debug)]
struct State {
    places: Places<Ticket>,
    seats: HashMap<Ticket, watch::Sender<Place>>,
    next: Ticket,
}

/// One per agent; cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Share {
    state: Arc<Mutex<State>>,
    rate: Arc<Mutex<Rate<oneshot::Sender<()>>>>,
    changed: Arc<Notify>,
    origin: Instant,
}

impl Share {
    pub(super) fn new(max_concurrent: usize, max_rps: u32) -> Self {
        let state = State { places: Places::new(max_concurrent), seats: HashMap::new(), next: 0 };
        Self {
            state: Arc::new(Mutex::new(state)),
            rate: Arc::new(Mutex::new(Rate::new(max_rps, Duration::ZERO))),
            changed: Arc::default(),
            origin: Instant::now(),
        }
    }

    fn now(&self) -> Duration {
        self.origin.elapsed()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues up; dropping the seat leaves the queue or gives the place to the next. `patience` is how long it may be
    /// without a place in all.
    pub(super) fn join(&self, namespace: &str, patience: Duration) -> Seat {
        let (sender, place) = watch::channel(Place::Waiting);
        let mut state = self.state();
        let ticket = state.next;
        state.next += 1;
        state.seats.insert(ticket, sender);
        state.places.add(namespace, ticket, self.now());
        settle(&mut state, self.now());
        drop(state);
        self.changed.notify_one();
        Seat { share: self.clone(), ticket, place, namespace: namespace.to_owned(), patience: Mutex::new(patience) }
    }

    /// Ends turns and hands out tokens when their time has come; runs for ever.
    pub(super) async fn keep(self) {
        loop {
            let now = self.now();
            let turn = {
                let mut state = self.state();
                settle(&mut state, now);
                state.places.next_turn()
            };
            let grant = {
                let mut rate = self.rate.lock().unwrap_or_else(PoisonError::into_inner);
                while let Some(ticket) = rate.grant(now) {
                    if ticket.send(()).is_err() {
                        rate.give_back();
                    }
                }
                rate.next_grant()
            };
            let wake = turn.into_iter().chain(grant).min().map(|at| self.origin + at.max(now + MIN_SLEEP));
            tokio::select! {
                () = self.changed.notified() => {}
                () = async { sleep_until(wake.unwrap_or_else(Instant::now)).await }, if wake.is_some() => {}
            }
        }
    }
}

/// Timers tick once a millisecond; asking for less would spin.
const MIN_SLEEP: Duration = Duration::from_millis(1);

fn settle(state: &mut State, now: Duration) {
    for step in state.places.settle(now) {
        let (ticket, place) = match step {
            Move::Start(ticket) | Move::Resume(ticket) => (ticket, Place::Running),
            Move::Suspend(ticket) => (ticket, Place::Suspended),
        };
        if let Some(seat) = state.seats.get(&ticket) {
            seat.send_replace(place);
        }
    }
}

/// One warm-up's claim.
#[derive(Debug)]
pub(super) struct Seat {
    share: Share,
    ticket: Ticket,
    place: watch::Receiver<Place>,
    namespace: String,
    patience: Mutex<Duration>,
}

impl Seat {
    /// Returns when it may begin or go on; false when it has been without a place for too long.
    pub(super) async fn begins(&self) -> bool {
        let mut place = self.place.clone();
        let (since, left) = (Instant::now(), *self.patience());
        // The sender lives as long as the seat.
        let begun = timeout(left, place.wait_for(|place| *place == Place::Running)).await.is_ok();
        *self.patience() = left.saturating_sub(since.elapsed());
        begun
    }

    fn patience(&self) -> MutexGuard<'_, Duration> {
        self.patience.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    fn waits(&self) -> bool {
        *self.place.borrow() == Place::Waiting
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut state = self.share.state();
        state.seats.remove(&self.ticket);
        let now = self.share.now();
        state.places.remove(&self.ticket, now);
        settle(&mut state, now);
        drop(state);
        self.share.changed.notify_one();
    }
}

impl Throttle for Seat {
    async fn resumed(&self) -> Option<Duration> {
        if *self.place.borrow() != Place::Suspended {
            return Some(Duration::ZERO);
        }
        let since = Instant::now();
        self.begins().await.then(|| since.elapsed())
    }

    async fn permit(&self) {
        let turn = {
            let mut rate = self.share.rate.lock().unwrap_or_else(PoisonError::into_inner);
            if rate.try_take(self.share.now()) {
                return;
            }
            let (sender, turn) = oneshot::channel();
            rate.wait(&self.namespace, sender);
            turn
        };
        self.share.changed.notify_one();
        // An error would mean that nobody keeps the rate any more; then nobody limits it either.
        let _ = turn.await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(300);

    #[tokio::test(start_paused = true)]
    async fn a_place_goes_to_the_next_when_its_seat_is_dropped() {
        let share = Share::new(1, 100);
        let (first, second) = (share.join("a", LONG), share.join("a", LONG));
        assert!(!first.waits() && second.waits());
        drop(first);
        assert!(!second.waits());
    }

    #[tokio::test(start_paused = true)]
    async fn a_suspended_one_goes_on_and_knows_for_how_long_it_stood() {
        let share = Share::new(2, 100);
        let (_a, b) = (share.join("x", LONG), share.join("x", LONG));
        let other = share.join("y", LONG);
        assert!(!other.waits(), "the other namespace gets its share at once");
        let stood = tokio::spawn(async move { b.resumed().await });
        tokio::time::sleep(Duration::from_secs(5)).await;
        drop(other);
        assert!(stood.await.unwrap() >= Some(Duration::from_secs(5)));
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_is_without_a_place_for_longer_than_it_may_be() {
        let share = Share::new(1, 100);
        let first = share.join("x", LONG);
        let second = share.join("x", Duration::from_secs(7));
        let began = Instant::now();
        assert!(!second.begins().await);
        assert_eq!(began.elapsed(), Duration::from_secs(7));
        drop(second);
        // What it waited before it began counts when it is set aside later.
        let third = share.join("x", Duration::from_secs(10));
        tokio::time::sleep(Duration::ZERO).await;
        let waiting = tokio::spawn(async move { (third.begins().await, third) });
        tokio::time::sleep(Duration::from_secs(6)).await;
        drop(first);
        let (begun, third) = waiting.await.unwrap();
        assert!(begun);
        tokio::spawn(share.clone().keep());
        let _turns = share.join("y", LONG);
        tokio::time::sleep(Duration::from_secs(11)).await;
        let set_aside = Instant::now();
        assert_eq!(third.resumed().await, None);
        assert_eq!(set_aside.elapsed(), Duration::from_secs(4));
    }

    #[tokio::test(start_paused = true)]
    async fn requests_per_second_hold_for_all_together() {
        let share = Share::new(10, 100);
        tokio::spawn(share.clone().keep());
        let started = Instant::now();
        let senders = ["a", "b", "c"].map(|namespace| {
            let seat = share.join(namespace, LONG);
            tokio::spawn(async move {
                for _ in 0..100 {
                    seat.permit().await;
                }
            })
        });
        for sender in senders {
            sender.await.unwrap();
        }
        let took = started.elapsed();
        assert!(took >= Duration::from_millis(2_800) && took < Duration::from_millis(3_600), "{took:?}");
    }
}
