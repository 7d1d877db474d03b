//! The class of a new pod, and its place in the order of its revision.
//!
//! Guarantees: pods placed one after the other make the split of every prefix; whatever the start, once neither class
//! has too many the split ends exact. Ranks are the slots of that order, so that removing the highest ranks first leaves
//! a prefix, which is exact again.

use super::Class;
use super::split::{Share, Split};

/// A pod of the same revision that is there, or was admitted and is not seen yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    pub class: Class,
    pub rank: Option<u32>,
}

/// Where a new pod goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Placed {
    pub class: Class,
    pub rank: u32,
}

/// Places one more pod of a ReplicaSet; in a drought no more than `spot_cap` may be on spot.
#[must_use]
pub fn next(share: Share, peers: &[Peer], spot_cap: Option<u32>) -> Placed {
    let total = u32::try_from(peers.len()).unwrap_or(u32::MAX - 1).min(u32::MAX - 1) + 1;
    let spot = count(peers).spot;
    let wanted = share.split(total).spot.min(spot_cap.unwrap_or(u32::MAX));
    let class = if spot < wanted { Class::Spot } else { Class::OnDemand };
    let taken: std::collections::BTreeSet<u32> = peers.iter().filter_map(|p| p.rank).collect();
    let free = |rank: &u32| !taken.contains(rank);
    // With as many slots as pods one is always free; it is of this class unless a drought or a move mixed them.
    let own = (1..=total).filter(free).find(|rank| share.class_of(*rank) == class);
    let rank = own.or_else(|| (1..=total).rfind(free)).unwrap_or(total);
    Placed { class, rank }
}

/// Places a StatefulSet's pod; `index` counts from 0.
#[must_use]
pub fn ordinal(share: Share, index: u32, peers: &[Peer], spot_cap: Option<u32>) -> Placed {
    let rank = index.saturating_add(1);
    let capped = spot_cap.is_some_and(|cap| count(peers).spot >= cap);
    let class = if capped { Class::OnDemand } else { share.class_of(rank) };
    Placed { class, rank }
}

/// Lower goes first.
#[must_use]
pub fn deletion_cost(rank: u32) -> i32 {
    -i32::try_from(rank).unwrap_or(i32::MAX)
}

#[must_use]
pub fn count(peers: &[Peer]) -> Split {
    let mut split = Split::default();
    peers.iter().for_each(|peer| split.add(peer.class));
    split
}

/// The ranks that differ from those the pods should have, by position in `peers`.
///
/// Several admission replicas may hand out one rank twice, and a changed percentage changes the order: as few pods as
/// possible get a new one, and what is too much of its class comes last, to be removed first.
#[must_use]
pub fn reorder(share: Share, peers: &[Peer]) -> Vec<(usize, u32)> {
    let total = u32::try_from(peers.len()).unwrap_or(u32::MAX);
    let mut holders: std::collections::BTreeMap<u32, usize> = std::collections::BTreeMap::new();
    for (position, peer) in peers.iter().enumerate() {
        if let Some(rank) = peer.rank.filter(|r| (1..=total).contains(r) && share.class_of(*r) == peer.class) {
            holders.entry(rank).or_insert(position);
        }
    }
    let keeps: std::collections::BTreeSet<usize> = holders.values().copied().collect();
    let mut free: Vec<u32> = (1..=total).filter(|rank| !holders.contains_key(rank)).rev().collect();
    let mut changes = Vec::new();
    let mut excess = total;
    let mut rest: Vec<(usize, &Peer)> = peers.iter().enumerate().filter(|(at, _)| !keeps.contains(at)).collect();
    // Those already behind the end keep their order there.
    rest.sort_by_key(|(_, peer)| peer.rank);
    for (position, peer) in rest {
        let slot = free.iter().rposition(|rank| share.class_of(*rank) == peer.class).map(|at| free.remove(at));
        let rank = slot.unwrap_or_else(|| {
            excess += 1;
            excess
        });
        if peer.rank != Some(rank) {
            changes.push((position, rank));
        }
    }
    changes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn grow(share: Share, peers: &mut Vec<Peer>, to: u32) {
        while peers.len() < to as usize {
            let placed = next(share, peers, None);
            peers.push(Peer { class: placed.class, rank: Some(placed.rank) });
        }
    }

    /// What a ReplicaSet does among pods equally ready.
    fn shrink(peers: &mut Vec<Peer>, to: u32) {
        peers.sort_by_key(|p| std::cmp::Reverse(deletion_cost(p.rank.unwrap())));
        peers.truncate(to as usize);
    }

    #[test]
    fn scaling_in_step_by_step_keeps_the_split() {
        let share = Share { percentage: 60, floor: 2 };
        let mut peers = Vec::new();
        grow(share, &mut peers, 10);
        for to in [8, 7, 5, 3, 2, 1] {
            shrink(&mut peers, to);
            assert_eq!(count(&peers), share.split(to), "at {to}");
        }
    }

    #[test]
    fn in_a_drought_no_more_go_to_spot_than_are_there() {
        let share = Share { percentage: 100, floor: 0 };
        let peers = [Peer { class: Class::Spot, rank: Some(1) }];
        assert_eq!(next(share, &peers, Some(1)).class, Class::OnDemand);
        assert_eq!(next(share, &peers, Some(2)).class, Class::Spot);
        assert_eq!(ordinal(share, 4, &peers, Some(1)), Placed { class: Class::OnDemand, rank: 5 });
        assert_eq!(ordinal(share, 4, &peers, None), Placed { class: Class::Spot, rank: 5 });
    }

    #[test]
    fn ranks_given_twice_are_told_apart_and_excess_goes_last() {
        let share = Share { percentage: 50, floor: 0 };
        let peer = |class, rank| Peer { class, rank: Some(rank) };
        // Order: on-demand, spot, on-demand, spot.
        let twice = [peer(Class::OnDemand, 1), peer(Class::OnDemand, 1), peer(Class::Spot, 2), peer(Class::Spot, 2)];
        assert_eq!(reorder(share, &twice), [(1, 3), (3, 4)]);
        let three = [peer(Class::Spot, 2), peer(Class::Spot, 4), peer(Class::Spot, 1), peer(Class::OnDemand, 1)];
        assert_eq!(reorder(share, &three), [(2, 5)]);
    }

    fn shares() -> impl Strategy<Value = Share> {
        (0u8..=100, 0u32..30).prop_map(|(percentage, floor)| Share { percentage, floor })
    }

    fn classes() -> impl Strategy<Value = Vec<Class>> {
        prop::collection::vec(prop_oneof![Just(Class::Spot), Just(Class::OnDemand)], 0..40)
    }

    proptest! {
        #[test]
        fn any_walk_of_scaling_out_and_in_ends_exact(share in shares(), walk in prop::collection::vec(0u32..40, 1..8)) {
            let mut peers = Vec::new();
            for to in walk {
                grow(share, &mut peers, to);
                shrink(&mut peers, to);
                prop_assert_eq!(count(&peers), share.split(to));
                prop_assert!(reorder(share, &peers).is_empty());
            }
        }

        #[test]
        fn lost_pods_are_replaced_by_their_own_class(share in shares(), total in 1u32..40, keep in prop::collection::vec(any::<bool>(), 40)) {
            let mut peers = Vec::new();
            grow(share, &mut peers, total);
            let mut keep = keep.into_iter();
            peers.retain(|_| keep.next().unwrap());
            grow(share, &mut peers, total);
            prop_assert_eq!(count(&peers), share.split(total));
            prop_assert!(reorder(share, &peers).is_empty());
        }

        #[test]
        fn reordering_once_is_enough_and_gives_every_pod_its_own_rank(
            share in shares(), classes in classes(), ranks in prop::collection::vec(prop::option::of(1u32..50), 40),
        ) {
            let mut peers: Vec<Peer> = classes.iter().zip(ranks).map(|(class, rank)| Peer { class: *class, rank }).collect();
            for (at, rank) in reorder(share, &peers) {
                peers[at].rank = Some(rank);
            }
            prop_assert!(reorder(share, &peers).is_empty());
            let distinct: std::collections::BTreeSet<_> = peers.iter().map(|p| p.rank.unwrap()).collect();
            prop_assert_eq!(distinct.len(), peers.len());
        }

        #[test]
        fn a_rank_is_free_and_within_the_pods(share in shares(), classes in classes(), cap in prop::option::of(0u32..20)) {
            let mut peers: Vec<Peer> = Vec::new();
            for class in classes {
                let placed = next(share, &peers, cap);
                prop_assert!(peers.iter().all(|p| p.rank != Some(placed.rank)));
                prop_assert!(placed.rank as usize <= peers.len() + 1);
                // Whatever class it really lands on.
                peers.push(Peer { class, rank: Some(placed.rank) });
            }
        }
    }
}
