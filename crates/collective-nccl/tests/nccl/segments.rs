//! Calls that are longer than the memory that communicators have on the GPU.

use fusestep_collective::{Communicator, DeviceBuffers, DeviceCall, Operation, ReduceOp};
use fusestep_collective_nccl::NcclOptions;
use fusestep_tensor::DType;

use super::numbers;
use super::worlds::{group, options, sizes, turn};

fn small(scratch_bytes: usize) -> NcclOptions {
    NcclOptions { scratch_bytes, ..options() }
}

/// On the GPU, where only what others contribute passes through the communicator's memory.
#[test]
fn device_calls_in_segments_have_the_bits_of_whole_ones() {
    let _turn = turn();
    let operations = [
        Operation::AllReduce(ReduceOp::Average),
        Operation::ReduceScatter(ReduceOp::Sum),
        Operation::Reduce { reduce: ReduceOp::Prod, root: 0 },
        Operation::AllToAll,
    ];
    for ranks in sizes() {
        let numel = 1260;
        let found = |scratch_bytes: usize| {
            group(ranks, &small(scratch_bytes), |mut comm| {
                let own: Vec<f32> = numbers::input(comm.rank(), numel);
                let all = operations.map(|operation| {
                    let mut buffer = comm.device_buffer(4 * numel).unwrap();
                    buffer.upload(bytemuck::cast_slice(&own)).unwrap();
                    let call = DeviceCall {
                        operation,
                        dtype: DType::F32,
                        counts: None,
                        buffers: DeviceBuffers::InPlace(buffer.slice_mut()),
                    };
                    comm.execute_on_device(call).unwrap();
                    let mut bytes = vec![0u8; 4 * numel];
                    buffer.download(&mut bytes).unwrap();
                    bytes
                });
                all.concat()
            })
        };
        let whole = found(1 << 20);
        // One byte is raised to the least that there can be.
        for scratch_bytes in [1, 1000, 3000] {
            assert!(found(scratch_bytes) == whole, "{scratch_bytes} bytes");
        }
    }
}
