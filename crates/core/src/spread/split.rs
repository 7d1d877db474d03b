//! The split formula and the order that follows from it.

use super::Class;

/// How many replicas run where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Split {
    pub spot: u32,
    pub on_demand: u32,
}

impl Split {
    #[must_use]
    pub const fn of(self, class: Class) -> u32 {
        match class {
            Class::Spot => self.spot,
            Class::OnDemand => self.on_demand,
        }
    }

    #[must_use]
    pub const fn total(self) -> u32 {
        self.spot + self.on_demand
    }

    pub fn add(&mut self, class: Class) {
        match class {
            Class::Spot => self.spot += 1,
            Class::OnDemand => self.on_demand += 1,
        }
    }
}

/// What the user asked for: a percentage on spot, and a number that is never on spot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    pub percentage: u8,
    pub floor: u32,
}

impl Share {
    /// The split of `total` replicas.
    #[must_use]
    pub fn split(self, total: u32) -> Split {
        let by_percentage = u64::from(total) * u64::from(self.percentage) / 100;
        let by_percentage = u32::try_from(by_percentage).unwrap_or(u32::MAX);
        let spot = by_percentage.min(total.saturating_sub(self.floor));
        Split { spot, on_demand: total - spot }
    }

    /// The class of the `rank`-th pod, counted from 1: what takes the split of the pods before it to the next one.
    #[must_use]
    pub fn class_of(self, rank: u32) -> Class {
        if self.split(rank).spot > self.split(rank.saturating_sub(1)).spot { Class::Spot } else { Class::OnDemand }
    }

    /// The ranks of one class in order, for ever.
    pub fn ranks_of(self, class: Class) -> impl Iterator<Item = u32> {
        (1..=u32::MAX).filter(move |rank| self.class_of(*rank) == class)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(10, 60, 2, 6, 4)]
    #[case(3, 60, 2, 1, 2)]
    #[case(4, 75, 3, 1, 3)]
    #[case(10, 70, 0, 7, 3)]
    #[case(7, 50, 1, 3, 4)]
    #[case(10, 80, 3, 7, 3)]
    #[case(1, 70, 0, 0, 1)]
    #[case(20, 80, 2, 16, 4)]
    #[case(0, 70, 5, 0, 0)]
    #[case(5, 100, 9, 0, 5)]
    #[case(u32::MAX, 100, 0, u32::MAX, 0)]
    fn known_splits(#[case] t: u32, #[case] p: u8, #[case] m: u32, #[case] spot: u32, #[case] on_demand: u32) {
        assert_eq!(Share { percentage: p, floor: m }.split(t), Split { spot, on_demand });
    }

    /// Every T up to 200, P from 0 to 100, M up to T + 2: small enough to be looked at whole.
    fn each_case(mut see: impl FnMut(u32, u8, u32, Split)) {
        for total in 0..=200 {
            for percentage in 0..=100 {
                for floor in 0..=total + 2 {
                    see(total, percentage, floor, Share { percentage, floor }.split(total));
                }
            }
        }
    }

    #[test]
    fn a_split_is_whole_within_its_percentage_and_above_its_floor() {
        each_case(|t, p, m, split| {
            assert_eq!(split.total(), t);
            assert!(u64::from(split.spot) * 100 <= u64::from(t) * u64::from(p), "{t} {p} {m}: {split:?}");
            assert!(split.on_demand >= m.min(t), "{t} {p} {m}: {split:?}");
            // No more on-demand than one of the two bounds asks for.
            let tight = split.on_demand == m.min(t) || (u64::from(split.spot) + 1) * 100 > u64::from(t) * u64::from(p);
            assert!(tight, "{t} {p} {m}: {split:?}");
        });
    }

    #[test]
    fn a_split_grows_with_its_total_and_its_percentage_and_shrinks_with_its_floor() {
        each_case(|t, p, m, split| {
            let more = Share { percentage: p, floor: m }.split(t + 1);
            assert!(more.spot - split.spot <= 1 && more.on_demand >= split.on_demand, "{t} {p} {m}");
            let higher = Share { percentage: (p + 1).min(100), floor: m }.split(t);
            let safer = Share { percentage: p, floor: m + 1 }.split(t);
            assert!(higher.spot >= split.spot && safer.spot <= split.spot, "{t} {p} {m}");
        });
    }

    #[test]
    fn classes_taken_in_order_make_the_split_of_every_prefix() {
        for percentage in 0..=100 {
            for floor in 0..=202 {
                let share = Share { percentage, floor };
                let mut so_far = Split::default();
                for rank in 1..=200 {
                    so_far.add(share.class_of(rank));
                    assert_eq!(so_far, share.split(rank), "{percentage} {floor} at {rank}");
                }
            }
        }
    }
}
