//! Several groups of the same GPUs, which overlap.

use fusestep_collective::{Collectives, Communicator, Membership, ReduceOp, communication_streams};

use super::worlds::{group, options, sizes, turn};

#[test]
fn streams_overlap_and_hand_buffers_back() {
    let _turn = turn();
    for ranks in sizes() {
        group(ranks, &options(), |mut comm| {
            let two = communication_streams(&mut comm, 2).unwrap();
            let pending: Vec<_> = (0..10)
                .map(|index| two[index % 2].all_reduce(vec![index as f32; 1000], ReduceOp::Sum))
                .collect();
            for (index, pending) in pending.into_iter().enumerate().rev() {
                let expected = vec![(index * ranks) as f32; 1000];
                assert_eq!(pending.wait().unwrap(), expected);
            }
        });
    }
}

#[test]
fn subgroups_are_groups() {
    let _turn = turn();
    for ranks in sizes() {
        group(ranks, &options(), |mut comm| {
            let rank = comm.rank();
            let membership = (rank != 3).then_some(Membership {
                colour: (rank % 2) as u32,
                // The highest rank first.
                key: (ranks - rank) as u32,
            });
            let joined = comm.split(membership).unwrap();
            assert_eq!(joined.is_some(), rank != 3);
            let Some(mut half) = joined else { return };
            let members: Vec<usize> =
                (0..ranks).rev().filter(|&other| other != 3 && other % 2 == rank % 2).collect();
            let mut found = vec![0i64; members.len()];
            half.all_gather(&[rank as i64], &mut found).unwrap();
            assert_eq!(found, members.iter().map(|&m| m as i64).collect::<Vec<_>>());
            let mut sum = [rank as i64];
            half.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [members.iter().sum::<usize>() as i64]);
        });
    }
}
