//! Pending calls, several communication streams, and subgroups.

use std::time::Duration;

use fusestep_collective::{
    CollectiveError, Collectives, Communicator, Membership, Options, ReduceOp,
    communication_streams, run_ranks,
};

use super::worlds::{all, threads, within, world};

#[test]
fn calls_of_one_stream_are_behind_each_other_and_streams_overlap() {
    within(60, || {
        all(threads(2, 20_000, |mut comm| {
            let two = communication_streams(&mut comm, 2).unwrap();
            // Rank 0 starts on communication stream 0 what rank 1 waits for last: with one
            // communication stream for both this would not end.
            let slow = two[0].start("all-reduce", vec![1.0f32; 3], |comm, buffer| {
                if comm.rank() == 0 {
                    std::thread::sleep(Duration::from_millis(300));
                }
                comm.all_reduce(buffer, ReduceOp::Sum)
            });
            let started = std::time::Instant::now();
            let fast = two[1].all_reduce(vec![5i64; 3], ReduceOp::Prod);
            assert_eq!(fast.wait().unwrap(), [25; 3]);
            if comm.rank() == 1 {
                assert!(
                    started.elapsed() < Duration::from_millis(250),
                    "the streams did not overlap"
                );
            }
            assert_eq!(slow.wait().unwrap(), [2.0; 3]);
        }));
    });
}

#[test]
fn a_thousand_pending_calls_come_back_in_any_order_of_waiting() {
    within(60, || {
        all(threads(3, 20_000, |mut comm| {
            let two = communication_streams(&mut comm, 2).unwrap();
            let pending: Vec<_> = (0..1000)
                .map(|i| two[i % 2].all_reduce(vec![i as i32; 5], ReduceOp::Sum))
                .collect();
            for (i, pending) in pending.into_iter().enumerate().rev() {
                assert_eq!(pending.wait().unwrap(), [3 * i as i32; 5]);
            }
        }));
    });
}

#[test]
fn dropping_a_pending_call_closes_the_stream_on_all_ranks() {
    within(30, || {
        let errors = all(threads(2, 20_000, |mut comm| {
            let one = communication_streams(&mut comm, 1).unwrap();
            comm.barrier().unwrap();
            if comm.rank() == 1 {
                drop(one[0].all_reduce(vec![1u8; 4], ReduceOp::Max));
            } else {
                std::thread::sleep(Duration::from_millis(50));
            }
            let _ = one[0].start("wait", (), |comm, ()| comm.barrier()).wait();
            let last = one[0].start("all-reduce", (), |comm, ()| comm.barrier()).wait();
            comm.barrier().unwrap();
            last
        }));
        let dropped = CollectiveError::Dropped { rank: 1, operation: "all-reduce" };
        assert_eq!(errors, vec![Err(dropped); 2]);
    });
}

#[test]
fn a_panic_in_a_stream_reaches_whoever_waits_and_the_other_ranks() {
    within(30, || {
        let errors = all(threads(2, 20_000, |mut comm| {
            let one = communication_streams(&mut comm, 1).unwrap();
            let outcome = one[0].start("all-reduce", (), |comm, ()| {
                assert!(comm.rank() == 0, "rank 1 fails at work");
                comm.barrier()
            });
            outcome.wait().unwrap_err()
        }));
        assert!(matches!(errors[0], CollectiveError::Panicked { rank: 1, .. }), "{}", errors[0]);
        assert!(errors[1].to_string().contains("panicked"), "{}", errors[1]);
    });
}

#[test]
fn a_rank_that_panics_beside_its_streams_is_reported_as_panicked() {
    within(30, || {
        let outcomes = run_ranks(2, &Options::default(), |mut comm| {
            let rank = comm.rank();
            let one = communication_streams(&mut comm, 1).unwrap();
            assert!(rank == 0, "rank 1 fails beside its communication stream");
            one[0].start("all-reduce", (), |comm, ()| comm.barrier()).wait()
        });
        let mut outcomes = outcomes.unwrap();
        assert!(outcomes.remove(1).is_err());
        let error = outcomes.remove(0).unwrap().unwrap_err();
        assert!(matches!(error, CollectiveError::Panicked { rank: 1, .. }), "{error}");
    });
}

#[test]
fn subgroups_have_their_own_ranks_and_calls() {
    world(5, |comm| {
        let own = comm.rank();
        // 0, 2, 4 in reverse; 1 alone; 3 in none.
        let membership = match own {
            3 => None,
            _ => Some(Membership { colour: (own % 2) as u32, key: 10 - own as u32 }),
        };
        for _ in 0..3 {
            let joined = comm.split(membership).unwrap();
            let Some(mut group) = joined else {
                assert_eq!(own, 3);
                continue;
            };
            let (rank, world_size) = if own == 1 { (0, 1) } else { (2 - own / 2, 3) };
            assert_eq!((group.rank(), group.world_size()), (rank, world_size));
            let mut members = vec![0u8; world_size];
            group.all_gather(&[own as u8], &mut members).unwrap();
            assert_eq!(members, if own == 1 { vec![1] } else { vec![4, 2, 0] });
        }
        let mut sum = [own as i32];
        comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [10]);
    });
}

#[test]
fn breaking_a_group_off_breaks_its_subgroups_off() {
    within(30, || {
        let errors = all(threads(2, 60_000, |mut comm| {
            let mut group = comm.split(Some(Membership { colour: 0, key: 0 })).unwrap().unwrap();
            if comm.rank() == 0 {
                std::thread::sleep(Duration::from_millis(50));
                comm.aborter().abort("all of it");
            }
            group.barrier()
        }));
        let aborted = CollectiveError::Aborted { rank: 0, reason: "all of it".to_owned() };
        assert_eq!(errors, vec![Err(aborted); 2]);
    });
}
