//! Ranks that are threads share the work out while they do it; no bit may show who did what.

use fusestep_collective::{Blocks, Operation, Options, ReduceOp};
use half::bf16;

use super::numbers::{Number, input, reduced};
use super::operations::{in_place, out_of_place, same};
use super::worlds::world_with;

#[test]
fn the_bits_do_not_depend_on_how_much_is_claimed() {
    for claim_bytes in [0, 1, 64, 65, 1000, 512 << 10, usize::MAX] {
        let options = Options { claim_bytes, ..Options::default() };
        for ranks in [1, 2, 3, 5] {
            claimed::<f32>(ranks, 5003, &options);
            claimed::<bf16>(ranks, 5003, &options);
        }
    }
    // The default is crossed by long buffers only, whose results for one rank go past the caches.
    claimed::<f64>(2, 1_000_001, &Options::default());
    claimed::<f32>(5, 300_007, &Options::default());
    claimed::<bf16>(3, 1_000_003, &Options::default());
}

fn claimed<T: Number>(ranks: usize, numel: usize, options: &Options) {
    let expected: Vec<T> = reduced(ReduceOp::Sum, ranks, numel);
    // Nearly everything is the last rank's.
    let mut counts = vec![1; ranks];
    counts[ranks - 1] = numel + 1 - ranks;
    world_with(ranks, options, |comm| {
        let own: Vec<T> = input(comm.rank(), numel);
        let what = format!("{numel} on {ranks} ranks by {}", options.claim_bytes);
        let mut buffer = own.clone();
        in_place(comm, Operation::AllReduce(ReduceOp::Sum), None, &mut buffer);
        same(&buffer, &expected, &format!("all-reduce, {what}"));
        let blocks = Blocks { numel, world_size: ranks, counts: Some(&counts) };
        let block = blocks.of(comm.rank());
        let (mut buffer, mut result) = (own.clone(), vec![T::default(); block.len()]);
        let operation = Operation::ReduceScatter(ReduceOp::Sum);
        in_place(comm, operation, Some(&counts), &mut buffer);
        out_of_place(comm, operation, Some(&counts), &own, &mut result);
        same(&result, &expected[block.clone()], &format!("reduce-scatter, {what}"));
        same(&buffer[block.clone()], &result, &format!("reduce-scatter in place, {what}"));
        // What is not this rank's stays.
        same(&buffer[..block.start], &own[..block.start], &what);
        same(&buffer[block.end..], &own[block.end..], &what);
    });
}
