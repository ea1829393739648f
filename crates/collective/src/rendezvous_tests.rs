//! The meeting of threads, on real ones; `tests/model.rs` has all interleavings.

use crate::rendezvous::{Claim, Contribution, Participant, participants};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

type TestParticipant = Participant<usize, String>;

fn soon(millis: u64) -> Instant {
    Instant::now() + Duration::from_millis(millis)
}

fn name(late: &[usize]) -> String {
    format!("late {late:?}")
}

fn idle(participant: &mut TestParticipant, deadline: Instant) -> Result<(), String> {
    let ends = vec![0; participant.parties()];
    let contribution = Contribution {
        header: participant.party(),
        shared: &[],
        writable: &mut [],
        ends: &ends,
        reserved: 0,
        replicas: Default::default(),
        replica_ends: &[],
    };
    participant.rendezvous(contribution, deadline, name, |_| ())
}

/// Every party's thread gets its participant; results in party order.
fn each<R: Send>(parties: usize, body: impl Fn(TestParticipant) -> R + Sync) -> Vec<R> {
    let participants = participants(parties);
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = participants
            .into_iter()
            .map(|participant| scope.spawn(move || body(participant)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn every_party_reads_all_shares_and_writes_its_parts_in_every_round() {
    for parties in [1, 2, 3, 8] {
        each(parties, |mut participant| {
            let own = participant.party();
            for round in 0..500u64 {
                let shared = [own as u8, round as u8];
                let mut writable = vec![0xff; parties + 3];
                let mut ends: Vec<usize> = (1..=parties).collect();
                ends[parties - 1] = parties + 3;
                let contribution = Contribution {
                    header: own,
                    shared: &shared,
                    writable: &mut writable,
                    ends: &ends,
                    reserved: usize::MAX,
                    replicas: Default::default(),
                    replica_ends: &[],
                };
                let seen = participant.rendezvous(contribution, soon(60_000), name, |peers| {
                    let mut claim = peers.reserved();
                    for writable in claim.all_mut() {
                        writable.fill((own + round as usize) as u8);
                    }
                    assert!(peers.reserved().range().is_empty(), "handed out once");
                    assert!(peers.claim(own, 1).writable(own).is_empty());
                    (0..peers.parties())
                        .map(|p| {
                            (
                                *peers.header(p),
                                peers.shared(p)[0],
                                peers.shared(p)[1],
                                claim.writable(p).len(),
                            )
                        })
                        .collect::<Vec<_>>()
                });
                let part = if own == parties - 1 { 4 } else { 1 };
                let expected: Vec<_> =
                    (0..parties).map(|p| (p, p as u8, round as u8, part)).collect();
                assert_eq!(seen.unwrap(), expected);
                for (index, &byte) in writable.iter().enumerate() {
                    assert_eq!(
                        byte,
                        (index.min(parties - 1) + round as usize) as u8,
                        "{parties} {round} {index}"
                    );
                }
            }
        });
    }
}

#[test]
fn every_byte_is_claimed_by_one_party() {
    let (parties, rounds) = (3, 200u64);
    each(parties, |mut participant| {
        let own = participant.party();
        for round in 0..rounds {
            // Parts of 100, 0 and 1,000 bytes; the last party lends nothing.
            let ends = if own == 2 { [0; 3] } else { [100, 100, 1100] };
            let mut writable = vec![0u8; ends[2]];
            let contribution = Contribution {
                header: own,
                shared: &[],
                writable: &mut writable,
                ends: &ends,
                reserved: [7, 0, 50][own],
                replicas: Default::default(),
                replica_ends: &[],
            };
            let step = 1 + (round as usize + own) % 13;
            let claimed = participant.rendezvous(contribution, soon(60_000), name, |peers| {
                let mut claimed = 0;
                let mut work = |claim: &mut Claim<'_, usize>| {
                    claim.writable_mut(0).iter_mut().for_each(|byte| *byte += 1);
                    let mut all = claim.all_mut();
                    let lengths = [(); 3].map(|()| all.next().map_or(0, |writable| writable.len()));
                    assert_eq!((lengths[1], lengths[2]), (lengths[0], 0));
                    all.next().inspect(|_| panic!("a fourth party"));
                    drop(all);
                    claim.writable_mut(1).iter_mut().for_each(|byte| *byte += 1);
                    claimed += lengths[0];
                    lengths[0] > 0
                };
                work(&mut peers.reserved());
                for part in [own, (own + 1) % 3, (own + 2) % 3] {
                    while work(&mut peers.claim(part, step)) {}
                }
                claimed
            });
            assert!(claimed.is_ok());
            assert!(writable.iter().all(|&byte| byte == 1), "{round} {own}");
        }
    });
}

#[test]
fn claims_stop_at_the_greatest_number() {
    let mut participants = participants::<usize, String>(1);
    let mut writable = [0u8; 10];
    let contribution = Contribution {
        header: 0,
        shared: &[],
        writable: &mut writable,
        ends: &[10],
        reserved: 4,
        replicas: Default::default(),
        replica_ends: &[],
    };
    let outcome = participants[0].rendezvous(contribution, soon(60_000), name, |peers| {
        let lens = [3, 0, usize::MAX, usize::MAX, 1];
        (
            peers.reserved().writable(0).len(),
            lens.map(|len| {
                (peers.claim(0, len).range().start, peers.claim(0, 0).writable(0).len())
            }),
            lens.map(|len| peers.claim(0, len).writable(0).len()),
        )
    });
    let starts = [(4, 0), (7, 0), (7, 0), (usize::MAX, 0), (usize::MAX, 0)];
    assert_eq!(outcome, Ok((4, starts, [0; 5])));
}

#[test]
fn a_missing_party_is_named_by_all_others_and_by_itself_when_it_comes() {
    for missing in 0..3 {
        let outcomes = each(3, |mut participant| {
            // It comes when the others have given it up, however long a busy machine lets that
            // take.
            while participant.party() == missing && participant.of().failure().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            idle(&mut participant, soon(1000))
        });
        assert_eq!(outcomes, vec![Err(format!("late [{missing}]")); 3]);
    }
}

#[test]
fn a_failure_from_outside_reaches_those_who_wait_and_those_who_come() {
    let mut participants = participants::<usize, String>(2);
    let rendezvous = participants[0].of().clone();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| idle(&mut participants[0], soon(60_000)));
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(rendezvous.fail("stop".to_owned()), "stop");
        assert_eq!(rendezvous.fail("again".to_owned()), "stop");
        assert_eq!(waiting.join().unwrap(), Err("stop".to_owned()));
    });
    assert_eq!(idle(&mut participants[1], soon(1)), Err("stop".to_owned()));
    assert_eq!(rendezvous.failure(), Some("stop".to_owned()));
}

#[test]
fn a_failure_in_an_open_round_strikes_the_next() {
    let outcomes = each(2, |mut participant| {
        let rendezvous = participant.of().clone();
        let contribution = Contribution {
            header: 0,
            shared: &[],
            writable: &mut [],
            ends: &[0, 0],
            reserved: 0,
            replicas: Default::default(),
            replica_ends: &[],
        };
        let first = participant
            .rendezvous(contribution, soon(60_000), name, |_| rendezvous.fail("later".to_owned()));
        (first, idle(&mut participant, soon(60_000)))
    });
    let expected = (Ok("later".to_owned()), Err("later".to_owned()));
    assert_eq!(outcomes, [expected.clone(), expected]);
}

#[test]
fn a_round_opens_for_all_or_for_none_when_deadlines_race_with_arrivals() {
    for trial in 0..200u64 {
        let outcomes = each(3, |mut participant| {
            std::thread::sleep(Duration::from_micros(
                50 * ((trial + participant.party() as u64 * 7) % 11),
            ));
            idle(&mut participant, Instant::now() + Duration::from_micros(300))
        });
        assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "{outcomes:?}");
    }
}

#[test]
fn a_panic_at_work_still_waits_for_the_others() {
    let outcomes = each(2, |mut participant| {
        let own = participant.party();
        let mut writable = vec![0u8; 2];
        let caught = catch_unwind(AssertUnwindSafe(|| {
            let contribution = Contribution {
                header: own,
                shared: &[],
                writable: &mut writable,
                ends: &[1, 2],
                reserved: 1,
                replicas: Default::default(),
                replica_ends: &[],
            };
            participant.rendezvous(contribution, soon(60_000), name, |peers| {
                if own == 0 {
                    panic!("at work");
                }
                std::thread::sleep(Duration::from_millis(100));
                peers.reserved().writable_mut(0).fill(7);
            })
        }));
        (caught.is_err(), writable)
    });
    assert_eq!(outcomes[0], (true, vec![0, 7]), "the write of party 1 came before party 0 unwound");
    assert!(!outcomes[1].0);
}

#[test]
fn ends_that_do_not_cut_are_refused_before_anyone_sees_them() {
    for ends in [&[1, 1][..], &[2, 1], &[2], &[0, 1, 2]] {
        let mut participants = participants::<usize, String>(2);
        let mut writable = [0u8; 2];
        let contribution = Contribution {
            header: 0,
            shared: &[],
            writable: &mut writable,
            ends,
            reserved: 0,
            replicas: Default::default(),
            replica_ends: &[],
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            participants[0].rendezvous(contribution, soon(10), name, |_| ())
        }));
        assert!(outcome.is_err(), "{ends:?}");
    }
}

#[test]
fn every_party_alone_writes_its_parts_of_all_replicas() {
    for parties in [1, 2, 3, 8] {
        each(parties, |mut participant| {
            let own = participant.party();
            for round in 1..100u8 {
                // Two replicas: a byte for each party, and as many as the party's number.
                let (mut short, mut long) =
                    (vec![0; parties], vec![0; parties * (parties - 1) / 2]);
                let mut ends: Vec<usize> = (1..=parties).collect();
                ends.extend((1..=parties).map(|party| party * (party - 1) / 2));
                let nobody = vec![0; parties];
                let mut replicas: [&mut [u8]; crate::rendezvous::MAX_REPLICAS] = Default::default();
                (replicas[0], replicas[1]) = (&mut short, &mut long);
                let contribution = Contribution {
                    header: own,
                    shared: &[],
                    writable: &mut [],
                    ends: &nobody,
                    reserved: 0,
                    replicas,
                    replica_ends: &ends,
                };
                let met = participant.rendezvous(contribution, soon(10_000), name, |peers| {
                    let mut parts = peers.replicas();
                    let lens: Vec<usize> = parts.of(0).map(<[u8]>::len).collect();
                    assert_eq!(lens, [1, own]);
                    assert_eq!(parts.all_mut().count(), 2 * parties);
                    for (replica, bytes) in parts.all_mut() {
                        bytes.fill(round + own as u8 + 100 * replica as u8);
                    }
                    assert_eq!(peers.replicas().all_mut().count(), 0);
                });
                met.unwrap();
                for (party, &found) in short.iter().enumerate() {
                    let expected = round + party as u8;
                    assert_eq!(found, expected);
                    let part = party * party.saturating_sub(1) / 2..party * (party + 1) / 2;
                    assert!(long[part].iter().all(|&byte| byte == expected + 100));
                }
            }
        });
    }
}

#[test]
#[should_panic(expected = "ends must rise from 0 to the length of each replica")]
fn replicas_that_are_not_cut_for_all_parties_are_refused() {
    let mut participants = participants::<usize, String>(2);
    let (mut bytes, ends) = ([0; 4], [0, 0]);
    let mut replicas: [&mut [u8]; crate::rendezvous::MAX_REPLICAS] = Default::default();
    replicas[0] = &mut bytes;
    let contribution = Contribution {
        header: 0,
        shared: &[],
        writable: &mut [],
        ends: &ends,
        reserved: 0,
        replicas,
        replica_ends: &[2, 3],
    };
    let _ = participants[0].rendezvous(contribution, soon(10), name, |_| ());
}
