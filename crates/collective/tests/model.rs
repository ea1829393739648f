//! The meeting of threads, run through all interleavings of its steps and all values that its
//! atomics may show.
//!
//! `rendezvous.rs` and simd's `notifier.rs` are compiled here once more, on the model checker's
//! locks, atomics and cells in place of those of `sync.rs`. A lost wake-up is a deadlock
//! of the model; memory used after it was given back is a race on one of its cells. Everyday runs
//! bound how often a thread is interrupted where it could go on; `--ignored` runs without bound or
//! with more threads, for minutes.

#[allow(unreachable_pub)]
#[path = "../../simd/src/notifier.rs"]
mod notifier;
// Only what the scenarios use; the rest is the same code.
#[allow(dead_code, unreachable_pub, unused_imports)]
#[path = "../src/rendezvous.rs"]
mod rendezvous;
// The types that simd's model puts in the place of its own.
#[allow(dead_code)]
#[path = "../../simd/tests/model/sync.rs"]
mod sync;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use loom::cell::UnsafeCell;
use rendezvous::{Claim, Contribution, Participant, Rendezvous, participants};
use sync::{Change, Instant, NEVER, PASSED};

/// Why a rendezvous is closed.
#[derive(Clone, Debug, PartialEq)]
enum Failure {
    Late(Vec<usize>),
    Stop,
}

/// Memory of a party, watched by the model: written by its owner outside of rounds, read by
/// everyone in them.
#[derive(Clone)]
struct Memory(Arc<UnsafeCell<u64>>);

impl Memory {
    // The model runs all its threads in one.
    #[allow(clippy::arc_with_non_send_sync)]
    fn new() -> Self {
        Self(Arc::new(UnsafeCell::new(0)))
    }

    fn write(&self, value: u64) {
        self.0.with_mut(|memory| {
            // SAFETY: the model ends with an error where another thread could use the cell now.
            unsafe { *memory = value }
        });
    }

    fn read(&self) -> u64 {
        self.0.with(|memory| {
            // SAFETY: as above.
            unsafe { *memory }
        })
    }
}

type TestParticipant = Participant<Memory, Failure>;
type TestRendezvous = Rendezvous<Memory, Failure>;

/// One round: what this party's memory shows is written before, read by all within and written over
/// after.
fn round(
    participant: &mut TestParticipant,
    own: &Memory,
    value: u64,
    deadline: Instant,
) -> Result<Vec<u64>, Failure> {
    own.write(value);
    let parties = participant.parties();
    // What the model does not watch is left out where something is broken: it would really be used
    // after its end.
    let bytes = usize::from(!sync::is_changed());
    let (shared, mut writable) = (vec![value as u8; bytes], vec![0u8; bytes * parties]);
    let ends: Vec<usize> = (1..=parties).map(|party| bytes * party).collect();
    let contribution = Contribution {
        header: own.clone(),
        shared: &shared,
        writable: &mut writable,
        ends: &ends,
        reserved: bytes,
        replicas: Default::default(),
        replica_ends: &[],
    };
    let late = |late: &[usize]| Failure::Late(late.to_vec());
    let outcome = participant.rendezvous(contribution, deadline, late, |peers| {
        let mut claim = peers.reserved();
        (0..parties)
            .map(|party| {
                claim.writable_mut(party).fill(value as u8);
                let shared = peers.shared(party).iter().map(|&byte| u64::from(byte));
                shared.sum::<u64>() + peers.header(party).read()
            })
            .collect::<Vec<u64>>()
    });
    own.write(u64::MAX);
    outcome
}

/// A thread for each party, its deadlines one for each round; the outcomes of their rounds in party
/// order.
fn run(
    deadlines: &[&[Instant]],
    beside: impl FnOnce(TestRendezvous),
) -> Vec<Vec<Result<Vec<u64>, Failure>>> {
    let participants = participants::<Memory, Failure>(deadlines.len());
    let rendezvous = participants[0].of().clone();
    let mut threads = Vec::new();
    for (party, (mut participant, deadlines)) in participants.into_iter().zip(deadlines).enumerate()
    {
        let deadlines = deadlines.to_vec();
        threads.push(loom::thread::spawn(move || {
            let own = Memory::new();
            let rounds = deadlines.into_iter().enumerate();
            rounds
                .map(|(index, deadline)| {
                    round(&mut participant, &own, (10 * index + party) as u64, deadline)
                })
                .collect()
        }));
    }
    beside(rendezvous);
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// What every party sees in a round that opens: each value in watched memory and, where there is
/// any, in shared bytes.
fn seen(parties: usize, index: usize) -> Result<Vec<u64>, Failure> {
    let times = 1 + usize::from(!sync::is_changed());
    Ok((0..parties).map(|party| (times * (10 * index + party)) as u64).collect())
}

/// Runs a scenario through the interleavings with at most so many interruptions, or through all.
fn check(interruptions: Option<usize>, scenario: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = interruptions;
    builder.check(scenario);
}

fn rounds(parties: usize, count: usize) {
    let deadlines = vec![vec![NEVER; count]; parties];
    let deadlines: Vec<&[Instant]> = deadlines.iter().map(|all| &all[..]).collect();
    let expected: Vec<_> = (0..count).map(|index| seen(parties, index)).collect();
    assert_eq!(run(&deadlines, drop), vec![expected; parties]);
}

/// Somebody else closes the rendezvous at any moment.
fn broken_off(parties: usize) {
    let deadlines = vec![&[NEVER][..]; parties];
    let outcomes = run(&deadlines, |rendezvous| {
        assert_eq!(rendezvous.fail(Failure::Stop), Failure::Stop);
        assert_eq!(rendezvous.failure(), Some(Failure::Stop));
    });
    let first = &outcomes[0];
    assert!(outcomes.iter().all(|outcome| outcome == first), "{outcomes:?}");
    assert!(*first == [seen(parties, 0)] || *first == [Err(Failure::Stop)]);
}

/// The deadline of the first parties passes at any moment.
fn in_a_hurry(parties: usize, hurried: usize) {
    let deadlines: Vec<&[Instant]> = (0..parties)
        .map(|party| if party < hurried { &[PASSED][..] } else { &[NEVER][..] })
        .collect();
    let outcomes = run(&deadlines, drop);
    let first = &outcomes[0];
    assert!(outcomes.iter().all(|outcome| outcome == first), "{outcomes:?}");
    match &first[0] {
        Ok(_) => assert_eq!(first[0], seen(parties, 0)),
        Err(Failure::Late(late)) => assert!(!late.is_empty() && late.len() < parties, "{late:?}"),
        Err(other) => panic!("{other:?}"),
    }
}

/// Two parties claim two parts of two bytes each, one by one; bytes are what the model watches, and
/// both may write those they claim.
// As in `Memory::new`.
#[allow(clippy::arc_with_non_send_sync)]
fn claims(rounds: u64) {
    let bytes: Arc<Vec<Memory>> = Arc::new((0..4).map(|_| Memory::new()).collect());
    let claim_all = move |mut participant: Participant<Arc<Vec<Memory>>, Failure>,
                          own: Arc<Vec<Memory>>| {
        for _ in 0..rounds {
            let contribution = Contribution {
                header: Arc::clone(&own),
                shared: &[],
                writable: &mut [],
                ends: &[0, 0],
                reserved: 1,
                replicas: Default::default(),
                replica_ends: &[],
            };
            let (party, late) = (participant.party(), |_: &[usize]| Failure::Stop);
            let outcome = participant.rendezvous(contribution, NEVER, late, |peers| {
                let bytes = peers.header(1 - party);
                let work = |part: usize, claim: &Claim<'_, _>| {
                    let first = claim.range().start;
                    let byte = (first < 2).then(|| &bytes[2 * part + first]);
                    byte.inspect(|byte| byte.write(byte.read() + 1));
                };
                work(party, &peers.reserved());
                work(party, &peers.claim(party, 1));
                work(1 - party, &peers.claim(1 - party, 1));
            });
            assert_eq!(outcome, Ok(()));
        }
    };
    let mut threads = Vec::new();
    for participant in participants(2) {
        let own = Arc::clone(&bytes);
        threads.push(loom::thread::spawn(move || claim_all(participant, own)));
    }
    for thread in threads {
        thread.join().unwrap();
    }
    assert!(bytes.iter().all(|byte| byte.read() == rounds));
}

#[test]
fn what_is_claimed_is_one_partys() {
    check(Some(3), || claims(1));
    check(Some(2), || claims(2));
}

#[test]
fn every_round_opens_and_ends_and_memory_is_given_back_unused() {
    check(Some(3), || rounds(2, 2));
    check(Some(2), || rounds(3, 1));
}

#[test]
fn breaking_off_ends_every_wait_and_strikes_all_or_none() {
    check(Some(3), || broken_off(2));
    check(Some(1), || broken_off(3));
}

#[test]
fn a_deadline_strikes_all_or_none() {
    check(Some(3), || in_a_hurry(2, 1));
    check(Some(3), || in_a_hurry(2, 2));
    check(Some(1), || in_a_hurry(3, 1));
}

#[test]
fn a_failure_in_an_open_round_strikes_the_next() {
    check(Some(2), || {
        let outcomes = run(&[&[NEVER, NEVER], &[NEVER, PASSED]], drop);
        for outcome in &outcomes {
            assert_eq!(outcome[0], seen(2, 0));
        }
        assert_eq!(outcomes[0][1], outcomes[1][1]);
    });
}

#[test]
#[ignore = "minutes"]
fn without_bound() {
    check(None, || rounds(2, 1));
    check(Some(5), || claims(1));
    check(Some(3), || claims(2));
    check(None, || broken_off(2));
    check(None, || in_a_hurry(2, 2));
    check(Some(4), || rounds(2, 2));
    check(Some(3), || rounds(3, 1));
    check(Some(2), || broken_off(3));
    check(Some(2), || in_a_hurry(3, 2));
}

/// A model that finds nothing in broken code proves nothing about the code.
#[test]
fn each_change_for_the_worse_is_found() {
    let two_rounds: fn() = || rounds(2, 2);
    let abort: fn() = || broken_off(2);
    let deadlines: fn() = || in_a_hurry(2, 2);
    let claimed: fn() = || claims(1);
    // Departures that are not waited for show as memory used by two, or as two rounds run into each
    // other.
    let early = ["Causality violation", "deadlock", "a round opens when"];
    for (change, scenario, expected) in [
        (Change::SilentNotifier, two_rounds, &["deadlock"][..]),
        (Change::SilentNotifier, abort, &["deadlock"]),
        (Change::NotifierWithoutLock, two_rounds, &["deadlock"]),
        (Change::NotifierWithoutLock, abort, &["deadlock"]),
        (Change::SleepersUnordered, two_rounds, &["deadlock"]),
        (Change::GateUnordered, two_rounds, &["Causality violation"]),
        (Change::GateTorn, two_rounds, &["deadlock"]),
        // Who counts the late parties waits for ever for one that is counted and does not say so.
        (Change::GateTorn, deadlines, &["maximum number of branches"]),
        (Change::EarlyDeparture, two_rounds, &early),
        (Change::ClaimsTorn, claimed, &["Causality violation"]),
    ] {
        let found = catch_unwind(AssertUnwindSafe(|| {
            check(Some(3), move || sync::with_change(change, scenario));
        }));
        let panic = found.expect_err("the model must find what was broken");
        let text = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()))
            .unwrap_or_default();
        assert!(
            expected.iter().any(|what| text.contains(what)),
            "{change:?}: expected one of {expected:?}, found {text}"
        );
    }
}
