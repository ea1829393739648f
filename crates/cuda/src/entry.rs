//! A launch of one entry of a kernel: its grid, and how it gets on the stream.

use std::ffi::c_void;
use std::ptr;

use cust::sys;
use fusestep_launch::Batch;

use crate::Result;
use crate::backend::CudaBackend;
use crate::status::check;

/// Most threads of a block, as the kernels are compiled for.
pub(crate) const BLOCK_THREADS: u32 = 512;

/// Elements that a thread takes at a time, and threads of the smallest block worth its place.
const THREAD_ELEMENTS: u64 = 4;
const LEAST_THREADS: u64 = 32;

/// Threads of the largest block where any number will do. Of two such blocks one computes while the
/// other waits for memory, as halves of a block of 512 do. With a kernel of 65 to 80 registers
/// three of them fit on a multiprocessor, but only one of 512.
const MOST_THREADS: u64 = 256;

/// CUDA's limit on the grid's first dimension.
pub(crate) const GRID_MAX: u32 = i32::MAX as u32;

/// One launch: its function and its grid.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) stem: &'static str,
    pub(crate) entry: &'static str,
    pub(crate) threads: u32,
    /// Blocks of the grid, which run in any order.
    pub(crate) blocks: u32,
}

impl Entry {
    /// Enqueues it, with the arguments that `write` writes.
    ///
    /// The caller has checked that everything the arguments refer to lies in buffers that are
    /// borrowed until the launch is enqueued; buffers are freed only after the driver has
    /// waited for it.
    pub(crate) fn enqueue(
        self,
        backend: &CudaBackend,
        write: &mut dyn FnMut(&mut [u8]),
    ) -> Result<()> {
        backend.session.enter()?;
        let mut kernels = backend.kernels();
        let function = kernels.function(self.stem, self.entry)?;
        let bytes = bytemuck::cast_slice_mut(kernels.block.as_mut_slice());
        write(bytes);
        let mut parameters: [*mut c_void; 1] = [bytes.as_mut_ptr().cast()];
        // SAFETY: `function` takes one parameter of at most `TABLE_BYTES` bytes, of which `bytes`
        // has as many; the call copies them. What they refer to lies in live buffers, as the
        // callers establish (`check_records`, `check_end`, `Rows::at_least`).
        let status = unsafe {
            sys::cuLaunchKernel(
                function,
                self.blocks,
                1,
                1,
                self.threads,
                1,
                1,
                0,
                backend.session.stream(),
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check(status, || format!("launching `{}` with {} blocks", self.entry, self.blocks))
    }

    /// [`Entry::enqueue`] of arguments that are packed already.
    pub(crate) fn enqueue_packed(self, backend: &CudaBackend, arguments: &[u8]) -> Result<()> {
        self.enqueue(backend, &mut |bytes| {
            bytes[..arguments.len()].copy_from_slice(arguments);
        })
    }
}

/// Threads of a block: as many as its share of the elements keeps busy. Many small tensors in
/// blocks of 512 would leave most threads idle, and few such blocks fit on the device at once.
pub(crate) fn threads_for(batch: &Batch) -> u32 {
    let elements = batch.elements() / u64::from(batch.chunks.max(1));
    let threads = elements.div_ceil(THREAD_ELEMENTS).next_power_of_two();
    threads.clamp(LEAST_THREADS, MOST_THREADS) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_as_large_as_their_chunks_need() {
        for (elements, threads) in [(1, 32), (64, 32), (512, 128), (1024, 256), (65_536, 256)] {
            let record = fusestep_launch::Record {
                tensor: 0,
                first_element: 0,
                numel: elements,
                first_chunk: 0,
                group: 0,
            };
            let batch = Batch { records: vec![record], groups: vec![0], chunks: 1 };
            assert_eq!(threads_for(&batch), threads, "{elements}");
        }
    }
}
