//! The kernel that reduces on the GPU, wherever parts lie, finds the bytes of the host's reduction.

use fusestep_collective::{
    Communicator, DeviceBuffers, DeviceCall, Operation, even_counts, reduce_slices,
};
use fusestep_collective_nccl::NcclCommunicator;
use fusestep_simd::Level;
use half::{bf16, f16};

use super::numbers::{Number, input, ops};
use super::worlds::{group, options, sizes, turn};

/// Where a rank's buffer begins on the GPU, behind a multiple of 256 bytes: where packs do, between
/// packs, and between elements.
fn starts(element_bytes: usize) -> [usize; 3] {
    [0, element_bytes, 3]
}

/// Reduces in place at a place of device memory; what is there then, with what lies before and
/// behind.
fn reduced_at<T: Number>(
    comm: &mut NcclCommunicator,
    operation: Operation,
    start: usize,
    own: &[T],
) -> Vec<u8> {
    let bytes: &[u8] = bytemuck::cast_slice(own);
    let mut around = vec![0xa5u8; start + bytes.len() + 16];
    around[start..start + bytes.len()].copy_from_slice(bytes);
    let mut buffer = comm.device_buffer(around.len()).unwrap();
    buffer.upload(&around).unwrap();
    let range = start..start + bytes.len();
    let part = buffer.slice_mut().part(range).unwrap();
    let call = DeviceCall {
        operation,
        dtype: T::DTYPE,
        counts: None,
        buffers: DeviceBuffers::InPlace(part),
    };
    comm.execute_on_device(call).unwrap();
    buffer.download(&mut around).unwrap();
    let behind = around.split_off(start + bytes.len());
    let part = around.split_off(start);
    let untouched = |bytes: &[u8]| bytes.iter().all(|&byte| byte == 0xa5);
    assert!(untouched(&around) && untouched(&behind), "beyond the buffer");
    part
}

fn every_place<T: Number>(ranks: usize, numel: usize) {
    let inputs: Vec<Vec<T>> = (0..ranks).map(|rank| input(rank, numel)).collect();
    let slices: Vec<&[u8]> = inputs.iter().map(|own| bytemuck::cast_slice(own)).collect();
    let counts = even_counts(numel, ranks);
    let last = ranks - 1;
    for op in ops::<T>() {
        let mut words = vec![T::default(); numel];
        let expected: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        reduce_slices(Level::detect(), T::DTYPE, op, &slices, expected);
        let expected = &*expected;
        group(ranks, &options(), |mut comm| {
            let (rank, bytes) = (comm.rank(), size_of::<T>());
            for start in starts(bytes) {
                let what = format!("{op} of {numel} {} on {ranks} ranks, start {start}", T::DTYPE);
                // Parts of different ranks lie differently.
                let start = if rank == 1 { 0 } else { start };
                let own = &inputs[rank];
                let all = reduced_at(&mut comm, Operation::AllReduce(op), start, own);
                assert!(all == expected, "all-reduce, {what}");
                let part = reduced_at(&mut comm, Operation::ReduceScatter(op), start, own);
                let first: usize = counts[..rank].iter().sum::<usize>() * bytes;
                let block = first..first + counts[rank] * bytes;
                assert!(part[block.clone()] == expected[block], "reduce-scatter, {what}");
                let reduce = Operation::Reduce { reduce: op, root: last };
                let root = reduced_at(&mut comm, reduce, start, own);
                let kept: &[u8] = bytemuck::cast_slice(own);
                let right = if rank == last { expected } else { kept };
                assert!(root == right, "reduce, {what}");
            }
        });
    }
}

#[test]
fn parts_that_lie_anywhere_have_the_bytes_of_the_hosts_reduction() {
    let _turn = turn();
    for ranks in sizes() {
        for numel in [0, 1, ranks - 1, ranks, ranks + 1, 1009] {
            every_place::<f32>(ranks, numel);
            every_place::<f64>(ranks, numel);
            every_place::<f16>(ranks, numel);
            every_place::<bf16>(ranks, numel);
            every_place::<i32>(ranks, numel);
            every_place::<i64>(ranks, numel);
            every_place::<u16>(ranks, numel);
            every_place::<u8>(ranks, numel);
        }
    }
}

#[test]
fn a_hundred_thousand_elements_and_one_have_the_bytes_of_the_hosts_reduction() {
    let _turn = turn();
    for ranks in sizes() {
        every_place::<f32>(ranks, 100_001);
        every_place::<bf16>(ranks, 100_001);
        every_place::<u8>(ranks, 100_001);
    }
}
