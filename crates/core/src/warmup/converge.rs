//! When a warm-up that runs until latency has flattened may stop.
//!
//! The rolling p95 is taken at three points one step apart. If latency decays towards a floor, two differences give
//! the floor and the pace (Aitken's extrapolation), so the rule knows how far the *next* request still is above it and
//! needs no guess of its own about the service.
//!
//! ```text
//! p95 │x0
//!     │ ·  x1                stop: next request ≤ floor · (1 + TOLERANCE),
//!     │    ·    x2           seen so for a twentieth of the requests
//!     │         ·  ·  ·  ·
//!     └──┴────┴────┴───────► requests          windows end at n/3, 2n/3, n
//! ```
//!
//! Assumptions: three windows of three requests are the least that shows a curve, so a service that is warm after fewer
//! than nine requests gets a few more than it needs. Noise costs requests, never warmth: the curve is believed only
//! where the noise leaves less than half the tolerance in doubt. Where it never does, the service counts as flat once
//! no trend is left that is larger than the noise, which takes some 250 requests.

use std::time::Duration;

use serde::Serialize;

/// Warm means within this share of the floor: below it users notice nothing, above it they wait for nothing.
pub const TOLERANCE: f64 = 0.05;
const MIN_WINDOW: usize = 3;
/// Fewer requests show no curve.
const MIN_SAMPLES: usize = 3 * MIN_WINDOW;
/// It takes more of them to tell a slow descent from a flat line.
const MIN_SAMPLES_OF_A_LINE: usize = 48;
/// A p95 of normal noise is off by some twice the noise of a mean; twice that is rarely exceeded.
const DOUBT: f64 = 4.0;
/// Three p95s of a flat line are seldom further apart than this many doubts.
const LINE: f64 = 1.5;
/// What "cold" is measured on.
const COLD_SAMPLES: usize = 10;

/// Latencies in the order the requests were sent, and how long they have looked flat.
#[derive(Clone, Debug, Default)]
pub struct Curve {
    micros: Vec<f64>,
    flat_since: Option<usize>,
}

/// What a warm-up in `converge` mode has to tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Summary {
    pub flattened: bool,
    pub cold_p95: Duration,
    pub warm_p95: Duration,
}

impl Curve {
    /// Adds the latency of one request that succeeded; true means that the next one is not needed.
    pub fn push(&mut self, latency: Duration) -> bool {
        self.micros.push(latency.as_secs_f64() * 1e6);
        let n = self.micros.len();
        // Looking now and then keeps twelve thousand requests cheap and moves the stop by under 2 %.
        if n >= MIN_SAMPLES && n.is_multiple_of((n / 64).max(1)) {
            let flat = self.is_flat();
            self.flat_since = if flat { self.flat_since.or(Some(n)) } else { None };
        }
        self.has_flattened()
    }

    fn has_flattened(&self) -> bool {
        let n = self.micros.len();
        // One lucky window is not a floor.
        self.flat_since.is_some_and(|since| n - since >= (n / 20).max(1))
    }

    #[must_use]
    pub fn summary(&self) -> Summary {
        let n = self.micros.len();
        let cold = self.micros.get(..COLD_SAMPLES.min(n)).unwrap_or_default();
        let warm = self.micros.get(n - window(n).max(COLD_SAMPLES).min(n)..).unwrap_or_default();
        let p95 = |samples| Duration::from_nanos((p95(samples) * 1e3) as u64);
        Summary { flattened: self.has_flattened(), cold_p95: p95(cold), warm_p95: p95(warm) }
    }

    fn is_flat(&self) -> bool {
        let n = self.micros.len();
        let (step, width) = (n / 3, window(n));
        let at = |end: usize| p95(self.micros.get(end - width..end).unwrap_or_default());
        let (x0, x1, x2) = (at(n - 2 * step), at(n - step), at(n));
        let noise = noise(self.micros.get(n - 2 * step - width..).unwrap_or_default());
        let doubt = DOUBT * noise / (width as f64).sqrt();
        let visible = x2 * TOLERANCE / 2.0;
        let trend = x0.max(x1).max(x2) - x0.min(x1).min(x2);
        if trend == 0.0 {
            return true;
        }
        if n >= MIN_SAMPLES_OF_A_LINE && trend <= doubt * LINE && (trend + doubt <= visible || doubt <= noise / 2.0) {
            return true;
        }
        doubt <= visible && decays_to_its_floor(x0, x1, x2, doubt, p95_rank(width) as f64 / step as f64)
    }
}

/// Whether the next request is close to where the three points lead. `behind`: how many steps old the last point is,
/// since the p95 of a falling window is one of its oldest samples.
fn decays_to_its_floor(x0: f64, x1: f64, x2: f64, doubt: f64, behind: f64) -> bool {
    // The slowest pace that the doubt allows: stopping late costs a few requests, stopping early the whole point.
    let (first, second) = (x0 - x1 - doubt, (x1 - x2).max(0.0) + doubt);
    let ratio = second / first;
    if !(first > 0.0 && ratio < 1.0) {
        return false;
    }
    let floor = x2 - second * ratio / (1.0 - ratio);
    let excess = (x2 - floor) * ratio.powf(behind);
    floor > 0.0 && excess <= floor * TOLERANCE
}

/// The scatter around the curve, as a standard deviation. Fourth differences leave out even a steep descent.
fn noise(samples: &[f64]) -> f64 {
    // Of normal noise with deviation 1 they have the deviation √70, and a mean size of 0.8 of that.
    const SIZE: f64 = 6.69;
    let sum: f64 = samples.windows(5).map(fourth_difference).map(f64::abs).sum();
    sum / samples.len().saturating_sub(4).max(1) as f64 / SIZE
}

fn fourth_difference(window: &[f64]) -> f64 {
    window.iter().zip([1.0, -4.0, 6.0, -4.0, 1.0]).map(|(sample, weight)| sample * weight).sum()
}

/// Grows with the run, so that its lag stays a fixed share of it.
fn window(n: usize) -> usize {
    (n / 4).max(MIN_WINDOW)
}

fn p95_rank(len: usize) -> usize {
    (len * 95).div_ceil(100)
}

fn p95(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    let rank = p95_rank(sorted.len()).saturating_sub(1);
    if rank >= sorted.len() {
        return 0.0;
    }
    *sorted.select_nth_unstable_by(rank, f64::total_cmp).1
}

#[cfg(test)]
mod tests;
