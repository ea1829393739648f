//! Ranks and engines that misbehave. Faults within NCCL take the stand-in, which can be told to
//! have them.

use std::time::{Duration, Instant};

use fusestep_collective::{
    CollectiveError, Collectives, Communicator, ReduceOp, communication_streams,
};
use fusestep_collective_nccl::{NcclCommunicator, NcclOptions};

use super::stand_in::{ASYNC_ERROR, Fault, STALL};
use super::worlds::{SHORT, group, options, outcomes, short, sizes, turn, within};

pub(crate) type Job = fn(&mut NcclCommunicator) -> Result<(), CollectiveError>;

pub(crate) const COLLECTIVES: [(&str, Job); 8] = [
    ("all-reduce", |c| c.all_reduce(&mut [1.0f32; 99], ReduceOp::Sum)),
    ("reduce", |c| c.reduce(&mut [1.0f32; 99], ReduceOp::Sum, 0)),
    ("broadcast", |c| c.broadcast(&mut [1.0f32; 99], 0)),
    ("all-gather", |c| {
        let n = c.world_size();
        c.all_gather(&[1.0f32; 9], &mut vec![0.0; 9 * n])
    }),
    ("reduce-scatter", |c| {
        let n = c.world_size();
        c.reduce_scatter(&vec![1.0f32; 9 * n], &mut [0.0; 9], ReduceOp::Sum)
    }),
    ("scatter", |c| {
        let n = c.world_size();
        c.scatter(&vec![1.0f32; 9 * n], &mut [0.0; 9], 0)
    }),
    ("gather", |c| {
        let n = if c.rank() == 0 { c.world_size() } else { 0 };
        c.gather(&[1.0f32; 9], &mut vec![0.0; 9 * n], 0)
    }),
    ("all-to-all", |c| {
        let n = c.world_size();
        c.all_to_all(&vec![1.0f32; 9 * n], &mut vec![0.0; 9 * n])
    }),
];

/// An error but for the call: of ranks that wait in different ones, each names its own.
fn said(error: &CollectiveError) -> CollectiveError {
    let mut said = error.clone();
    if let CollectiveError::Late { operation, sequence, .. } = &mut said {
        (*operation, *sequence) = ("any", 0);
    }
    said
}

/// Everyone's first collective goes wrong on rank `culprit`; a barrier afterwards finds out on
/// ranks that had done their part.
fn everyone_finds(
    kind: i32,
    expected: fn(&CollectiveError, usize) -> bool,
    timeout: Duration,
    limit: Duration,
) {
    let ranks = sizes().len();
    if ranks < 2 || Fault::new(0, 0, 0).is_none() {
        eprintln!("skipped: faults take the stand-in and two GPUs");
        return;
    }
    for (name, job) in COLLECTIVES {
        for culprit in [0, ranks - 1] {
            let fault = Fault::new(kind, culprit as i32, 1).unwrap();
            let begun = Instant::now();
            let own = NcclOptions { timeout, ..options() };
            let errors = within(Duration::from_secs(60), move || {
                group(ranks, &own, |mut comm| {
                    let outcome = job(&mut comm).and_then(|()| comm.barrier());
                    let error = outcome.expect_err("the group must end");
                    assert_eq!(comm.barrier().unwrap_err(), error, "the group stays closed");
                    error
                })
            });
            let what = format!("{name}, rank {culprit} of {ranks}");
            assert!(begun.elapsed() < limit, "{what}: {:?}", begun.elapsed());
            assert!(
                errors.iter().all(|error| said(error) == said(&errors[0])),
                "{what}: {errors:?}"
            );
            assert!(expected(&errors[0], culprit), "{what}: {}", errors[0]);
            assert_eq!(fault.live(), 0, "{what}: every communicator was given back");
        }
    }
}

#[test]
fn data_that_does_not_come_through_ends_everyone_within_twice_the_deadline() {
    let _turn = turn();
    // Ranks that have done their part go on to the next call, whose deadline may be the first to
    // pass. Two ranks may be missed there: the culprit, and the root that waits for its data,
    // rank 0; if one has said in time that it is stuck, the other alone.
    let expected = |error: &CollectiveError, culprit: usize| match error {
        CollectiveError::Late { ranks, .. } => ranks.contains(&culprit) || ranks.contains(&0),
        error => {
            error.to_string().contains("not through after 1000 ms, though every rank has come")
        }
    };
    // Some seconds more, for a machine that is busy with other things.
    everyone_finds(STALL, expected, SHORT, 2 * SHORT + Duration::from_secs(5));
}

#[test]
fn an_asynchronous_error_of_one_rank_is_everyones_at_once() {
    let _turn = turn();
    let expected = |error: &CollectiveError, culprit: usize| {
        matches!(error, CollectiveError::Engine { rank, reason, .. }
            if *rank == culprit && reason == "NCCL error 6, remote process exited or there was a network error")
    };
    let long = Duration::from_secs(20);
    everyone_finds(ASYNC_ERROR, expected, long, long);
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let _turn = turn();
    let ranks = sizes().len();
    if ranks < 2 {
        return;
    }
    let begun = Instant::now();
    let errors = within(Duration::from_secs(30), move || {
        group(ranks, &short(), |mut comm| {
            comm.barrier().unwrap();
            if comm.rank() == 1 {
                std::thread::sleep(2 * SHORT);
            }
            comm.all_reduce(&mut [1.0f32; 5], ReduceOp::Sum).unwrap_err()
        })
    });
    assert!(begun.elapsed() < 2 * SHORT + Duration::from_secs(5));
    for error in errors {
        match error {
            CollectiveError::Late { ranks, operation: "all-reduce", sequence: 2, .. } => {
                assert_eq!(ranks, [1])
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn an_abort_from_another_thread_ends_a_wait_for_data_at_once() {
    let _turn = turn();
    if sizes().len() < 2 {
        return;
    }
    let Some(fault) = Fault::new(STALL, 1, 1) else {
        return;
    };
    let begun = Instant::now();
    let errors = within(Duration::from_secs(30), || {
        group(2, &options(), |mut comm| {
            let aborter = comm.aborter();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(200));
                    if aborter.rank() == 0 {
                        aborter.abort("enough");
                        aborter.abort("enough again");
                    }
                });
                comm.all_reduce(&mut [1.0f32; 5], ReduceOp::Sum).unwrap_err()
            })
        })
    });
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    for error in errors {
        let expected = "aborted by rank 0: enough";
        assert_eq!(error.to_string(), expected);
    }
    assert_eq!(fault.live(), 0);
}

#[test]
fn a_rank_that_panics_or_leaves_ends_the_others() {
    let _turn = turn();
    let ranks = sizes().len();
    if ranks < 2 {
        return;
    }
    for panics in [true, false] {
        let found = within(Duration::from_secs(30), move || {
            outcomes(ranks, &options(), |mut comm| {
                comm.barrier().unwrap();
                if comm.rank() == 1 {
                    if panics {
                        std::panic::resume_unwind(Box::new("gone"));
                    }
                    return None;
                }
                Some(comm.all_reduce(&mut [1.0f32; 5], ReduceOp::Sum).unwrap_err())
            })
        });
        for (rank, outcome) in found.into_iter().enumerate() {
            match outcome {
                Ok(Some(CollectiveError::Panicked { rank: 1, .. })) => assert!(panics),
                Ok(Some(CollectiveError::Left { rank: 1, .. })) => assert!(!panics),
                Ok(None) => assert!(rank == 1 && !panics),
                Err(_) => assert!(rank == 1 && panics),
                Ok(Some(other)) => panic!("{other}"),
            }
        }
    }
}

#[test]
fn a_pending_call_that_is_dropped_ends_its_stream() {
    let _turn = turn();
    let ranks = sizes().len();
    let errors = group(ranks, &options(), |mut comm| {
        let stream = communication_streams(&mut comm, 1).unwrap().remove(0);
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            drop(stream.all_reduce(vec![1.0f32; 4], ReduceOp::Sum));
        }
        // On rank 0 the first may have got through before it was dropped; the next cannot.
        let first = stream.all_reduce(vec![1.0f32; 4], ReduceOp::Sum).wait();
        first.and_then(|_| stream.all_reduce(vec![1.0f32; 4], ReduceOp::Sum).wait())
    });
    let dropped =
        |error: &CollectiveError| matches!(error, CollectiveError::Dropped { rank: 0, .. });
    assert!(errors.iter().any(|error| error.as_ref().is_err_and(dropped)), "{errors:?}");
}

#[test]
fn the_flight_recorder_is_written_on_an_error() {
    let _turn = turn();
    let folder = std::env::temp_dir().join(format!("fusestep-nccl-{}", std::process::id()));
    let dumping = NcclOptions { dump_folder: Some(folder.clone()), ..options() };
    group(1, &dumping, |mut comm| {
        comm.all_reduce(&mut [1.0f32; 4], ReduceOp::Sum).unwrap();
        comm.aborter().abort("to see the recorder");
        comm.barrier().unwrap_err();
        let path = comm.recorder().dumped().unwrap().as_ref().unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.contains("all-reduce") && text.contains("to see the recorder"), "{text}");
    });
    std::fs::remove_dir_all(folder).unwrap();
}
