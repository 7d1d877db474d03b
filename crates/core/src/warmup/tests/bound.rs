//! No gate stays shut beyond its bound, whatever becomes of places, agents and leaders.

use proptest::prelude::*;

use super::*;

const LONGEST: Duration = Duration::from_secs(60);
const TIMEOUT: u64 = 10;
const HORIZON: u64 = 3_000;

/// What happens around one pod whose server never answers.
#[derive(Clone, Debug)]
struct World {
    retries: u32,
    /// Whether a place is free, in slots of ten seconds; after the last it is as in the last.
    free: Vec<bool>,
    /// When the agent is killed, and for how long it is away.
    kills: Vec<(u64, u64)>,
    /// When another leader takes over.
    handovers: Vec<u64>,
}

/// The agent's memory, which dies with it.
enum Hand {
    Empty,
    Waiting(Job, u64),
    /// For how long it ran and stood.
    Running(Job, u64, u64),
}

impl World {
    fn agent_lives(&self, at: u64) -> bool {
        !self.kills.iter().any(|(from, away)| (*from..from + away).contains(&at))
    }

    fn is_free(&self, at: u64) -> bool {
        let slot = usize::try_from(at / 10).unwrap();
        self.free.get(slot).or(self.free.last()).copied().unwrap_or(true)
    }

    fn last_fault(&self) -> u64 {
        let kills = self.kills.iter().map(|(from, away)| from + away);
        kills.chain(self.handovers.iter().copied()).max().unwrap_or(0)
    }

    /// The second in which the gate opens.
    fn opens(&self) -> Option<u64> {
        let mut pod = pod().with(keys::WARMUP_DURATION, "5s").with(keys::WARMUP_RETRIES, &self.retries.to_string());
        let mut hand = Hand::Empty;
        let (mut heard, mut led_since, mut changed) = (0, 0, 0);
        for second in 0..HORIZON {
            let now = NOW + i64::try_from(second).unwrap().seconds();
            let before = pod.annotations.get(keys::WARMUP_STATE).cloned();
            if self.agent_lives(second) {
                heard = second;
                if let Some(write) = self.agent(&pod, &mut hand, second, now) {
                    pod = pod.after(&write);
                }
            } else {
                hand = Hand::Empty;
            }
            if pod.annotations.get(keys::WARMUP_STATE) != before.as_ref() {
                changed = second;
            }
            if self.handovers.contains(&second) {
                (led_since, changed) = (second, second);
            }
            let lasted = |since: u64| Duration::from_secs(second - since);
            let agent = Agent {
                node: "node-a",
                holder: None,
                silent_for: lasted(heard),
                gone_after: Duration::from_secs(30),
                led_for: lasted(led_since),
            };
            let opened = pod.see(|seen| {
                let verdict = backstop::decide(seen, agent, lasted(changed), LONGEST, now);
                seen.is_open() || matches!(verdict, backstop::Verdict::Open(_))
            });
            if opened {
                return Some(second);
            }
        }
        None
    }

    fn agent(&self, pod: &Pod, hand: &mut Hand, second: u64, now: Timestamp) -> Option<Write> {
        let end = |job: &Job, outcome: &Outcome| Some(job.attempt.ended(outcome, on_failure(job), now, 1.0));
        match std::mem::replace(hand, Hand::Empty) {
            Hand::Empty => match pod.see(|seen| decide(seen, LONGEST, now, 1.0)) {
                Verdict::Warm(job) => {
                    let queued = job.attempt.queued();
                    *hand = Hand::Waiting(*job, 0);
                    (!self.is_free(second)).then_some(queued)
                }
                Verdict::Conclude(write) => Some(write),
                _ => None,
            },
            Hand::Waiting(job, waited) if self.is_free(second) => {
                let started = job.attempt.started("x");
                *hand = Hand::Running(job, 0, waited);
                Some(started)
            }
            Hand::Waiting(job, waited) if waited >= job.patience.as_secs() => {
                end(&job, &Outcome::Unable(outcome::no_place(LONGEST)))
            }
            Hand::Waiting(job, waited) => {
                *hand = Hand::Waiting(job, waited + 1);
                None
            }
            Hand::Running(job, ran, stood) if ran >= TIMEOUT || stood >= job.patience.as_secs() => {
                end(&job, &Outcome::Ran(Tally { planned: 3, sent: 1, ..Tally::default() }))
            }
            Hand::Running(job, ran, stood) => {
                let goes_on = self.is_free(second);
                *hand = Hand::Running(job, ran + u64::from(goes_on), stood + u64::from(!goes_on));
                None
            }
        }
    }

    /// Each attempt may wait, run and back off; ten seconds are for everything in between.
    fn bound(&self) -> u64 {
        let attempts = u64::from(self.retries) + 1;
        let backoffs: u64 = (1..attempts).map(|n| outcome::backoff(n as u32, 1.0).as_secs()).sum();
        attempts * (LONGEST.as_secs() + TIMEOUT + 3) + backoffs + 10
    }
}

#[test]
fn without_any_place_the_gate_opens_after_the_longest_wait() {
    let world = World { retries: 0, free: vec![false], kills: vec![], handovers: vec![] };
    assert!(world.opens().is_some_and(|at| (60..=63).contains(&at)), "{:?}", world.opens());
}

#[test]
fn one_that_is_set_aside_for_ever_ends_after_the_longest_wait() {
    let world = World { retries: 0, free: vec![true, false], kills: vec![], handovers: vec![] };
    assert!(world.opens().is_some_and(|at| (60..=75).contains(&at)), "{:?}", world.opens());
}

#[test]
fn an_agent_that_dies_again_and_again_in_the_queue_does_not_make_it_longer() {
    let kills = (0..40).map(|i| (20 + 25 * i, 5)).collect();
    let world = World { retries: 0, free: vec![false], kills, handovers: vec![] };
    assert!(world.opens().is_some_and(|at| at <= 75), "{:?}", world.opens());
}

#[test]
fn a_dead_agent_is_given_up_within_a_minute_though_leaders_change() {
    for handover in 0..60 {
        let world = World { retries: 0, free: vec![true], kills: vec![(2, HORIZON)], handovers: vec![handover] };
        assert!(world.opens().is_some_and(|at| at <= 2 + 60), "{handover}: {:?}", world.opens());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_gate_stays_shut_beyond_its_bound(
        retries in 0_u32..3,
        free in prop::collection::vec(any::<bool>(), 0..60),
        kills in prop::collection::vec((0_u64..400, 1_u64..60), 0..5),
        handovers in prop::collection::vec(0_u64..400, 0..5),
    ) {
        let world = World { retries, free, kills, handovers };
        let limit = world.last_fault() + world.bound();
        let opened = world.opens();
        prop_assert!(opened.is_some_and(|at| at <= limit), "{opened:?} of {limit}");
    }
}
