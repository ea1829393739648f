//! Sums over micro-steps on the device.

use bytemuck::{Pod, Zeroable};
use fusestep_launch::{Accumulate, Accumulation, BackendError};
use fusestep_tensor::DType;

use crate::Result;
use crate::backend::CudaBackend;
use crate::buffer::DeviceBuffer;
use crate::checks::check_end;
use crate::entry::Entry;
use crate::session::unavailable;

const STEM: &str = "accumulate";
const THREADS: u32 = 256;

/// Elements that a thread takes before a grid has more blocks, and the most blocks: they go on by
/// the size of the grid.
const ELEMENTS_OF_THREAD: u64 = 16;
const MOST_BLOCKS: u64 = 1 << 16;

/// The only parameter, as `kernels/accumulate.cu` reads it.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Arguments {
    sums: u64,
    grads: u64,
    numel: u64,
    factor: f64,
    op: u32,
    reserved: u32,
}

/// Enqueues a sum over micro-steps, as [`fusestep_launch::DeviceSums::add_gradients`] says.
pub(crate) fn enqueue(backend: &CudaBackend, asked: Accumulate<'_>) -> Result<()> {
    let Accumulate { dtype, sums: (sums, sums_at), grads: (grads, grads_at), numel, what } = asked;
    let entry = match dtype {
        DType::F32 => "accumulate_f32",
        DType::F64 => "accumulate_f64",
        DType::F16 => "accumulate_f16",
        DType::BF16 => "accumulate_bf16",
        _ => {
            return Err(unavailable(format!(
                "expected gradients in floating point to be added up, found {dtype}"
            )));
        }
    };
    let (op, factor) = match what {
        Accumulation::First { weight } => (0, weight),
        Accumulation::Add { weight } => (1, weight),
        Accumulation::Mean { divisor } => (2, divisor),
    };
    let place = |buffer, at: usize, width: usize| {
        let buffer: &DeviceBuffer = backend.device_buffer(buffer)?;
        let end = numel.saturating_mul(width as u64).saturating_add(at as u64);
        check_end(end, fusestep_launch::Buffer::len_bytes(buffer))?;
        Ok::<_, BackendError>(buffer.address() + at as u64)
    };
    let width = dtype.len_bytes();
    let arguments = Arguments {
        sums: place(sums, sums_at, width.max(size_of::<f32>()))?,
        grads: place(grads, grads_at, width)?,
        numel,
        factor,
        op,
        reserved: 0,
    };
    if numel == 0 {
        return Ok(());
    }
    let blocks = numel.div_ceil(u64::from(THREADS) * ELEMENTS_OF_THREAD);
    let entry =
        Entry { stem: STEM, entry, threads: THREADS, blocks: blocks.min(MOST_BLOCKS) as u32 };
    entry.enqueue_packed(backend, bytemuck::bytes_of(&arguments))
}
