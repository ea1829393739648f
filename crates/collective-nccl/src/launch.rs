//! Launches of the kernel that reduces in rank order.

use std::ffi::{c_uint, c_void};

use fusestep_collective::ReduceOp;
use fusestep_tensor::DType;

use crate::kernel::{PACK_BYTES, Parts};
use crate::link::Link;

/// Threads of a block.
const BLOCK_THREADS: c_uint = 512;

/// Most blocks of a launch, a few for each multiprocessor of a large GPU. Longer input takes each
/// thread several rounds.
const GRID_BLOCKS: usize = 1024;

/// Arguments of a launch, in the layout that the kernel reads.
#[repr(C)]
struct Arguments {
    own: u64,
    received: u64,
    stride_bytes: u64,
    result: u64,
    numel: u64,
    ranks: u32,
    own_rank: u32,
    op: u32,
    reserved: u32,
}

impl Link {
    /// Reduces the parts in rank order, in the order of the stream, as
    /// `fusestep_collective::reduce_in_rank_order` does on the host.
    ///
    /// All addresses are multiples of an element's length.
    pub(crate) fn reduce(&self, parts: &Parts, dtype: DType, op: ReduceOp) -> Result<(), String> {
        let numel = parts.len_bytes / dtype.len_bytes();
        if numel == 0 {
            return Ok(());
        }
        let function = self.device.kernels()?.function(dtype)?;
        let mut arguments = Arguments {
            own: parts.own,
            received: parts.received,
            stride_bytes: parts.stride_bytes as u64,
            result: parts.result,
            numel: numel as u64,
            ranks: u32::try_from(parts.ranks).map_err(|_| "more ranks than 32 bits count")?,
            own_rank: u32::try_from(parts.own_rank).map_err(|_| "a rank beyond 32 bits")?,
            op: code(op),
            reserved: 0,
        };
        let packs = parts.len_bytes.div_ceil(PACK_BYTES);
        let blocks = packs.div_ceil(BLOCK_THREADS as usize).min(GRID_BLOCKS) as c_uint;
        let mut parameters = [(&raw mut arguments).cast::<c_void>()];
        // SAFETY: the entry takes one block of these arguments, which is copied before the call
        // returns. They lead to device memory of the stated lengths that the call holds
        // until its mark was reached or the communicator aborted.
        self.device.call(|driver| unsafe {
            (driver.launch)(
                function,
                blocks,
                1,
                1,
                BLOCK_THREADS,
                1,
                1,
                0,
                self.stream,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }
}

/// The kernel's number of a reduction, its `rank_order::Op`.
fn code(op: ReduceOp) -> u32 {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Average => 1,
        ReduceOp::Prod => 2,
        ReduceOp::Max => 3,
        ReduceOp::Min => 4,
        // `Gpus::carries` refuses it.
        ReduceOp::Tree(_) => u32::MAX,
    }
}
