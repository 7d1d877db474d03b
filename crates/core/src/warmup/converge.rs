//! When a warm-up that runs until latency has flattened may stop.
//!
//! The rolling p95 is taken at three points one step apart. If latency decays towards a floor, two differences give
//! the floor and the pace (Aitken's extrapolation), so the rule knows how far the *next* request still is above it and
//! needs no guess of its own about the service. Where noise hides the curve, no trend beyond the noise is flat enough.
//!
//! ```text
//! p95 │x0
//!     │ ·  x1                stop: next request ≤ floor · (1 + TOLERANCE),
//!     │    ·    x2           seen so for a twentieth of the requests
//!     │         ·  ·  ·  ·
//!     └──┴────┴────┴───────► requests          windows end at n/3, 2n/3, n
//! ```

use std::time::Duration;

use serde::Serialize;

/// Warm means within this share of the floor: below it users notice nothing, above it they wait for nothing.
pub const TOLERANCE: f64 = 0.05;
/// Fewer requests show no curve.
const MIN_SAMPLES: usize = 12;
/// With noise it takes more of them to tell a slow descent from a flat line.
const MIN_SAMPLES_IN_NOISE: usize = 48;
const MIN_WINDOW: usize = 4;
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
        self.flat_since.is_some_and(|since| n - since >= (n / 20).max(2))
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
        if x0 == x1 && x1 == x2 {
            return true;
        }
        let doubt = self.noise() / (width as f64).sqrt();
        if n >= MIN_SAMPLES_IN_NOISE && (x0 - x2).abs() <= doubt {
            return true;
        }
        let (first, second) = (x0 - x1 - doubt, (x1 - x2).max(0.0) + doubt);
        // The slowest pace that the doubt allows: stopping late costs a few requests, stopping early the whole point.
        let ratio = second / first;
        if !(first > 0.0 && ratio < 1.0) {
            return false;
        }
        let floor = x2 - second * ratio / (1.0 - ratio);
        // The p95 of a falling window is one of its oldest samples; the next request is that much further down.
        let behind = p95_rank(width) as f64 / step as f64;
        let excess = (x2 - floor) * ratio.powf(behind);
        floor > 0.0 && excess <= floor * TOLERANCE
    }

    /// The scatter around the curve. Second differences leave out the descent itself.
    fn noise(&self) -> f64 {
        let n = self.micros.len();
        let tail = self.micros.get(n / 3..).unwrap_or_default();
        let triples = tail.iter().zip(tail.iter().skip(1)).zip(tail.iter().skip(2));
        let sum: f64 = triples.map(|((a, b), c)| (a - 2.0 * b + c).abs()).sum();
        sum / tail.len().saturating_sub(2).max(1) as f64
    }
}

/// Grows with the run, so that its lag stays a fixed share of it.
fn window(n: usize) -> usize {
    (n / 8).max(MIN_WINDOW)
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
mod tests {
    use super::*;

    const FLOOR: f64 = 10_000.0;

    fn stop_of(budget: usize, mut latency: impl FnMut(usize) -> f64) -> (usize, Summary) {
        let mut curve = Curve::default();
        let stop = (0..budget).find(|n| curve.push(Duration::from_nanos((latency(*n) * 1e3) as u64)));
        (stop.map_or(budget, |n| n + 1), curve.summary())
    }

    /// Where a + b·e^(−n/k) comes within the tolerance of a.
    fn knee(b: f64, k: f64) -> f64 {
        (k * (b / TOLERANCE).ln()).max(MIN_SAMPLES as f64)
    }

    #[test]
    fn it_stops_within_15_percent_of_the_analytic_knee_on_every_curve() {
        let mut missed = Vec::new();
        for b in [1.0, 2.0, 5.0, 10.0, 30.0, 100.0] {
            for k in [10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0] {
                let knee = knee(b, k);
                let (stop, summary) = stop_of(12_000, |n| FLOOR * (1.0 + b * (-(n as f64) / k).exp()));
                let off = stop as f64 / knee - 1.0;
                if off.abs() > 0.15 || !summary.flattened {
                    missed.push(format!("b={b} k={k}: stopped at {stop}, knee {knee:.0} ({:+.0} %)", off * 100.0));
                }
            }
        }
        assert!(missed.is_empty(), "{missed:#?}");
    }

    #[test]
    fn noise_moves_the_stop_but_not_far() {
        let mut missed = Vec::new();
        for b in [2.0, 5.0, 10.0, 30.0] {
            for k in [20.0, 50.0, 100.0, 300.0] {
                // A multiplicative generator is noise enough and repeats itself exactly.
                let mut state = 88_172_645_463_325_252_u64;
                let mut noise = move || {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 33) as f64 / f64::from(1_u32 << 31) * 0.1 - 0.05
                };
                let knee = knee(b, k);
                let (stop, _) = stop_of(12_000, |n| FLOOR * (1.0 + b * (-(n as f64) / k).exp()) * (1.0 + noise()));
                let off = stop as f64 / knee - 1.0;
                if off.abs() > 0.5 {
                    missed.push(format!("b={b} k={k}: stopped at {stop}, knee {knee:.0} ({:+.0} %)", off * 100.0));
                }
            }
        }
        assert!(missed.is_empty(), "{missed:#?}");
    }

    #[test]
    fn a_service_that_is_warm_from_the_start_is_left_alone_soon() {
        let (stop, summary) = stop_of(12_000, |_| FLOOR);
        assert!(stop <= MIN_SAMPLES + 3, "{stop}");
        assert_eq!((summary.cold_p95, summary.warm_p95), (Duration::from_millis(10), Duration::from_millis(10)));
    }

    #[test]
    fn the_budget_is_never_exceeded() {
        for budget in [1, 2, 3, 11, 12, 13, 100] {
            let (stop, summary) = stop_of(budget, |n| FLOOR * (1.0 + 100.0 * (-(n as f64) / 500.0).exp()));
            assert_eq!((stop, summary.flattened), (budget, false));
        }
    }

    #[test]
    fn latency_that_only_grows_never_counts_as_flat() {
        let (stop, summary) = stop_of(2_000, |n| FLOOR * (1.0 + n as f64 / 100.0));
        assert_eq!((stop, summary.flattened), (2_000, false));
    }

    #[test]
    fn the_summary_tells_cold_from_warm() {
        let (_, summary) = stop_of(12_000, |n| FLOOR * (1.0 + 10.0 * (-(n as f64) / 50.0).exp()));
        assert!(summary.cold_p95 > Duration::from_millis(100), "{summary:?}");
        assert!(summary.warm_p95 < Duration::from_millis(12), "{summary:?}");
        let nothing = Curve::default().summary();
        assert_eq!((nothing.cold_p95, nothing.warm_p95), (Duration::ZERO, Duration::ZERO));
    }
}
