//! Several groups at once: communication streams on threads of their own, subgroups, and what they
//! have to do with each other.

use std::sync::mpsc;
use std::time::Duration;

use fusestep_collective::{
    CollectiveError, Collectives, Communicator, Membership, ReduceOp, communication_streams,
};

use super::worlds::{group, with_world, world};

const TIMEOUT_MS: u64 = 20_000;

#[test]
fn calls_of_one_stream_are_behind_each_other_and_streams_overlap() {
    if with_world(|world| world.world_size()) != 2 {
        return;
    }
    group(TIMEOUT_MS, |mut comm| {
        let two = communication_streams(&mut *comm, 2).unwrap();
        // Rank 0 starts on communication stream 0 what goes on when the call of stream 1 has ended,
        // which rank 1 begins last: with one communication stream for both, that would not come.
        let (fast_ended, heard) = mpsc::channel();
        let (told, overlapped) = mpsc::channel();
        let slow = two[0].start("all-reduce", vec![1.0f32; 3], move |comm, buffer| {
            let long = Duration::from_millis(TIMEOUT_MS / 2);
            let overlaps = comm.rank() == 1 || heard.recv_timeout(long).is_ok();
            told.send(overlaps).unwrap();
            comm.all_reduce(buffer, ReduceOp::Sum)
        });
        let fast = two[1].all_reduce(vec![5i64; 3], ReduceOp::Prod);
        assert_eq!(fast.wait().unwrap(), [25; 3]);
        // Rank 1 listens to nobody.
        let _ = fast_ended.send(());
        assert!(overlapped.recv().unwrap(), "the streams did not overlap");
        assert_eq!(slow.wait().unwrap(), [2.0; 3]);
    });
}

#[test]
fn many_pending_calls_come_back_in_any_order_of_waiting() {
    group(TIMEOUT_MS, |mut comm| {
        let ranks = comm.world_size() as i32;
        let two = communication_streams(&mut *comm, 2).unwrap();
        let start = |i: i32| two[i as usize % 2].all_reduce(vec![i; 5], ReduceOp::Sum);
        let pending: Vec<_> = (0..300).map(start).collect();
        for (i, pending) in pending.into_iter().enumerate().rev() {
            assert_eq!(pending.wait().unwrap(), [ranks * i as i32; 5]);
        }
    });
}

#[test]
fn dropping_a_pending_call_closes_the_stream_on_all_ranks() {
    if with_world(|world| world.world_size()) != 2 {
        return;
    }
    let error = group(TIMEOUT_MS, |mut comm| {
        let one = communication_streams(&mut *comm, 1).unwrap();
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            drop(one[0].all_reduce(vec![1u8; 4], ReduceOp::Max));
        } else {
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = one[0].start("wait", (), |comm, ()| comm.barrier()).wait();
        let last = one[0].start("all-reduce", (), |comm, ()| comm.barrier()).wait();
        comm.barrier().unwrap();
        last.unwrap_err()
    });
    assert_eq!(error, CollectiveError::Dropped { rank: 1, operation: "all-reduce" });
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
            let Some(mut group) = comm.split(membership).unwrap() else {
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
fn two_subgroups_and_their_parent_do_not_disturb_each_other() {
    group(TIMEOUT_MS, |mut comm| {
        let own = comm.rank();
        let membership = Membership { colour: (own % 2) as u32, key: 0 };
        let mut half = comm.split(Some(membership)).unwrap().unwrap();
        for round in 0..50 {
            let mut sum = [own as i32, round];
            half.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            let members = (0..comm.world_size()).filter(|rank| rank % 2 == own % 2);
            assert_eq!(sum[0], members.sum::<usize>() as i32);
            if round % 10 == 0 {
                comm.barrier().unwrap();
            }
        }
    });
}

#[test]
fn breaking_a_group_off_breaks_its_subgroups_off() {
    if with_world(|world| world.world_size()) == 1 {
        return;
    }
    let error = group(TIMEOUT_MS, |mut comm| {
        let all = Membership { colour: 0, key: 0 };
        let mut group = comm.split(Some(all)).unwrap().unwrap();
        if comm.rank() == 0 {
            std::thread::sleep(Duration::from_millis(50));
            comm.aborter().abort("all of it");
        }
        group.barrier().unwrap_err()
    });
    assert_eq!(error, CollectiveError::Aborted { rank: 0, reason: "all of it".to_owned() });
}

#[test]
fn every_barrier_waits_for_all() {
    if with_world(|world| world.world_size()) == 1 {
        return;
    }
    group(TIMEOUT_MS, |mut comm| {
        for late in 0..2 {
            comm.barrier().unwrap();
            let start = std::time::Instant::now();
            if comm.rank() == late {
                std::thread::sleep(Duration::from_millis(100));
            }
            comm.barrier().unwrap();
            assert!(start.elapsed() > Duration::from_millis(60), "{:?}", start.elapsed());
        }
    });
}
