//! The class of a new pod, and its place in the order of its revision.
//!
//! Guarantees: pods placed one after the other end at the split of the size that is wanted, or of every prefix while no
//! size is known; whatever the start, once neither class has too many the split ends exact. Ranks are the slots of the
//! order of `Share::class_of`, so that removing the highest ranks first leaves a prefix, which is exact again.
//!
//! Several replicas of the webhook may place pods of one burst and see each other's late. So none makes good at once
//! what it sees missing, for all would: each gives spot the share that is left to it of the pods that are still to
//! come. What nobody has seen yet was placed by the same share and does not change it.

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

/// The part of a pod on spot that one replica of the webhook has not given to a revision yet, in [`Credit::WHOLE`]ths.
///
/// Starting at nothing errs towards on-demand: of `k` replicas that see nothing of each other each may hold back less
/// than one pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Credit(u64);

impl Credit {
    const WHOLE: u64 = 1 << 32;

    /// Adds `part` of `whole`, less than one; whether that makes a whole pod.
    fn add(&mut self, part: u32, whole: u32) -> bool {
        self.0 += u64::from(part) * Self::WHOLE / u64::from(whole.max(1));
        let full = self.0 >= Self::WHOLE;
        self.0 -= if full { Self::WHOLE } else { 0 };
        full
    }
}

/// Places one more pod of a ReplicaSet that wants so many; in a drought no more than `spot_cap` may be on spot.
#[must_use]
pub fn next(share: Share, wanted: Option<u32>, peers: &[Peer], spot_cap: Option<u32>, credit: &mut Credit) -> Placed {
    let there = u32::try_from(peers.len()).unwrap_or(u32::MAX).min(u32::MAX - 1);
    let aim = wanted.unwrap_or(0).max(there + 1);
    let to_come = aim - there;
    let missing = share.split(aim).spot.min(spot_cap.unwrap_or(u32::MAX)).saturating_sub(count(peers).spot);
    let spot = missing >= to_come || (missing > 0 && credit.add(missing, to_come));
    let class = if spot { Class::Spot } else { Class::OnDemand };
    let taken: std::collections::BTreeSet<u32> = peers.iter().filter_map(|p| p.rank).collect();
    let free = |rank: &u32| !taken.contains(rank);
    // With at least as many slots as pods one is always free; it is of this class unless a drought or a move mixed them.
    let own = (1..=aim).filter(free).find(|rank| share.class_of(*rank) == class);
    let rank = own.or_else(|| (1..=aim).rfind(free)).unwrap_or(aim);
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

    fn peer(placed: Placed) -> Peer {
        Peer { class: placed.class, rank: Some(placed.rank) }
    }

    fn grow(share: Share, peers: &mut Vec<Peer>, to: u32) {
        let mut credit = Credit::default();
        while peers.len() < to as usize {
            peers.push(peer(next(share, Some(to), peers, None, &mut credit)));
        }
    }

    fn place_one(share: Share, peers: &[Peer], spot_cap: Option<u32>) -> Placed {
        next(share, None, peers, spot_cap, &mut Credit::default())
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
        assert_eq!(place_one(share, &peers, Some(1)).class, Class::OnDemand);
        assert_eq!(place_one(share, &peers, Some(2)).class, Class::Spot);
        assert_eq!(place_one(share, &[], Some(0)).class, Class::OnDemand, "the first pod of a new revision");
        assert_eq!(ordinal(share, 4, &peers, Some(1)), Placed { class: Class::OnDemand, rank: 5 });
        assert_eq!(ordinal(share, 4, &peers, None), Placed { class: Class::Spot, rank: 5 });
    }

    #[test]
    fn ranks_given_twice_are_told_apart_and_excess_goes_last() {
        let share = Share { percentage: 50, floor: 0 };
        let peer = |class, rank| peer(Placed { class, rank });
        // Order: on-demand, spot, on-demand, spot.
        let twice = [peer(Class::OnDemand, 1), peer(Class::OnDemand, 1), peer(Class::Spot, 2), peer(Class::Spot, 2)];
        assert_eq!(reorder(share, &twice), [(1, 3), (3, 4)]);
        let three = [peer(Class::Spot, 2), peer(Class::Spot, 4), peer(Class::Spot, 1), peer(Class::OnDemand, 1)];
        assert_eq!(reorder(share, &three), [(2, 5)]);
    }

    /// Replicas of the webhook that share a burst, each pod by the one that `routes` names; each sees a pod of another
    /// only when `late` more were placed.
    fn shared_burst(share: Share, routes: &[usize], late: usize) -> Split {
        let mut pods: Vec<Peer> = Vec::new();
        let mut credits = [Credit::default(); 5];
        for (at, me) in routes.iter().enumerate() {
            let seen = pods.iter().enumerate().filter(|(by, _)| routes[*by] == *me || by + late < at);
            let seen: Vec<Peer> = seen.map(|(_, peer)| *peer).collect();
            let wanted = u32::try_from(routes.len()).unwrap();
            pods.push(peer(next(share, Some(wanted), &seen, None, &mut credits[*me])));
        }
        count(&pods)
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
        fn pods_placed_one_by_one_make_the_split_of_every_prefix_while_no_size_is_known(share in shares()) {
            let mut peers = Vec::new();
            for total in 1..60 {
                peers.push(peer(place_one(share, &peers, None)));
                prop_assert_eq!(count(&peers), share.split(total));
            }
        }

        #[test]
        fn replicas_that_see_each_other_late_miss_the_split_of_a_burst_by_less_than_a_pod_each(
            share in shares(), late in 0usize..100,
            routes in (2usize..=5).prop_flat_map(|replicas| prop::collection::vec(0..replicas, 1..100)),
        ) {
            let replicas = routes.iter().max().map_or(1, |last| last + 1);
            let total = u32::try_from(routes.len()).unwrap();
            let (is, should) = (shared_burst(share, &routes, late), share.split(total));
            prop_assert!((is.spot.abs_diff(should.spot) as usize) < replicas, "{is:?} instead of {should:?}");
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
        fn a_rank_is_free_and_within_the_pods(
            share in shares(), classes in classes(),
            wanted in prop::option::of(0u32..50), cap in prop::option::of(0u32..20),
        ) {
            let mut peers: Vec<Peer> = Vec::new();
            let mut credit = Credit::default();
            for class in classes {
                let placed = next(share, wanted, &peers, cap, &mut credit);
                prop_assert!(peers.iter().all(|p| p.rank != Some(placed.rank)));
                prop_assert!(placed.rank as usize <= (peers.len() + 1).max(wanted.unwrap_or(0) as usize));
                // Whatever class it really lands on.
                peers.push(Peer { class, rank: Some(placed.rank) });
            }
        }
    }
}
