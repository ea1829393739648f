//! Sums over tensors that a framework lends, taken apart from the update.

use fusestep_launch::{
    BackendError, CHUNK_ELEMENTS, Gate, HostCall, Launch, MAX_LISTS, MAX_SUMS, NormedKernel,
    TensorList, tree_sum,
};
use fusestep_simd::Split;

use crate::CpuBackend;
use crate::call::{gate, host_call};
use crate::errors::{NAME, out_of_bounds};
use crate::tensors::Tensors;

/// Elements of a chunk of the fixed tree.
const CHUNK: usize = CHUNK_ELEMENTS as usize;

/// Function that lends the bytes of one list of a tensor, whole. The tensor is told by its position
/// in the storage, the list by its position in the kernel.
pub type LendRead<'a, 'b> = &'a (dyn Fn(usize, usize, &TensorList) -> &'b [u8] + Sync);

impl CpuBackend {
    /// Takes the sums that the launch's kernel defines over each of its tensors, all of which are
    /// borrowed. A sum is written at its tensor's position in the storage. All sums are 0 if the
    /// control block stops the step.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] for a kernel that takes no sums.
    /// [`BackendError::OutOfBounds`] for a list that is shorter than its tensor, and for fewer
    /// places than the storage has tensors.
    ///
    /// # Cost
    /// One read of the lists that the kernel sums over; 150 bytes for each 65,536 elements and each
    /// smaller tensor.
    pub fn measure_borrowed(
        &self,
        launch: &Launch<'_>,
        lend: LendRead<'_, '_>,
        sums: &mut [[f64; MAX_SUMS]],
    ) -> Result<(), BackendError> {
        let Some(normed) = launch.kernel.normed() else {
            let entry = launch.kernel.entry();
            return Err(BackendError::Unavailable {
                backend: NAME,
                reason: format!("expected a kernel that takes sums over tensors, found `{entry}`"),
            });
        };
        if sums.len() < launch.members.len() {
            let expected = launch.members.len() * size_of::<[f64; MAX_SUMS]>();
            return Err(out_of_bounds(0, expected, size_of_val(sums)));
        }
        sums.fill([0.0; MAX_SUMS]);
        let Gate::Open(grad_factor) = gate(launch)? else {
            return Ok(());
        };
        let declared = launch.kernel.lists();
        let mut chunks = Vec::new();
        for whole in Tensors::new(launch.batches) {
            let mut lists: [&[u8]; MAX_LISTS] = [&[]; MAX_LISTS];
            for ((at, bytes), list) in lists.iter_mut().enumerate().zip(declared) {
                *bytes = lend(whole.tensor as usize, at, list);
                let expected = list.stride().len_bytes(whole.numel as usize);
                if bytes.len() < expected {
                    return Err(out_of_bounds(0, expected, bytes.len()));
                }
            }
            let numel = whole.numel as usize;
            chunks.extend((0..numel.div_ceil(CHUNK)).map(|chunk| {
                let mut own: [&[u8]; MAX_LISTS] = [&[]; MAX_LISTS];
                for ((own, bytes), list) in own.iter_mut().zip(lists).zip(declared) {
                    let elements = chunk * CHUNK..numel.min((chunk + 1) * CHUNK);
                    *own = &bytes[list.stride().place(elements)];
                }
                Chunk { tensor: whole.tensor as usize, group: whole.group, lists: own }
            }));
        }
        let mut partials = vec![[0.0; MAX_SUMS]; chunks.len()];
        let call = host_call(self.level(), launch, grad_factor);
        self.pool().run(Measured { normed, call, chunks: &chunks, partials: &mut partials });
        let mut first = 0;
        for own in chunks.chunk_by(|one, other| one.tensor == other.tensor) {
            let partials = &partials[first..][..own.len()];
            sums[own[0].tensor] = tree_sum(own.len(), |chunk| partials[chunk]);
            first += own.len();
        }
        Ok(())
    }
}

/// A chunk of a tensor, with the bytes of each of its lists.
struct Chunk<'a> {
    tensor: usize,
    group: u32,
    lists: [&'a [u8]; MAX_LISTS],
}

/// Chunks, and the places of their sums.
struct Measured<'a> {
    normed: &'a dyn NormedKernel,
    call: HostCall<'a>,
    chunks: &'a [Chunk<'a>],
    partials: &'a mut [[f64; MAX_SUMS]],
}

impl Split for Measured<'_> {
    fn elements(&self) -> u64 {
        self.chunks.len() as u64 * u64::from(CHUNK_ELEMENTS)
    }

    fn split(self, elements: u64) -> (Self, Self) {
        let count = elements.div_ceil(u64::from(CHUNK_ELEMENTS)) as usize;
        let count = count.min(self.chunks.len());
        let (first, rest) = self.partials.split_at_mut(count);
        let (own, others) = self.chunks.split_at(count);
        (
            Self { chunks: own, partials: first, ..self },
            Self { chunks: others, partials: rest, ..self },
        )
    }

    fn run(self) {
        for (place, chunk) in self.partials.iter_mut().zip(self.chunks) {
            *place = self.normed.chunk_sums(self.call, chunk.group, chunk.lists, [true; MAX_SUMS]);
        }
    }
}
