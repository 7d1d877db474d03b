use super::*;

const FLOOR: f64 = 10_000.0;
const BUDGET: usize = 12_000;

fn stop_of(budget: usize, mut latency: impl FnMut(usize) -> f64) -> (usize, Summary) {
    let mut curve = Curve::default();
    let stop = (0..budget).find(|n| curve.push(Duration::from_nanos((latency(*n) * 1e3) as u64)));
    (stop.map_or(budget, |n| n + 1), curve.summary())
}

/// a + b·e^(−n/k), with b in units of a.
fn falling(b: f64, k: f64) -> impl Fn(usize) -> f64 {
    move |n| FLOOR * (1.0 + b * (-(n as f64) / k).exp())
}

/// Where it comes within the tolerance of a.
fn knee(b: f64, k: f64) -> f64 {
    k * (b / TOLERANCE).ln()
}

/// A multiplicative generator is noise enough and repeats itself exactly.
fn noise(seed: u64) -> impl FnMut() -> f64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as f64 / f64::from(1_u32 << 31) * 2.0 - 1.0
    }
}

#[test]
fn it_stops_within_15_percent_of_the_analytic_knee_on_every_curve() {
    let (mut curves, mut missed) = (0, Vec::new());
    for b in [0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0] {
        for k in [5.0, 7.0, 10.0, 15.0, 20.0, 50.0, 100.0, 300.0, 1000.0] {
            let (stop, summary) = stop_of(BUDGET, falling(b, k));
            let off = stop as f64 / knee(b, k) - 1.0;
            curves += 1;
            if off.abs() > 0.15 || !summary.flattened {
                missed.push(format!("b={b} k={k}: stopped at {stop}, knee {:.0} ({:+.0} %)", knee(b, k), off * 100.0));
            }
        }
    }
    assert_eq!((curves, missed), (63, Vec::<String>::new()));
}

#[test]
fn a_service_that_is_warm_before_a_curve_can_be_seen_gets_a_few_requests_more() {
    for (b, k) in [(0.5, 1.0), (0.5, 3.0), (2.0, 1.0), (2.0, 3.0)] {
        let (stop, summary) = stop_of(BUDGET, falling(b, k));
        assert!(summary.flattened && stop <= MIN_SAMPLES + 6, "b={b} k={k}: {stop}");
    }
}

#[test]
fn noise_costs_requests_but_no_warmth() {
    let mut cold = Vec::new();
    for size in [0.05, 0.2] {
        for b in [1.0, 5.0, 30.0] {
            for k in [10.0, 50.0, 200.0] {
                for seed in 0..2 {
                    let (clean, mut noise) = (falling(b, k), noise(seed));
                    let (stop, _) = stop_of(BUDGET, |n| clean(n) * (1.0 + size * noise()));
                    let excess = b * (-(stop as f64) / k).exp();
                    if excess > 2.0 * TOLERANCE || stop as f64 > 6.0 * knee(b, k) + 500.0 {
                        cold.push(format!("noise {size} b={b} k={k}: stopped at {stop}, {excess:.3} above the floor"));
                    }
                }
            }
        }
    }
    assert!(cold.is_empty(), "{cold:#?}");
}

#[test]
fn a_spike_now_and_then_is_no_curve() {
    for seed in 0..8 {
        let (clean, mut noise) = (falling(5.0, 100.0), noise(seed));
        let (stop, _) = stop_of(BUDGET, |n| {
            let spike = if noise() > 0.96 { 5.0 } else { 1.0 };
            clean(n) * (1.0 + 0.05 * noise()) * spike
        });
        assert!(5.0 * (-(stop as f64) / 100.0).exp() <= 2.0 * TOLERANCE, "stopped at {stop}");
    }
}

#[test]
fn a_first_request_of_its_own_kind_does_not_move_the_stop() {
    let clean = falling(5.0, 50.0);
    let (stop, _) = stop_of(BUDGET, |n| if n == 0 { 1e6 } else { clean(n) });
    assert!((stop as f64 / knee(5.0, 50.0) - 1.0).abs() <= 0.15, "{stop}");
}

#[test]
fn a_noisy_service_that_is_warm_from_the_start_is_left_alone_after_some_hundred_requests() {
    for seed in 0..8 {
        let mut noise = noise(seed);
        let (stop, summary) = stop_of(BUDGET, |_| FLOOR * (1.0 + 0.3 * noise()));
        assert!(summary.flattened && stop <= 500, "{stop}");
    }
}

#[test]
fn a_service_that_is_warm_from_the_start_is_left_alone_soon() {
    let (stop, summary) = stop_of(BUDGET, |_| FLOOR);
    assert!(stop <= MIN_SAMPLES + 3, "{stop}");
    assert_eq!((summary.cold_p95, summary.warm_p95), (Duration::from_millis(10), Duration::from_millis(10)));
}

#[test]
fn the_budget_is_never_exceeded() {
    for budget in [1, 2, 3, 8, 9, 10, 100] {
        let (stop, summary) = stop_of(budget, falling(100.0, 500.0));
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
    let (_, summary) = stop_of(BUDGET, falling(10.0, 50.0));
    assert!(summary.cold_p95 > Duration::from_millis(100), "{summary:?}");
    assert!(summary.warm_p95 < Duration::from_millis(13), "{summary:?}");
    let nothing = Curve::default().summary();
    assert_eq!((nothing.cold_p95, nothing.warm_p95), (Duration::ZERO, Duration::ZERO));
}
