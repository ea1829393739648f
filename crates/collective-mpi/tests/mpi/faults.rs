//! Ranks that fail, panic, stall or leave within a process that goes on; those that die are `cargo
//! xtask mpi`'s.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use fusestep_collective::{
    CollectiveError, Collectives, Communicator, Fault, FaultKind, Faulty, ReduceOp,
};

use super::scenarios::{COLLECTIVES, SCENARIOS, Scenario};
use super::worlds::{group, with_world};

/// That of the scenarios.
const TIMEOUT_MS: u64 = 1000;

/// A stall nobody hears of is this long, so that an error that comes earlier was not waited for,
/// even where the machine has other work.
const STALL_MS: u64 = 4 * TIMEOUT_MS;

fn three_ranks() -> bool {
    with_world(|world| world.world_size()) == 3
}

fn each_collective_and_culprit(kind: FaultKind, names: impl Fn(&CollectiveError, usize) -> bool) {
    if !three_ranks() {
        return;
    }
    for (index, (name, collective)) in COLLECTIVES.into_iter().enumerate() {
        // A stall takes its time; one rank after the other shares the collectives.
        let culprits = match kind {
            FaultKind::StallUntilFailed(_) => index % 3..index % 3 + 1,
            _ => 0..3,
        };
        for culprit in culprits {
            let scenario = [Fault { rank: culprit, call: 2, kind }];
            group(TIMEOUT_MS, |comm| {
                let rank = comm.rank();
                let mut comm = Faulty::new(comm, &scenario);
                comm.barrier().unwrap();
                let start = Instant::now();
                let outcome = catch_unwind(AssertUnwindSafe(move || {
                    collective(&mut comm).and_then(|()| comm.barrier())
                }));
                if rank == culprit {
                    return;
                }
                let error = outcome.expect("only the culprit panics").expect_err(name);
                assert!(names(&error, culprit), "{name}, rank {rank}, culprit {culprit}: {error}");
                // Before a rank that stalls is back; others are named at once.
                let limit = match kind {
                    FaultKind::StallUntilFailed(stall_ms) => stall_ms,
                    _ => 2 * TIMEOUT_MS,
                };
                let limit = Duration::from_millis(limit);
                assert!(start.elapsed() < limit, "{name}, rank {rank}: {:?}", start.elapsed());
            });
        }
    }
}

#[test]
fn a_rank_that_panics_in_any_collective_is_named_at_once() {
    each_collective_and_culprit(
        FaultKind::Kill,
        |error, who| matches!(error, CollectiveError::Panicked { rank, .. } if *rank == who),
    );
}

#[test]
fn a_rank_that_fails_in_any_collective_is_named_at_once() {
    each_collective_and_culprit(
        FaultKind::Fail,
        |error, culprit| matches!(error, CollectiveError::Aborted { rank, .. } if *rank == culprit),
    );
}

#[test]
fn a_rank_that_stalls_in_any_collective_is_named_after_the_deadline() {
    each_collective_and_culprit(FaultKind::StallUntilFailed(STALL_MS), |error, culprit| {
        matches!(
            error,
            CollectiveError::Late { ranks, timeout_ms: TIMEOUT_MS, .. } if *ranks == [culprit]
        )
    });
}

#[test]
fn every_scenario_ends_as_it_says() {
    if !three_ranks() {
        return;
    }
    for Scenario { faults, error } in serde_json::from_str::<Vec<Scenario>>(SCENARIOS).unwrap() {
        let outcome = group(TIMEOUT_MS, |comm| {
            let rank = comm.rank();
            let killed = |fault: &Fault| fault.rank == rank && fault.kind == FaultKind::Kill;
            let killed = faults.iter().any(killed);
            let mut comm = Faulty::new(comm, &faults);
            let outcome = catch_unwind(AssertUnwindSafe(move || {
                for _ in 0..2 {
                    let mut buffer = [1.0f32; 100];
                    comm.all_reduce(&mut buffer, ReduceOp::Sum)
                        .map_err(|error| error.to_string())?;
                    if buffer != [3.0; 100] {
                        return Err("corrupted".to_owned());
                    }
                }
                Ok(())
            }));
            assert_eq!(outcome.is_err(), killed);
            outcome.ok()
        });
        match (outcome, error) {
            (None, _) => {}
            (Some(found), None) => assert_eq!(found, Ok(())),
            (Some(found), Some(expected)) => {
                let found = found.unwrap_err();
                assert!(found.starts_with(&expected), "expected `{expected}`, found `{found}`");
            }
        }
    }
}

#[test]
fn an_abort_from_another_thread_frees_all_who_wait_and_may_come_twice() {
    let ranks = with_world(|world| world.world_size());
    if ranks == 1 {
        return;
    }
    let error = group(60_000, |mut comm| {
        let aborter = comm.aborter();
        assert_eq!(aborter.failure(), None);
        if comm.rank() == ranks - 1 {
            let aborter = aborter.clone();
            std::thread::sleep(Duration::from_millis(50));
            std::thread::spawn(move || {
                aborter.abort("enough");
                aborter.abort("more than enough");
            })
            .join()
            .unwrap();
        }
        let error = comm.barrier().unwrap_err();
        // As the communicator itself tells it, from any thread.
        let seen = std::thread::spawn(move || aborter.failure());
        assert_eq!(seen.join().unwrap().as_ref(), Some(&error));
        error
    });
    let reason = "enough".to_owned();
    assert_eq!(error, CollectiveError::Aborted { rank: ranks - 1, reason });
}

#[test]
fn a_rank_that_leaves_is_named_but_does_not_disturb_transfers_of_others() {
    if !three_ranks() {
        return;
    }
    let outcome = group(60_000, |mut comm| {
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
    });
    let left = Err(CollectiveError::Left { rank: 0, calls: 0 });
    let own = with_world(|world| world.rank());
    assert_eq!(outcome, if own == 0 { Ok(()) } else { left });
}

#[test]
fn a_delay_below_the_deadline_does_no_damage_and_names_the_straggler() {
    if !three_ranks() {
        return;
    }
    let scenario = [Fault { rank: 1, call: 2, kind: FaultKind::DelayMs(100) }];
    group(20_000, |comm| {
        let mut comm = Faulty::new(comm, &scenario);
        comm.barrier().unwrap();
        let mut buffer = [comm.rank() as f32; 4];
        comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(buffer, [3.0; 4]);
        let last = comm.recorder().calls().last().unwrap();
        if comm.rank() != 1 {
            assert_eq!(last.straggler, Some(1));
            assert!(last.waited_ns > 30_000_000, "{last:?}");
        }
    });
}

#[test]
fn flight_recorders_are_on_disk_after_an_error() {
    if with_world(|world| world.world_size()) == 1 {
        return;
    }
    let folder = std::env::temp_dir().join("fusestep-mpi-suite");
    let begun = std::time::SystemTime::now() - Duration::from_secs(1);
    group(20_000, |mut comm| {
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            comm.aborter().abort("to see the recorder");
        }
        comm.broadcast(&mut [0u8; 2], 0).unwrap_err();
        let name = format!("flight-recorder-rank-{}.json", comm.rank());
        let groups = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
        let dumps = groups.filter_map(|group| std::fs::metadata(group.join(&name)).ok());
        let newest = dumps.map(|dump| dump.modified().unwrap()).max();
        assert!(newest.is_some_and(|written| written > begun), "{newest:?}");
    });
}
