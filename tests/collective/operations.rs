//! Every operation, for many worlds, lengths and dtypes, in place and apart: what each rank must
//! find.

use fusestep_collective::{
    Blocks, Buffers, Call, Collectives, Communicator, Operation, ReduceOp, even_counts,
    reduce_slices,
};
use fusestep_simd::Level;
use fusestep_tensor::Element;
use half::{bf16, f16};

use super::numbers::{Number, input, ops, reduced};
use super::worlds::{sizes, world};

fn lengths(ranks: usize) -> Vec<usize> {
    let mut lengths = vec![0, 1, ranks - 1, ranks, ranks + 1, 100_003];
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

/// Runs `$body::<T>(ranks, numel)` for all worlds, all dtypes and the lengths that `$lengths` has
/// for a world.
macro_rules! everywhere {
    ($body:ident, $lengths:expr) => {
        for ranks in sizes() {
            for numel in $lengths(ranks) {
                $body::<f32>(ranks, numel);
                $body::<f64>(ranks, numel);
                $body::<f16>(ranks, numel);
                $body::<bf16>(ranks, numel);
                $body::<i32>(ranks, numel);
                $body::<i64>(ranks, numel);
                $body::<u8>(ranks, numel);
            }
        }
    };
}

pub(crate) fn in_place<T: Element>(
    comm: &mut dyn Communicator,
    operation: Operation,
    counts: Option<&[usize]>,
    buffer: &mut [T],
) {
    let buffers = Buffers::InPlace(bytemuck::cast_slice_mut(buffer));
    let call = Call { operation, dtype: T::DTYPE, counts, buffers };
    comm.execute(call).unwrap();
}

pub(crate) fn out_of_place<T: Element>(
    comm: &mut dyn Communicator,
    operation: Operation,
    counts: Option<&[usize]>,
    send: &[T],
    receive: &mut [T],
) {
    let buffers = Buffers::OutOfPlace {
        send: bytemuck::cast_slice(send),
        receive: bytemuck::cast_slice_mut(receive),
    };
    let call = Call { operation, dtype: T::DTYPE, counts, buffers };
    comm.execute(call).unwrap();
}

/// Bytes must be equal, not only values: 0 and −0 differ.
#[track_caller]
pub(crate) fn same<T: Element>(found: &[T], expected: &[T], what: &str) {
    let (found, expected): (&[u8], &[u8]) =
        (bytemuck::cast_slice(found), bytemuck::cast_slice(expected));
    assert!(found == expected, "{what}, {}: not the expected bits", T::DTYPE);
}

fn reduces<T: Number>(ranks: usize, numel: usize) {
    let expected: Vec<(ReduceOp, Vec<T>)> =
        ops::<T>().map(|op| (op, reduced(op, ranks, numel))).collect();
    let counts: Vec<usize> = even_counts(numel, ranks).into_iter().rev().collect();
    world(ranks, |comm| {
        let own: Vec<T> = input(comm.rank(), numel);
        for (op, expected) in &expected {
            let what = format!("{op} of {numel} on {ranks} ranks");
            let (mut buffer, mut result) = (own.clone(), vec![T::default(); numel]);
            in_place(comm, Operation::AllReduce(*op), None, &mut buffer);
            same(&buffer, expected, &format!("all-reduce in place, {what}"));
            out_of_place(comm, Operation::AllReduce(*op), None, &own, &mut result);
            same(&result, expected, &format!("all-reduce, {what}"));
            for root in [0, ranks - 1] {
                let operation = Operation::Reduce { reduce: *op, root };
                let (mut buffer, mut result) = (own.clone(), vec![T::default(); numel]);
                in_place(comm, operation, None, &mut buffer);
                let on_root = if root == comm.rank() { expected } else { &own };
                same(&buffer, on_root, &format!("reduce in place, {what}"));
                out_of_place(comm, operation, None, &own, &mut result);
                let on_root =
                    if root == comm.rank() { expected.clone() } else { vec![T::default(); numel] };
                same(&result, &on_root, &format!("reduce, {what}"));
            }
            for counts in [None, Some(&counts[..])] {
                let blocks = Blocks { numel, world_size: ranks, counts };
                let block = blocks.of(comm.rank());
                let (mut buffer, mut result) = (own.clone(), vec![T::default(); block.len()]);
                in_place(comm, Operation::ReduceScatter(*op), counts, &mut buffer);
                same(
                    &buffer[block.clone()],
                    &expected[block.clone()],
                    &format!("reduce-scatter in place, {what}"),
                );
                out_of_place(comm, Operation::ReduceScatter(*op), counts, &own, &mut result);
                same(&result, &expected[block], &format!("reduce-scatter, {what}"));
            }
        }
    });
}

#[test]
fn reductions_are_those_of_the_plain_loop_in_rank_order() {
    everywhere!(reduces, lengths);
}

fn moves<T: Number>(ranks: usize, numel: usize) {
    let inputs: Vec<Vec<T>> = (0..ranks).map(|rank| input(rank, numel)).collect();
    let counts: Vec<usize> = even_counts(numel, ranks).into_iter().rev().collect();
    world(ranks, |comm| {
        let (own, what) = (&inputs[comm.rank()], format!("{numel} on {ranks} ranks"));
        for root in [0, ranks - 1] {
            let (mut buffer, mut result) = (own.clone(), vec![T::default(); numel]);
            in_place(comm, Operation::Broadcast { root }, None, &mut buffer);
            out_of_place(comm, Operation::Broadcast { root }, None, own, &mut result);
            same(&buffer, &inputs[root], &format!("broadcast in place, {what}"));
            same(&result, &inputs[root], &format!("broadcast, {what}"));
        }
        for counts in [None, Some(&counts[..])] {
            let blocks = Blocks { numel, world_size: ranks, counts };
            let block = blocks.of(comm.rank());
            let joined: Vec<T> =
                (0..ranks).flat_map(|rank| inputs[rank][blocks.of(rank)].to_vec()).collect();
            let (mut buffer, mut result) = (own.clone(), vec![T::default(); numel]);
            in_place(comm, Operation::AllGather, counts, &mut buffer);
            out_of_place(comm, Operation::AllGather, counts, &own[block.clone()], &mut result);
            same(&buffer, &joined, &format!("all-gather in place, {what}"));
            same(&result, &joined, &format!("all-gather, {what}"));
            for root in [0, ranks - 1] {
                gathers_and_scatters(comm, &inputs, (root, counts), &joined);
            }
        }
        let equal = numel - numel % ranks;
        let each = equal / ranks;
        let exchanged: Vec<T> =
            inputs.iter().flat_map(|from| from[each * comm.rank()..][..each].to_vec()).collect();
        let (mut buffer, mut result) = (own[..equal].to_vec(), vec![T::default(); equal]);
        in_place(comm, Operation::AllToAll, None, &mut buffer);
        out_of_place(comm, Operation::AllToAll, None, &own[..equal], &mut result);
        same(&buffer, &exchanged, &format!("all-to-all in place, {what}"));
        same(&result, &exchanged, &format!("all-to-all, {what}"));
        comm.barrier().unwrap();
    });
}

fn gathers_and_scatters<T: Number>(
    comm: &mut dyn Communicator,
    inputs: &[Vec<T>],
    how: (usize, Option<&[usize]>),
    joined: &[T],
) {
    let (root, counts) = how;
    let (own, ranks, numel) = (&inputs[comm.rank()], inputs.len(), joined.len());
    let blocks = Blocks { numel, world_size: ranks, counts };
    let block = blocks.of(comm.rank());
    let mut buffer = own.clone();
    in_place(comm, Operation::Gather { root }, counts, &mut buffer);
    same(&buffer, if root == comm.rank() { joined } else { own }, "gather in place");
    let mut buffer = own.clone();
    in_place(comm, Operation::Scatter { root }, counts, &mut buffer);
    same(&buffer[block.clone()], &inputs[root][block.clone()], "scatter in place");
    if counts.is_none() && numel % ranks != 0 {
        return;
    }
    let at_root = if root == comm.rank() { numel } else { 0 };
    let mut result = vec![T::default(); at_root];
    out_of_place(comm, Operation::Gather { root }, counts, &own[block.clone()], &mut result);
    same(&result, &joined[..at_root], "gather");
    let mut result = vec![T::default(); block.len()];
    out_of_place(comm, Operation::Scatter { root }, counts, &own[..at_root], &mut result);
    same(&result, &inputs[root][block], "scatter");
}

#[test]
fn elements_arrive_where_they_belong() {
    everywhere!(moves, lengths);
}

#[test]
fn transfers_go_between_any_two_ranks_in_both_directions() {
    for ranks in [2, 3, 5] {
        for numel in [0, 1, 100_003] {
            world(ranks, |comm| {
                let own = comm.rank();
                for from in 0..ranks {
                    for to in (0..ranks).filter(|&to| to != from) {
                        let mut received = vec![0i32; numel];
                        if own == from {
                            comm.send(&vec![(10 * from + to) as i32; numel], to).unwrap();
                        } else if own == to {
                            comm.receive(&mut received, from).unwrap();
                            assert_eq!(received, vec![(10 * from + to) as i32; numel]);
                        }
                    }
                }
            });
        }
    }
}

#[test]
fn some_ranks_in_place_and_some_apart_agree() {
    let expected: Vec<f32> = reduced(ReduceOp::Sum, 3, 1000);
    world(3, |comm| {
        let (mut own, mut result) = (input::<f32>(comm.rank(), 1000), vec![0.0; 1000]);
        if comm.rank() == 1 {
            comm.all_reduce_into(&own, &mut result, ReduceOp::Sum).unwrap();
            own = result;
        } else {
            comm.all_reduce(&mut own, ReduceOp::Sum).unwrap();
        }
        same(&own, &expected, "mixed");
    });
}

#[test]
fn nan_wins_and_of_equal_values_the_lowest_ranks() {
    let ranks = [
        [1.0f32, f32::NAN, 2.0, 0.0, -0.0],
        [f32::NAN, 1.0, 3.0, -0.0, 0.0],
        [2.0, 5.0, f32::INFINITY, 0.0, 0.0],
    ];
    world(3, |comm| {
        for op in [ReduceOp::Max, ReduceOp::Min, ReduceOp::Sum] {
            let mut buffer = ranks[comm.rank()];
            comm.all_reduce(&mut buffer, op).unwrap();
            assert!(buffer[0].is_nan() && buffer[1].is_nan());
            if op != ReduceOp::Sum {
                let expected = if op == ReduceOp::Max { f32::INFINITY } else { 2.0 };
                let bits = buffer[2..].iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits, [expected, 0.0, -0.0].map(f32::to_bits));
            }
        }
    });
}

fn every_level<T: Number>() {
    for numel in [1, 63, 4099] {
        let inputs: Vec<Vec<T>> = (0..3).map(|rank| input(rank, numel)).collect();
        // One byte further on, so that nothing is aligned.
        let shifted: Vec<Vec<u8>> =
            inputs.iter().map(|x| [&[0u8], bytemuck::cast_slice(x)].concat()).collect();
        for op in ops::<T>() {
            let expected: Vec<T> = reduced(op, 3, numel);
            for level in Level::available() {
                let mut result = vec![T::default(); numel];
                let aligned: Vec<&[u8]> = inputs.iter().map(|x| bytemuck::cast_slice(x)).collect();
                reduce_slices(level, T::DTYPE, op, &aligned, bytemuck::cast_slice_mut(&mut result));
                same(&result, &expected, &format!("{op} at {level}"));
                let odd: Vec<&[u8]> = shifted.iter().map(|x| &x[1..]).collect();
                let mut result = vec![0u8; 1 + numel * T::DTYPE.len_bytes()];
                reduce_slices(level, T::DTYPE, op, &odd, &mut result[1..]);
                assert_eq!(
                    &result[1..],
                    bytemuck::cast_slice::<T, u8>(&expected),
                    "{op} at {level}, not aligned"
                );
            }
        }
    }
}

#[test]
fn every_level_and_alignment_gives_the_same_bits() {
    every_level::<f32>();
    every_level::<f64>();
    every_level::<f16>();
    every_level::<bf16>();
    every_level::<i32>();
    every_level::<i64>();
    every_level::<u8>();
}

/// Apart, since it takes the thread sanitizer many minutes.
#[test]
fn a_million_and_one_elements_are_reduced_and_moved() {
    everywhere!(reduces, |_| [1_000_001]);
    everywhere!(moves, |_| [1_000_001]);
}
