//! Sums in one binary tree over the ranks, which GPUs leave to their callers.

use fusestep_collective::{Collectives, Divisor, Options, ReduceOp, Solo, run_ranks};
use half::{bf16, f16};

use crate::numbers::{Number, input, reduced};

fn check<T: Number>(world: usize, numel: usize) {
    for divisor in [1.0, 12.0] {
        let tree = ReduceOp::Tree(Divisor::of(divisor));
        let expected = reduced::<T>(tree, world, numel);
        let run = |comm: &mut dyn FnMut(&mut [T])| {
            let mut values = input::<T>(0, numel);
            comm(&mut values);
            values
        };
        if world == 1 {
            let found = run(&mut |values| Solo::new().all_reduce(values, tree).unwrap());
            assert!(bits(&found) == bits(&expected), "1 rank, {numel}, {tree}");
            continue;
        }
        let ranks = run_ranks(world, &Options::default(), |mut comm| {
            let mut values = input::<T>(fusestep_collective::Communicator::rank(&comm), numel);
            comm.all_reduce(&mut values, tree).unwrap();
            values
        });
        for found in ranks.unwrap() {
            assert!(bits(&found.unwrap()) == bits(&expected), "{world} ranks, {numel}, {tree}");
        }
    }
}

fn bits<T: Number>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

#[test]
fn trees_are_those_of_their_definition() {
    for world in 1..=8 {
        for numel in [1, 31, 129, 3_001] {
            check::<f32>(world, numel);
            check::<f64>(world, numel);
            check::<f16>(world, numel);
            check::<bf16>(world, numel);
        }
    }
}
