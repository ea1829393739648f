//! GPUs find the bytes that threads find.

use fusestep_collective::{
    Collectives, Communicator, Options, ReduceOp, even_counts, run_ranks, self_test,
};
use fusestep_collective_nccl::{NcclOptions, Reduction};
use half::{bf16, f16};

use super::numbers::{Number, input, ops, reduced};
use super::worlds::{group, options, sizes, turn, world};

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

fn same<T: Number>(ranks: usize, numel: usize) {
    for op in ops::<T>() {
        let gpus = world(ranks, |comm| found::<T>(comm, op, numel));
        let threads =
            run_ranks(ranks, &Options::default(), |mut comm| found::<T>(&mut comm, op, numel));
        for (ours, theirs) in gpus.iter().zip(threads.unwrap()) {
            for (ours, theirs) in ours.iter().zip(&theirs.unwrap()) {
                let (ours, theirs): (&[u8], &[u8]) =
                    (bytemuck::cast_slice(ours), bytemuck::cast_slice(theirs));
                assert!(ours == theirs, "{op} of {numel} {} on {ranks} ranks", T::DTYPE);
            }
        }
    }
}

#[test]
fn gpus_and_threads_find_equal_bytes() {
    for ranks in sizes() {
        for numel in [0, ranks - 1, ranks + 1, 20_011] {
            same::<f32>(ranks, numel);
            same::<f64>(ranks, numel);
            same::<f16>(ranks, numel);
            same::<bf16>(ranks, numel);
            same::<i32>(ranks, numel);
            same::<i64>(ranks, numel);
            same::<u8>(ranks, numel);
        }
        same::<f32>(ranks, 1_000_001);
        same::<bf16>(ranks, 1_000_001);
    }
}

#[test]
fn the_self_test_passes() {
    for ranks in sizes() {
        for outcome in world(ranks, |comm| self_test(comm)) {
            assert_eq!(outcome.map(|names| names.len()), Ok(6));
        }
    }
}

/// Integers have one sum, in whatever order; floating-point sums are within the bound of the
/// reference.
fn engines_own<T: Number>(ranks: usize, numel: usize, exact: bool) {
    let own = NcclOptions {
        reduction: Reduction::Engine,
        // The longest pass through in segments.
        scratch_bytes: 10_000,
        ..options()
    };
    for op in ops::<T>() {
        let expected: Vec<T> = reduced(op, ranks, numel);
        let root = ranks - 1;
        group(ranks, &own, |mut comm| {
            let input: Vec<T> = input(comm.rank(), numel);
            let (mut all, mut one) = (input.clone(), vec![T::default(); numel]);
            comm.all_reduce(&mut all, op).unwrap();
            comm.all_reduce_into(&input, &mut one, op).unwrap();
            let close = |found: &[T]| {
                let mut pairs = found.iter().zip(&expected);
                pairs.all(|(found, expected)| {
                    if exact {
                        found == expected
                    } else {
                        let error = (found.value() - expected.value()).abs();
                        error <= 1e-5 * (1.0 + expected.value().abs())
                    }
                })
            };
            assert!(close(&all) && close(&one), "{op} on {ranks} ranks");
            let mut reduced = input.clone();
            comm.reduce(&mut reduced, op, root).unwrap();
            if comm.rank() == root {
                assert!(close(&reduced), "{op} at the root")
            } else {
                assert!(reduced == input)
            }
        });
    }
}

#[test]
fn the_engines_own_sums_are_sums() {
    let _turn = turn();
    for ranks in sizes() {
        for numel in [0, 1, 4099] {
            engines_own::<f32>(ranks, numel, false);
            engines_own::<f64>(ranks, numel, false);
            engines_own::<i32>(ranks, numel, true);
            engines_own::<i64>(ranks, numel, true);
            engines_own::<u8>(ranks, numel, true);
        }
    }
}
