//! Memory that all ranks see.

use fusestep_collective::{
    Blocks, Buffers, Call, Communicator, Operation, Options, ReduceOp, ReduceUpdate, Replica,
    Replicas, even_counts, reduce_slices, run_ranks,
};
use fusestep_simd::Level;
use fusestep_tensor::{DType, Element};
use half::bf16;

use super::numbers::{Number, input, ops, reduced};
use super::operations::{in_place, out_of_place, same};
use super::worlds::with_world;

/// Where a rank's buffers lie.
fn is_shared(rank: usize, which: usize) -> bool {
    match which {
        0 => true,
        1 => rank == 0,
        _ => rank != 0,
    }
}

fn reduces<T: Number>(numel: usize, which: usize) {
    with_world(|world| {
        let (rank, ranks) = (world.rank(), world.world_size());
        let own: Vec<T> = input(rank, numel);
        let mut arena = world.allocate(2 * numel * size_of::<T>() + 64).unwrap();
        let mut private = vec![T::default(); 2 * numel];
        for op in ops::<T>() {
            let expected: Vec<T> = reduced(op, ranks, numel);
            let what = format!("{op} of {numel} on {ranks} ranks, memory {which}");
            let buffer = if is_shared(rank, which) {
                &mut arena.elements_mut::<T>()[..2 * numel]
            } else {
                &mut private[..]
            };
            let (send, receive) = buffer.split_at_mut(numel);
            send.copy_from_slice(&own);
            let all = Operation::AllReduce(op);
            out_of_place(world, all, None, send, receive);
            same(receive, &expected, &what);
            same(send, &own, &what);
            in_place(world, all, None, send);
            same(send, &expected, &what);
            let blocks = Blocks { numel, world_size: ranks, counts: None };
            let block = blocks.of(rank);
            send.copy_from_slice(&own);
            let into = &mut receive[..block.len()];
            out_of_place(world, Operation::ReduceScatter(op), None, send, into);
            same(into, &expected[block], &what);
            let root = ranks - 1;
            in_place(world, Operation::Broadcast { root }, None, send);
            same(send, &input::<T>(root, numel), &what);
            scatters_unevenly(world, op, send, receive);
        }
    });
}

/// A reduce-scatter of which the last rank gets all but one element and the first none, apart and
/// in place.
fn scatters_unevenly<T: Number>(
    world: &mut dyn Communicator,
    op: ReduceOp,
    send: &mut [T],
    receive: &mut [T],
) {
    let (rank, ranks, numel) = (world.rank(), world.world_size(), send.len());
    let (own, expected): (Vec<T>, Vec<T>) = (input(rank, numel), reduced(op, ranks, numel));
    let mut counts = vec![0; ranks];
    counts[ranks / 2] = numel.min(1);
    counts[ranks - 1] += numel - numel.min(1);
    let block = Blocks { numel, world_size: ranks, counts: Some(&counts) }.of(rank);
    let what = format!("{op} of {numel} on {ranks} ranks in uneven blocks");
    let scatter = Operation::ReduceScatter(op);
    send.copy_from_slice(&own);
    let into = &mut receive[..block.len()];
    out_of_place(world, scatter, Some(&counts), send, into);
    same(into, &expected[block.clone()], &what);
    same(send, &own, &what);
    in_place(world, scatter, Some(&counts), send);
    same(&send[block.clone()], &expected[block], &what);
}

#[test]
fn the_bits_do_not_depend_on_where_buffers_lie() {
    for numel in [0, 1, 7, 5003, 400_001] {
        for which in 0..3 {
            reduces::<f32>(numel, which);
            reduces::<bf16>(numel, which);
        }
    }
}

#[test]
fn memory_is_zeroed_and_comes_again() {
    with_world(|world| {
        for len in [0, 1, 4096, 3 << 20, 3 << 20] {
            let mut arena = world.allocate(len).unwrap();
            assert_eq!(arena.bytes().len(), len);
            assert!(arena.bytes().iter().all(|&byte| byte == 0));
            arena.bytes_mut().fill(7);
        }
    });
}

#[test]
fn more_memory_than_there_is_is_refused_and_the_group_lives_on() {
    with_world(|world| {
        let error = world.allocate(1 << 50).unwrap_err().to_string();
        assert!(error.contains("bytes that processes share"), "{error}");
        world.execute(barrier()).unwrap();
    });
}

fn barrier() -> Call<'static> {
    Call {
        operation: Operation::Barrier,
        dtype: DType::U8,
        counts: None,
        buffers: Buffers::InPlace(&mut []),
    }
}

/// A step of plain descent with each rank's block of everything.
fn step(comm: &mut dyn Communicator, grads: &[f32], params: &mut [f32], counts: &[usize]) {
    let call = ReduceUpdate {
        grad_dtype: f32::DTYPE,
        grads: bytemuck::cast_slice(grads),
        replicas: Replicas::from_iter([Replica {
            dtype: f32::DTYPE,
            elements: 1,
            bytes: bytemuck::cast_slice_mut(params),
        }]),
        counts,
    };
    comm.reduce_update(call, &mut |mut memory| {
        let mut sum = vec![0u8; memory.grads[0].len()];
        let (level, op) = (Level::detect(), ReduceOp::Average);
        reduce_slices(level, DType::F32, op, &memory.grads, &mut sum);
        for param in &mut memory.replicas[0] {
            for (param, grad) in param.chunks_exact_mut(4).zip(sum.chunks_exact(4)) {
                let read = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
                let next = read(param) - 0.1 * read(grad);
                param.copy_from_slice(&next.to_le_bytes());
            }
        }
    })
    .unwrap();
}

#[test]
fn blocks_updated_everywhere_have_the_bits_of_threads() {
    with_world(|world| {
        let (rank, ranks) = (world.rank(), world.world_size());
        for numel in [0usize, 3, 10_007] {
            let counts: Vec<usize> = even_counts(numel, ranks).into_iter().rev().collect();
            let start: Vec<f32> = input(ranks, numel);
            let threads = run_ranks(ranks, &Options::default(), |mut comm| {
                let grads: Vec<f32> = input(comm.rank(), numel);
                let mut params = start.clone();
                step(&mut comm, &grads, &mut params, &counts);
                params
            });
            let expected = threads.unwrap().remove(rank).unwrap();
            let grads: Vec<f32> = input(rank, numel);
            for which in 0..3 {
                let mut arena = world.allocate(8 * numel + 8).unwrap();
                let mut private = vec![0.0; 2 * numel];
                let memory = if is_shared(rank, which) {
                    &mut arena.elements_mut::<f32>()[..2 * numel]
                } else {
                    &mut private[..]
                };
                let (own, params) = memory.split_at_mut(numel);
                own.copy_from_slice(&grads);
                params.copy_from_slice(&start);
                step(world, own, params, &counts);
                same(params, &expected, &format!("{numel} on {ranks} ranks"));
            }
        }
    });
}
