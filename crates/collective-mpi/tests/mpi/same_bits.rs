//! Processes find the bytes that threads find.

use fusestep_collective::{Collectives, Communicator, Options, ReduceOp, even_counts, run_ranks};
use half::{bf16, f16};

use super::numbers::{Number, input, ops};
use super::worlds::with_world;

/// What one rank finds in some collectives.
fn found<T: Number>(comm: &mut dyn Communicator, op: ReduceOp, numel: usize) -> Vec<Vec<T>> {
    let own: Vec<T> = input(comm.rank(), numel);
    let mut all = own.clone();
    comm.all_reduce(&mut all, op).unwrap();
    let counts = even_counts(numel, comm.world_size());
    let mut block = vec![T::default(); counts[comm.rank()]];
    comm.reduce_scatter(&own, &mut block, op).unwrap();
    let mut gathered = vec![T::default(); numel];
    comm.all_gather(&block, &mut gathered).unwrap();
    let mut root = own;
    comm.reduce(&mut root, op, comm.world_size() - 1).unwrap();
    vec![all, block, gathered, root]
}

fn same<T: Number>(numel: usize) {
    with_world(|world| {
        let (rank, ranks) = (world.rank(), world.world_size());
        for op in ops::<T>() {
            let ours = found::<T>(world, op, numel);
            let threads =
                run_ranks(ranks, &Options::default(), |mut comm| found::<T>(&mut comm, op, numel));
            let theirs = threads.unwrap().remove(rank).unwrap();
            for (ours, theirs) in ours.iter().zip(&theirs) {
                let (ours, theirs): (&[u8], &[u8]) =
                    (bytemuck::cast_slice(ours), bytemuck::cast_slice(theirs));
                assert!(ours == theirs, "{op} of {numel} {} on {ranks} ranks", T::DTYPE);
            }
        }
    });
}

#[test]
fn processes_and_threads_find_equal_bytes() {
    let ranks = with_world(|world| world.world_size());
    for numel in [0, 1, ranks - 1, ranks, ranks + 1, 20_011] {
        same::<f32>(numel);
        same::<f64>(numel);
        same::<f16>(numel);
        same::<bf16>(numel);
        same::<i32>(numel);
        same::<i64>(numel);
        same::<u8>(numel);
    }
    same::<f32>(1_000_001);
    same::<bf16>(1_000_001);
}
