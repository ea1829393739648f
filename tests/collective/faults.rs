//! Ranks that die, stop, abort or leave: the others end in time with an error that names them.

use std::time::{Duration, Instant};

use super::scenarios::{COLLECTIVES, Collective, SCENARIOS, Scenario};
use super::worlds::{all, threads, within};
use fusestep_collective::{
    CallState, CollectiveError, Collectives, Communicator, Fault, FaultKind, Faulty, Options,
    ReduceOp, run_ranks,
};

/// A stall nobody hears of is this long, so that an error that comes earlier was not waited for.
const STALL_MS: u64 = 4 * TIMEOUT_MS;

const TIMEOUT_MS: u64 = 1000;

/// Makes a barrier, the collective and a barrier, where rank `culprit` has a fault at its second
/// call; the time after the first barrier and the outcome of each rank.
fn run(
    collective: Collective,
    culprit: usize,
    kind: FaultKind,
) -> Vec<std::thread::Result<(Duration, Result<(), CollectiveError>)>> {
    let scenario = [Fault { rank: culprit, call: 2, kind }];
    threads(3, TIMEOUT_MS, |comm| {
        let mut comm = Faulty::new(comm, &scenario);
        comm.barrier().unwrap();
        let start = Instant::now();
        let outcome = collective(&mut comm).and_then(|()| comm.barrier());
        (start.elapsed(), outcome)
    })
}

fn each_collective_and_culprit(
    kind: FaultKind,
    names: impl Fn(&CollectiveError, usize) -> bool + Sync,
) {
    std::thread::scope(|scope| {
        for (name, collective) in COLLECTIVES {
            let names = &names;
            scope.spawn(move || {
                for culprit in 0..3 {
                    let outcomes = run(collective, culprit, kind);
                    let survivors =
                        outcomes.into_iter().enumerate().filter(|(rank, _)| *rank != culprit);
                    let mut errors = Vec::new();
                    for (rank, outcome) in survivors {
                        let (elapsed, outcome) = outcome.unwrap();
                        let error = outcome.expect_err(name);
                        assert!(
                            names(&error, culprit),
                            "{name}, rank {rank}, culprit {culprit}: {error}"
                        );
                        // Before a rank that stalls is back.
                        assert!(
                            elapsed < Duration::from_millis(STALL_MS),
                            "{name}, rank {rank}: {elapsed:?}"
                        );
                        errors.push(error);
                    }
                    assert_eq!(errors[0], errors[1], "{name}");
                }
            });
        }
    });
}

#[test]
fn a_rank_that_panics_in_any_collective_is_named_at_once() {
    within(60, || {
        each_collective_and_culprit(FaultKind::Kill, |error, culprit| {
            matches!(
                error,
                CollectiveError::Panicked { rank, .. } if *rank == culprit
            )
        });
    });
}

#[test]
fn a_rank_that_stalls_in_any_collective_is_named_after_the_deadline() {
    within(60, || {
        each_collective_and_culprit(FaultKind::StallUntilFailed(STALL_MS), |error, culprit| {
            matches!(
                error,
                CollectiveError::Late { ranks, timeout_ms: TIMEOUT_MS, .. } if *ranks == [culprit]
            )
        });
    });
}

#[test]
fn a_rank_that_fails_in_any_collective_is_named_at_once() {
    within(60, || {
        each_collective_and_culprit(FaultKind::Fail, |error, culprit| {
            matches!(
                error,
                CollectiveError::Aborted { rank, .. } if *rank == culprit
            )
        });
    });
}

#[test]
fn a_delay_below_the_deadline_does_no_damage_and_names_the_straggler() {
    let scenario = [Fault { rank: 1, call: 2, kind: FaultKind::DelayMs(100) }];
    let stragglers = all(threads(3, 20_000, |comm| {
        let mut comm = Faulty::new(comm, &scenario);
        comm.barrier().unwrap();
        let mut buffer = [comm.rank() as f32; 4];
        comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(buffer, [3.0; 4]);
        let last = comm.recorder().calls().last().unwrap();
        (last.straggler, last.waited_ns)
    }));
    assert!(stragglers.iter().all(|(straggler, _)| *straggler == Some(1)), "{stragglers:?}");
    assert!(stragglers[0].1 > 50_000_000 && stragglers[1].1 == 0, "{stragglers:?}");
}

#[test]
fn every_scenario_ends_as_it_says() {
    for Scenario { faults, error } in serde_json::from_str::<Vec<Scenario>>(SCENARIOS).unwrap() {
        let killed = faults.iter().any(|fault| fault.kind == FaultKind::Kill);
        let outcomes = threads(3, TIMEOUT_MS, |comm| {
            let mut comm = Faulty::new(comm, &faults);
            for _ in 0..2 {
                let mut buffer = [1.0f32; 100];
                comm.all_reduce(&mut buffer, ReduceOp::Sum).map_err(|error| error.to_string())?;
                if buffer != [3.0; 100] {
                    return Err("corrupted".to_owned());
                }
            }
            Ok(())
        });
        let mut panicked = 0;
        for outcome in outcomes {
            match (outcome, &error) {
                (Err(_), _) => panicked += 1,
                (Ok(found), None) => assert_eq!(found, Ok(())),
                (Ok(found), Some(expected)) => {
                    let found = found.unwrap_err();
                    assert!(found.starts_with(expected), "expected `{expected}`, found `{found}`");
                }
            }
        }
        assert_eq!(panicked, usize::from(killed));
    }
}

#[test]
fn an_abort_from_another_thread_frees_all_who_wait_and_may_come_twice() {
    within(30, || {
        let errors = all(threads(3, 60_000, |mut comm| {
            if comm.rank() == 2 {
                let aborter = comm.aborter();
                std::thread::sleep(Duration::from_millis(50));
                std::thread::spawn(move || {
                    aborter.abort("enough");
                    aborter.abort("more than enough");
                })
                .join()
                .unwrap();
            }
            comm.barrier()
        }));
        let expected = CollectiveError::Aborted { rank: 2, reason: "enough".to_owned() };
        assert_eq!(errors, vec![Err(expected); 3]);
    });
}

#[test]
fn a_rank_that_leaves_is_named_but_does_not_disturb_transfers_of_others() {
    within(30, || {
        let outcomes = all(threads(3, 60_000, |mut comm| {
            match comm.rank() {
                0 => return Ok(()),
                1 => {
                    std::thread::sleep(Duration::from_millis(50));
                    comm.send(&[5u8], 2)?;
                }
                _ => {
                    let mut byte = [0u8];
                    comm.receive(&mut byte, 1)?;
                    assert_eq!(byte, [5]);
                }
            }
            comm.barrier()
        }));
        let left = CollectiveError::Left { rank: 0, calls: 0 };
        assert_eq!(outcomes, [Ok(()), Err(left.clone()), Err(left)]);
    });
}

#[test]
fn flight_recorders_are_on_disk_after_an_error() {
    let folder = std::env::temp_dir().join(format!("fusestep-collective-{}", std::process::id()));
    let options = Options {
        timeout: Duration::from_millis(TIMEOUT_MS),
        recorded_calls: 4,
        dump_folder: Some(folder.clone()),
        ..Options::default()
    };
    let states = all(run_ranks(2, &options, |mut comm| {
        for _ in 0..6 {
            comm.all_reduce(&mut [1.0f32; 3], ReduceOp::Sum).unwrap();
        }
        // However long the other rank takes to get there: it is the one that finds this one late.
        while comm.rank() == 1 && comm.failure().is_none() {
            std::thread::sleep(Duration::from_millis(10));
        }
        comm.broadcast(&mut [0u8; 2], 1).unwrap_err();
        let dumped = comm.recorder().dumped();
        assert!(dumped.is_some_and(Result::is_ok), "{dumped:?}");
        comm.recorder().calls().map(|call| call.state.clone()).collect::<Vec<_>>()
    })
    .unwrap());
    for (rank, states) in states.iter().enumerate() {
        assert_eq!(states[..3], [CallState::Done, CallState::Done, CallState::Done]);
        assert!(
            matches!(&states[3], CallState::Failed(text) if text.contains("found none of [1]")),
            "{states:?}"
        );
        let path = folder.join(format!("flight-recorder-rank-{rank}.json"));
        let dump: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        assert_eq!(
            (dump["rank"].as_u64(), dump["calls_begun"].as_u64()),
            (Some(rank as u64), Some(7))
        );
        let last = &dump["calls"][3];
        assert_eq!(
            (last["operation"].as_str(), last["len_bytes"].as_u64()),
            (Some("broadcast"), Some(2))
        );
        assert_eq!(dump["calls"].as_array().map(Vec::len), Some(4));
    }
    std::fs::remove_dir_all(folder).unwrap();
}
