use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;
use rstest::rstest;

use super::*;

const START: i64 = 1_800_000_000;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(START + seconds).unwrap()
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// CA 90 s (due at 60), leaf 30 s (due at 20), overlap 5 s.
fn rules() -> Rules {
    Rules::new(seconds(90), seconds(30), seconds(5)).unwrap()
}

fn life(from: i64, to: i64) -> Validity {
    Validity { not_before: at(from), not_after: at(to) }
}

fn names() -> Vec<String> {
    vec!["hook.ns.svc".to_owned()]
}

/// Ten seconds after both were made.
fn fresh<'a>(names: &'a [String]) -> Seen<'a> {
    Seen {
        active: Some(life(-900, 90)),
        next: None,
        retired: &[],
        leaf: Some(Leaf { validity: life(-900, 30), issuer: Issuer::Active, names }),
        names,
        bundle_intact: true,
        published_for: Some(seconds(10)),
    }
}

#[rstest]
#[case::young(10, Verdict::Keep { until: at(20) })]
#[case::leaf_due(20, Verdict::RenewLeaf(Why::Due))]
#[case::leaf_expired(30, Verdict::RenewLeaf(Why::Expired))]
#[case::ca_expired(90, Verdict::MintAll(Why::Expired))]
#[case::clock_far_back(-1000, Verdict::RenewLeaf(Why::NotYetValid))]
fn time_alone_decides(#[case] now: i64, #[case] verdict: Verdict) {
    assert_eq!(decide(&rules(), fresh(&names()), at(now)), verdict);
}

#[test]
fn nothing_stored_is_minted() {
    let names = names();
    let seen = Seen { active: None, leaf: None, bundle_intact: false, published_for: None, ..fresh(&names) };
    assert_eq!(decide(&rules(), seen, at(0)), Verdict::MintAll(Why::Unusable));
}

#[test]
fn an_unusable_leaf_is_renewed_for_its_reason() {
    let (names, other) = (names(), vec!["other".to_owned()]);
    let leaf = fresh(&names).leaf.unwrap();
    let cases = [
        (None, Why::Unusable),
        (Some(Leaf { issuer: Issuer::Other, ..leaf }), Why::WrongIssuer),
        (Some(Leaf { issuer: Issuer::Next, ..leaf }), Why::WrongIssuer),
        (Some(Leaf { names: &other, ..leaf }), Why::NamesChanged),
        (Some(Leaf { validity: life(-900, 10_000), ..leaf }), Why::OutlivesRules),
    ];
    for (leaf, why) in cases {
        assert_eq!(decide(&rules(), Seen { leaf, ..fresh(&names) }, at(10)), Verdict::RenewLeaf(why));
    }
}

#[test]
fn a_leaf_as_old_as_its_ca_is_not_renewed_again_and_again() {
    let names = names();
    let leaf = Leaf { validity: life(-900, 90), issuer: Issuer::Active, names: &names };
    let seen = Seen { leaf: Some(leaf), next: Some(life(-900, 150)), published_for: None, ..fresh(&names) };
    assert_eq!(decide(&rules(), seen, at(85)), Verdict::Keep { until: at(90) });
}

#[test]
fn the_next_ca_is_used_only_after_the_overlap() {
    let names = names();
    let leaf = Some(Leaf { validity: life(-900, 90), issuer: Issuer::Active, names: &names });
    let seen = |published_for| Seen { leaf, next: Some(life(-900, 150)), published_for, ..fresh(&names) };
    assert_eq!(decide(&rules(), seen(None), at(61)), Verdict::Keep { until: at(90) });
    assert_eq!(decide(&rules(), seen(Some(seconds(2))), at(61)), Verdict::Keep { until: at(64) });
    assert_eq!(decide(&rules(), seen(Some(seconds(5))), at(61)), Verdict::PromoteNextCa(Why::Published));
}

#[rstest]
#[case::in_time(60, Verdict::PublishNextCa(Why::Due))]
#[case::before(59, Verdict::Keep { until: at(60) })]
fn a_successor_appears_at_two_thirds_of_the_ca(#[case] now: i64, #[case] verdict: Verdict) {
    let names = names();
    let leaf = Some(Leaf { validity: life(-900, 90), issuer: Issuer::Active, names: &names });
    assert_eq!(decide(&rules(), Seen { leaf, ..fresh(&names) }, at(now)), verdict);
}

#[test]
fn a_next_ca_takes_over_at_once_when_the_active_one_is_lost() {
    let names = names();
    let seen = Seen { active: None, next: Some(life(-900, 150)), published_for: None, ..fresh(&names) };
    assert_eq!(decide(&rules(), seen, at(10)), Verdict::PromoteNextCa(Why::Unusable));
    let seen = Seen { next: Some(life(-900, 150)), published_for: None, ..fresh(&names) };
    assert_eq!(decide(&rules(), seen, at(95)), Verdict::PromoteNextCa(Why::Expired));
}

#[test]
fn a_retired_ca_leaves_when_its_time_is_over_but_not_while_another_waits() {
    let names = names();
    let retired = [at(5)];
    let seen = Seen { retired: &retired, ..fresh(&names) };
    assert_eq!(decide(&rules(), seen, at(4)), Verdict::Keep { until: at(5) });
    assert_eq!(decide(&rules(), seen, at(5)), Verdict::DropRetired);
    let waiting = Seen { next: Some(life(-900, 150)), published_for: None, ..seen };
    assert_eq!(decide(&rules(), waiting, at(5)), Verdict::Keep { until: at(20) });
}

#[test]
fn a_spoiled_bundle_is_written_again() {
    let names = names();
    let seen = Seen { bundle_intact: false, ..fresh(&names) };
    assert_eq!(decide(&rules(), seen, at(10)), Verdict::RewriteBundle);
}

#[test]
fn lifetimes_that_cannot_work_are_refused() {
    assert_eq!(Rules::new(seconds(9), seconds(0), seconds(1)), Err(RulesError::TooShort));
    assert_eq!(Rules::new(seconds(9), seconds(10), seconds(1)), Err(RulesError::LeafOutlivesCa));
    assert_eq!(Rules::new(seconds(9), seconds(3), seconds(3)), Err(RulesError::OverlapTooLong));
    assert!(Rules::new(seconds(9), seconds(3), seconds(1)).is_ok());
}

/// Short enough that a few hundred happenings see several rotations, long enough for a leader who is seconds late.
fn brisk() -> Rules {
    Rules::new(seconds(36), seconds(12), seconds(2)).unwrap()
}

/// A leader, an API server and replicas, reduced to what the decision can do to them.
struct World {
    rules: Rules,
    now: Timestamp,
    made: u32,
    active: Option<Ca>,
    next: Option<Ca>,
    retired: Vec<(Ca, Timestamp)>,
    leaf: Option<Signed>,
    bundle: Vec<u32>,
    published: Option<(Vec<u32>, Duration)>,
    /// What each replica serves; some hear of a new leaf late.
    replicas: [Option<Signed>; 3],
    /// Every leaf that was ever stored.
    stored: Vec<Signed>,
}

#[derive(Clone, Copy)]
struct Ca {
    id: u32,
    validity: Validity,
}

#[derive(Clone, Copy)]
struct Signed {
    by: u32,
    validity: Validity,
}

impl World {
    fn new(rules: Rules) -> Self {
        Self {
            rules,
            now: at(0),
            made: 0,
            active: None,
            next: None,
            retired: Vec::new(),
            leaf: None,
            bundle: Vec::new(),
            published: None,
            replicas: [None; 3],
            stored: Vec::new(),
        }
    }

    fn pass(&mut self, millis: i64) {
        self.now += SignedDuration::from_millis(millis);
        if let Some((_, since)) = &mut self.published {
            *since += Duration::from_millis(millis.unsigned_abs());
        }
    }

    fn publish(&mut self) {
        if self.published.as_ref().is_none_or(|(bundle, _)| *bundle != self.bundle) {
            self.published = Some((self.bundle.clone(), Duration::ZERO));
        }
    }

    /// Decides and carries out until there is nothing left to do.
    fn lead(&mut self) -> Timestamp {
        for _ in 0..6 {
            match self.decide() {
                Verdict::Keep { until } => return until,
                verdict => self.carry_out(verdict),
            }
        }
        panic!("still {:?} after six steps", self.decide());
    }

    fn decide(&self) -> Verdict {
        let names = names();
        let retired: Vec<_> = self.retired.iter().map(|(_, until)| *until).collect();
        let leaf = self.leaf.map(|leaf| {
            let is = |ca: Option<Ca>| ca.is_some_and(|ca| ca.id == leaf.by);
            let issuer = match (is(self.active), is(self.next)) {
                (true, _) => Issuer::Active,
                (_, true) => Issuer::Next,
                _ => Issuer::Other,
            };
            Leaf { validity: leaf.validity, issuer, names: &names }
        });
        let published = self.published.as_ref().filter(|(bundle, _)| *bundle == self.bundle);
        let seen = Seen {
            active: self.active.map(|ca| ca.validity),
            next: self.next.map(|ca| ca.validity),
            retired: &retired,
            leaf,
            names: &names,
            bundle_intact: self.bundle == self.wanted_bundle(),
            published_for: published.map(|(_, since)| *since),
        };
        decide(&self.rules, seen, self.now)
    }

    fn carry_out(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Keep { .. } | Verdict::RewriteBundle => {}
            Verdict::DropRetired => self.retired.retain(|(_, until)| *until > self.now),
            Verdict::PublishNextCa(_) => self.next = Some(self.mint()),
            Verdict::RenewLeaf(_) => self.sign(),
            Verdict::MintAll(_) => {
                self.retire();
                self.next = None;
                self.active = Some(self.mint());
                self.sign();
            }
            Verdict::PromoteNextCa(_) => {
                self.retire();
                self.active = self.next.take();
                self.sign();
            }
        }
        self.bundle = self.wanted_bundle();
    }

    fn mint(&mut self) -> Ca {
        self.made += 1;
        Ca { id: self.made, validity: self.rules.ca_validity(self.now) }
    }

    fn sign(&mut self) {
        let ca = self.active.expect("a leaf needs an active CA");
        let leaf = Signed { by: ca.id, validity: self.rules.leaf_validity(self.now, ca.validity) };
        self.leaf = Some(leaf);
        self.stored.push(leaf);
    }

    fn retire(&mut self) {
        self.retired.retain(|(_, until)| *until > self.now);
        if let Some(ca) = self.active.filter(|ca| !ca.validity.expired(self.now)) {
            let until = self.rules.retire_at(self.now, ca.validity, self.leaf.map(|leaf| leaf.validity));
            self.retired.push((ca, until));
        }
    }

    fn wanted_bundle(&self) -> Vec<u32> {
        let retired = self.retired.iter().map(|(ca, _)| ca.id);
        self.active.iter().chain(&self.next).map(|ca| ca.id).chain(retired).collect()
    }
}

#[derive(Debug, Clone)]
enum Happening {
    Pass(i64),
    Lead,
    Publish,
    Sync(usize),
    ClockJump(i64),
    LoseLeaf,
    LoseActive,
    SpoilBundle,
}

fn lawful() -> impl Strategy<Value = Happening> {
    prop_oneof![
        4 => (1..900_i64).prop_map(Happening::Pass),
        2 => (0..3_usize).prop_map(Happening::Sync),
        1 => Just(Happening::Publish),
        1 => Just(Happening::Lead),
    ]
}

fn chaotic() -> impl Strategy<Value = Happening> {
    prop_oneof![
        4 => (1..40_000_i64).prop_map(Happening::Pass),
        3 => Just(Happening::Lead),
        2 => Just(Happening::Publish),
        1 => (-2_000_000..2_000_000_i64).prop_map(Happening::ClockJump),
        1 => Just(Happening::LoseLeaf),
        1 => Just(Happening::LoseActive),
        1 => Just(Happening::SpoilBundle),
    ]
}

impl World {
    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Pass(millis) | Happening::ClockJump(millis) => self.pass(millis),
            Happening::Lead => drop(self.lead()),
            Happening::Publish => self.publish(),
            Happening::Sync(replica) => self.replicas[replica] = self.leaf,
            Happening::LoseLeaf => self.leaf = None,
            Happening::LoseActive => self.active = None,
            Happening::SpoilBundle => self.bundle.clear(),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// Replicas hear late or never, the leader and the registration are a few steps behind: nobody is ever refused.
    #[test]
    fn a_served_leaf_is_always_trusted(happenings in prop::collection::vec(lawful(), 100..600)) {
        let mut world = World::new(brisk());
        world.lead();
        world.publish();
        for (count, happening) in happenings.into_iter().enumerate() {
            world.happen(happening);
            if count % 4 == 0 { world.lead(); }
            if count % 6 == 0 { world.publish(); }
            let (trusted, _) = world.published.clone().unwrap();
            let own = world.leaf.into_iter();
            for leaf in world.replicas.iter().flatten().copied().chain(own) {
                prop_assert!(leaf.validity.expired(world.now) || trusted.contains(&leaf.by));
            }
            prop_assert!(!world.leaf.unwrap().validity.expired(world.now), "the stored leaf is always valid");
        }
    }

    /// Even when nothing is ever published, and whatever replica sleeps through everything.
    #[test]
    fn the_bundle_keeps_the_ca_of_every_valid_leaf(passes in prop::collection::vec((1..30_000_i64, any::<bool>()), 1..100)) {
        let mut world = World::new(brisk());
        for (millis, published) in passes {
            world.lead();
            if published { world.publish(); }
            for leaf in world.stored.iter().filter(|leaf| !leaf.validity.expired(world.now)) {
                prop_assert!(world.bundle.contains(&leaf.by));
            }
            world.pass(millis);
        }
    }

    /// Whatever happens to clocks and storage, leading once leaves something that works, and nothing to do until later.
    #[test]
    fn one_settling_is_enough(happenings in prop::collection::vec(chaotic(), 1..100)) {
        let mut world = World::new(brisk());
        for happening in happenings {
            world.happen(happening);
        }
        let until = world.lead();
        prop_assert!(until > world.now);
        let (active, leaf) = (world.active.unwrap(), world.leaf.unwrap());
        prop_assert!(!active.validity.expired(world.now) && !leaf.validity.expired(world.now));
        prop_assert_eq!(leaf.by, active.id);
        prop_assert!(leaf.validity.not_after <= active.validity.not_after);
        prop_assert!(world.bundle.contains(&active.id));
    }

    /// Years of normal work: the bundle never grows beyond the three that a rotation needs.
    #[test]
    fn the_bundle_stays_small(steps in prop::collection::vec(1..2000_i64, 100..300)) {
        let mut world = World::new(brisk());
        for millis in steps {
            world.lead();
            world.publish();
            world.pass(millis);
            prop_assert!(world.bundle.len() <= 3);
        }
    }
}
