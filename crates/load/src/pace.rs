//! Waiting for a moment to well under a millisecond.
//!
//! The runtime's timers tick once a millisecond, which at a thousand requests a second is the whole interval. The last
//! stretch is therefore slept by a thread of the blocking pool, which the kernel wakes within some fifty microseconds.

use std::time::Duration;

use tokio::time::Instant;

/// The runtime may wake a millisecond late, so it is asked to wake two early.
const LAST_STRETCH: Duration = Duration::from_millis(2);
/// Requests further apart than this do not show a millisecond, and a thread is not woken for them.
const CLOSE_TOGETHER: Duration = Duration::from_millis(50);

/// One per run.
#[derive(Clone, Copy, Debug)]
pub struct Pacer {
    fine: bool,
}

impl Pacer {
    /// As exact as requests this far apart need.
    #[must_use]
    pub fn for_interval(interval: Duration) -> Self {
        Self { fine: interval <= CLOSE_TOGETHER }
    }

    /// On the runtime's clock alone, which tests can pause.
    #[must_use]
    pub const fn coarse() -> Self {
        Self { fine: false }
    }

    /// Returns at the moment, or at once if it is over.
    pub async fn until(self, moment: Instant) {
        if !self.fine {
            return tokio::time::sleep_until(moment).await;
        }
        if let Some(early) = moment.checked_sub(LAST_STRETCH).filter(|early| *early > Instant::now()) {
            tokio::time::sleep_until(early).await;
        }
        let sleep = move || std::thread::sleep(moment.saturating_duration_since(Instant::now()));
        if moment > Instant::now() && tokio::task::spawn_blocking(sleep).await.is_err() {
            tokio::time::sleep_until(moment).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_moment_is_met_to_under_a_millisecond_most_of_the_time() {
        let pacer = Pacer::for_interval(Duration::from_millis(1));
        let began = Instant::now();
        loop {
            let mut late = Vec::new();
            for _ in 0..50 {
                let moment = Instant::now() + Duration::from_micros(3_300);
                pacer.until(moment).await;
                assert!(Instant::now() >= moment, "never early");
                late.push(moment.elapsed());
            }
            late.sort_unstable();
            if late[25] < Duration::from_millis(1) {
                return;
            }
            // Others may keep the machine busy for a while.
            assert!(began.elapsed() < Duration::from_secs(60), "{late:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_paused_clock_paces_too() {
        let moment = Instant::now() + Duration::from_secs(3600);
        Pacer::coarse().until(moment).await;
        assert!(Instant::now() >= moment);
    }

    #[tokio::test]
    async fn a_moment_in_the_past_is_no_wait() {
        Pacer::for_interval(Duration::from_millis(1)).until(Instant::now() - Duration::from_secs(1)).await;
    }
}
