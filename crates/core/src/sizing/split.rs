//! From a node's size to each container's: the pod's total first, then who gets how much of it.
//!
//! ```text
//! allocatable · percent ─► raised to min ─► capped by max, then by the node ─► total
//! total ─► running containers in proportion to what they declare, the remainder to the first
//!      └─► each plain init container gets it whole: it runs before the others
//! ```

use super::shape::{Role, Shape};
use super::template::{Amounts, Distribution, Resource, Share, Template};

impl Share {
    /// The pod's total, or nothing where there is nothing to give.
    #[must_use]
    pub fn total(&self, allocatable: Option<u64>) -> Option<u64> {
        let min = self.min.unwrap_or(0);
        let total = match allocatable {
            None => min,
            // A pod above the node's size would wait for ever, so the node has the last word.
            Some(all) => percent_of(all, self.percent).max(min).min(self.max.unwrap_or(u64::MAX)).min(all),
        };
        (total > 0).then_some(total)
    }

    /// Whether the node is too small for the minimum.
    #[must_use]
    pub fn is_short(&self, allocatable: Option<u64>) -> bool {
        matches!((self.min, allocatable), (Some(min), Some(all)) if min > all)
    }
}

fn percent_of(amount: u64, percent: u8) -> u64 {
    u64::try_from(u128::from(amount) * u128::from(percent) / 100).unwrap_or(u64::MAX)
}

impl Template {
    #[must_use]
    pub fn totals(&self, allocatable: &Amounts) -> Amounts {
        let total = |resource| self.shares.get(resource).total(allocatable.of(resource));
        Amounts { cpu: total(Resource::Cpu), memory: total(Resource::Memory), storage: total(Resource::Storage) }
    }

    /// Each container's size, in the shape's order; `declared` says in which proportion they share.
    #[must_use]
    pub fn split(&self, allocatable: &Amounts, shape: &Shape, declared: &Shape) -> Vec<Amounts> {
        let mut sizes = vec![Amounts::default(); shape.containers.len()];
        let totals = self.totals(allocatable);
        for resource in Resource::ALL {
            let Some(total) = totals.of(resource) else { continue };
            let all = allocatable.of(resource).unwrap_or(u64::MAX);
            let amounts = one_resource(self.distribution, shape, &weights(shape, declared, resource), total, all);
            for (size, amount) in sizes.iter_mut().zip(amounts) {
                size.set(resource, Some(amount).filter(|amount| *amount > 0));
            }
        }
        sizes
    }
}

/// What each running container declares.
fn weights(shape: &Shape, declared: &Shape, resource: Resource) -> Vec<Option<u64>> {
    let running = || shape.containers.iter().filter(|container| container.runs());
    let named = |name: &str| declared.containers.iter().find(|other| *other.name == *name);
    let original: Option<Vec<_>> = running().map(|container| named(&container.name)).collect();
    // A container added on the way in has no proportion to the others' originals; then the pod's own words count.
    original.unwrap_or_else(|| running().collect()).into_iter().map(|container| container.declared(resource)).collect()
}

fn one_resource(distribution: Distribution, shape: &Shape, weights: &[Option<u64>], total: u64, all: u64) -> Vec<u64> {
    let shares = match distribution {
        Distribution::Pod => proportional(total, weights),
        Distribution::PerContainer => {
            let count = u64::try_from(weights.len()).unwrap_or(u64::MAX).max(1);
            vec![total.min(all / count); weights.len()]
        }
    };
    let mut shares = shares.into_iter();
    // Sidecars that started earlier run beside an init container and must fit with it.
    let mut beside = 0u64;
    let mut size = |role: Role| match role {
        Role::Init => total.min(all.saturating_sub(beside)),
        Role::Main => shares.next().unwrap_or(0),
        Role::Sidecar => {
            let share = shares.next().unwrap_or(0);
            beside = beside.saturating_add(share);
            share
        }
    };
    shape.containers.iter().map(|container| size(container.role)).collect()
}

/// Shares that add up to the total; equal ones where anybody declares nothing.
fn proportional(total: u64, weights: &[Option<u64>]) -> Vec<u64> {
    let known: Option<Vec<u64>> = weights.iter().map(|weight| weight.filter(|w| *w > 0)).collect();
    let weights = known.unwrap_or_else(|| vec![1; weights.len()]);
    let sum: u128 = weights.iter().map(|weight| u128::from(*weight)).sum();
    let part = |weight: &u64| (u128::from(total) * u128::from(*weight)).checked_div(sum).unwrap_or(0);
    let mut shares: Vec<u64> = weights.iter().map(|weight| u64::try_from(part(weight)).unwrap_or(0)).collect();
    if shares.len() as u64 > total {
        shares.fill(0);
    }
    let remainder = total.saturating_sub(shares.iter().sum());
    if let Some(first) = shares.first_mut() {
        *first += remainder;
    }
    if shares.len() as u64 <= total {
        lift_zeros(&mut shares);
    }
    shares
}

/// A share of nothing would leave its container without a limit: the largest gives one unit.
fn lift_zeros(shares: &mut [u64]) {
    while let Some(zero) = shares.iter().position(|share| *share == 0) {
        let Some(largest) = shares.iter_mut().max().filter(|share| **share > 1) else { return };
        *largest -= 1;
        if let Some(share) = shares.get_mut(zero) {
            *share = 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    const MI: u64 = 1 << 20;
    const GI: u64 = 1 << 30;

    fn share(percent: u8) -> Share {
        Share { percent, min: None, max: None }
    }

    #[rstest]
    #[case(4000, 10, 400)]
    #[case(3920, 10, 392)]
    #[case(1930, 15, 289)]
    #[case(100, 29, 29)]
    #[case(50, 58, 29)]
    #[case(300, 57, 171)]
    #[case(16 * GI, 15, 2_576_980_377)]
    #[case(7_484_420 * 1024, 15, 1_149_606_912)]
    #[case(100 * GI, 5, 5 * GI)]
    #[case(u64::MAX, 100, u64::MAX)]
    #[case(i64::MAX as u64, 99, 9_131_138_316_486_228_048)]
    fn percentages_are_floored_exactly(#[case] allocatable: u64, #[case] percent: u8, #[case] total: u64) {
        assert_eq!(share(percent).total(Some(allocatable)), Some(total));
    }

    #[rstest]
    #[case::raised_to_min(Some(940), 10, Some(100), None, Some(100))]
    #[case::capped_by_max(Some(4000), 50, None, Some(1500), Some(1500))]
    #[case::min_and_max_alike(Some(4000), 50, Some(700), Some(700), Some(700))]
    #[case::never_above_the_node(Some(500), 10, Some(2000), None, Some(500))]
    #[case::nothing_of_nothing(Some(0), 10, None, None, None)]
    #[case::nothing_however_much_is_asked(Some(0), 10, Some(100), None, None)]
    #[case::too_little_to_share(Some(9), 10, None, None, None)]
    #[case::absent_means_min(None, 10, Some(100), None, Some(100))]
    #[case::absent_without_min(None, 10, None, None, None)]
    #[case::absent_with_zero_min(None, 10, Some(0), None, None)]
    fn bounds_hold(
        #[case] allocatable: Option<u64>,
        #[case] percent: u8,
        #[case] min: Option<u64>,
        #[case] max: Option<u64>,
        #[case] total: Option<u64>,
    ) {
        assert_eq!(Share { percent, min, max }.total(allocatable), total);
    }

    #[test]
    fn a_minimum_above_the_node_is_noticed() {
        let share = Share { percent: 10, min: Some(2000), max: None };
        assert!(share.is_short(Some(940)));
        assert!(!share.is_short(Some(2000)));
        assert!(!share.is_short(None));
    }

    #[rstest]
    #[case::one_gets_all(400, &[None], &[400])]
    #[case::in_proportion(400, &[Some(100), Some(300)], &[100, 300])]
    #[case::remainder_to_the_first(100, &[Some(1), Some(1), Some(1)], &[34, 33, 33])]
    #[case::equal_where_one_is_missing(90, &[Some(500), None], &[45, 45])]
    #[case::zero_declares_nothing(90, &[Some(500), Some(0)], &[45, 45])]
    #[case::nobody_gets_nothing(10, &[Some(1), Some(1000)], &[1, 9])]
    #[case::the_first_gives_to_the_rest(10, &[Some(1000), Some(1), Some(1)], &[8, 1, 1])]
    #[case::too_little_for_all(2, &[Some(1), Some(1), Some(1)], &[2, 0, 0])]
    fn totals_are_shared(#[case] total: u64, #[case] weights: &[Option<u64>], #[case] shares: &[u64]) {
        assert_eq!(proportional(total, weights), shares);
    }

    proptest! {
        #[test]
        fn shares_add_up_and_sharing_again_changes_nothing(
            total in prop_oneof![1..=20u64, 1..=200 * GI],
            weights in prop::collection::vec(prop::option::weighted(0.9, 0..=64 * GI), 1..8),
        ) {
            let shares = proportional(total, &weights);
            prop_assert_eq!(shares.iter().sum::<u64>(), total);
            // Whoever got nothing keeps what it declared.
            let again: Vec<_> = shares.iter().zip(&weights).map(|(s, w)| if *s > 0 { Some(*s) } else { *w }).collect();
            prop_assert_eq!(proportional(total, &again), shares);
        }

        #[test]
        fn every_percentage_agrees_with_big_integers(
            allocatable in prop_oneof![0..=100_000u64, 0..=4096 * GI, 0..=u64::MAX],
            percent in 1..=100u8,
            min in prop::option::of(0..=64 * MI),
            max in prop::option::of(1..=64 * GI),
        ) {
            let max = max.map(|max| max.max(min.unwrap_or(0)));
            let big = |number: u64| num_bigint::BigUint::from(number);
            let mut oracle = big(allocatable) * percent / 100u8;
            oracle = oracle.max(big(min.unwrap_or(0)));
            oracle = max.map_or(oracle.clone(), |max| oracle.min(big(max))).min(big(allocatable));
            let total = Share { percent, min, max }.total(Some(allocatable));
            prop_assert_eq!(big(total.unwrap_or(0)), oracle);
        }
    }

    #[test]
    fn all_percentages_of_many_sizes_agree_with_big_integers() {
        let sizes = (1..=2000u64)
            .chain((1..=128).map(|cores| cores * 1000 - 80))
            .chain((1..=512).map(|gi| gi * GI + 4096 * gi));
        for size in sizes {
            for percent in 1..=100u8 {
                let oracle = num_bigint::BigUint::from(size) * percent / 100u8;
                let total = share(percent).total(Some(size)).unwrap_or(0);
                assert_eq!(num_bigint::BigUint::from(total), oracle, "{percent} % of {size}");
            }
        }
    }
}
