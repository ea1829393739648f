//! Reductions, tensor by tensor, of gradients that a framework keeps and lends.

use std::sync::{Mutex, PoisonError};

use fusestep_launch::{
    BackendError, LaunchReport, Memory, MultiTensorReduction, Reduce, SquareSum,
};
use fusestep_simd::{Level, Pool, Split};

use crate::CpuBackend;
use crate::borrowed::PARTS_PER_THREAD;
use crate::chunks::partials;
use crate::tensors::{Sizes, Tensors, Whole};

/// Function that lends one gradient: it calls [`BorrowedGradient::read`] with it. Any thread of the
/// pool may call the function, but a thread never calls it for two tensors at once.
pub type LendGradient<'a> = &'a (dyn Fn(BorrowedGradient<'_>) -> Result<(), BackendError> + Sync);

/// A tensor whose gradient is borrowed.
pub struct BorrowedGradient<'a> {
    call: Call<'a>,
    whole: Whole,
    /// Places of the sums, one for each chunk.
    sums: &'a mut [SquareSum],
    /// The pool, if the tensor is large enough to share it out.
    pool: Option<&'a Pool>,
}

/// The data of a reduction that all tensors share.
#[derive(Clone, Copy)]
struct Call<'a> {
    kernel: &'a dyn MultiTensorReduction,
    level: Level,
    backend: &'static str,
}

impl CpuBackend {
    /// Runs a reduction of a plan whose tensors are borrowed. `lend` is called once for each
    /// tensor, however launches cut it.
    ///
    /// # Errors
    /// The first error of `lend`; [`BackendError::ForeignBuffer`] and [`BackendError::OutOfBounds`]
    /// as for [`fusestep_launch::Launches::reduce`].
    pub fn reduce_borrowed(
        &self,
        reduce: Reduce<'_>,
        lend: LendGradient<'_>,
    ) -> Result<LaunchReport, BackendError> {
        let call = Call { kernel: reduce.kernel, level: self.level(), backend: self.name() };
        let mut sums = partials(reduce.partials, reduce.first_partial, reduce.batches)?;
        let tensors = Tensors::new(reduce.batches);
        let Sizes { large, small, has_large, .. } = Sizes::of(tensors, self.pool().threads());
        let mut rest = &mut *sums;
        for whole in has_large.then_some(tensors).into_iter().flatten() {
            let own = rest.split_off_mut(..chunks(call.kernel, &whole));
            if let Some(sums) = own.filter(|_| whole.is_large(large)) {
                lend(BorrowedGradient { call, whole, sums, pool: Some(self.pool()) })?;
            }
        }
        let error = Mutex::new(None);
        sums = partials(reduce.partials, reduce.first_partial, reduce.batches)?;
        self.pool().run(SmallGradients {
            call,
            tensors,
            large,
            sums,
            elements: small,
            lend,
            error: &error,
        });
        let error = error.into_inner().unwrap_or_else(PoisonError::into_inner);
        let report = LaunchReport { launches: reduce.batches.len() as u64, elements: 0 };
        error.map_or(Ok(report), Err)
    }
}

fn chunks(kernel: &dyn MultiTensorReduction, whole: &Whole) -> usize {
    // Tensors lie in host memory, so their element counts fit a usize.
    whole.numel.div_ceil(u64::from(kernel.chunk_elements())) as usize
}

impl BorrowedGradient<'_> {
    /// Index of the tensor in its storage.
    pub fn tensor(&self) -> usize {
        self.whole.tensor as usize
    }

    /// Reads the gradient; `grad` is the whole tensor.
    ///
    /// # Errors
    /// [`BackendError::OutOfBounds`] if `grad` is shorter than the tensor.
    pub fn read(self, grad: &[u8]) -> Result<(), BackendError> {
        let width = self.call.kernel.list().dtype.len_bytes();
        let len_bytes = self.whole.numel as usize * width;
        let grad = grad.get(..len_bytes).ok_or(BackendError::OutOfBounds {
            backend: self.call.backend,
            offset_bytes: 0,
            len_bytes,
            found: grad.len(),
        })?;
        let chunks = TensorChunks {
            call: self.call,
            chunk_bytes: self.call.kernel.chunk_elements() as usize * width,
            grad,
            sums: self.sums,
        };
        match self.pool {
            Some(pool) => pool.run(chunks),
            None => chunks.run(),
        }
        Ok(())
    }
}

/// Consecutive chunks of one tensor.
struct TensorChunks<'a> {
    call: Call<'a>,
    chunk_bytes: usize,
    grad: &'a [u8],
    sums: &'a mut [SquareSum],
}

impl Split for TensorChunks<'_> {
    fn elements(&self) -> u64 {
        self.sums.len() as u64 * u64::from(self.call.kernel.chunk_elements())
    }

    fn split(self, elements: u64) -> (Self, Self) {
        let chunks = elements.div_ceil(u64::from(self.call.kernel.chunk_elements())) as usize;
        let chunks = chunks.min(self.sums.len());
        let (left_sums, right_sums) = self.sums.split_at_mut(chunks);
        let at = (chunks * self.chunk_bytes).min(self.grad.len());
        let (left, right) = self.grad.split_at(at);
        let part = |grad, sums| TensorChunks { grad, sums, ..self };
        (part(left, left_sums), part(right, right_sums))
    }

    fn run(self) {
        for (sum, chunk) in self.sums.iter_mut().zip(self.grad.chunks(self.chunk_bytes)) {
            *sum = self.call.kernel.run_host(self.call.level, chunk);
        }
    }
}

/// The small tensors among consecutive tensors of a reduction.
struct SmallGradients<'a> {
    call: Call<'a>,
    tensors: Tensors<'a>,
    /// Element count from which on tensors are large.
    large: u64,
    /// Places of the sums, one for each chunk of all these tensors, the large ones included.
    sums: &'a mut [SquareSum],
    /// Elements of the small tensors.
    elements: u64,
    lend: LendGradient<'a>,
    error: &'a Mutex<Option<BackendError>>,
}

impl Split for SmallGradients<'_> {
    const PARTS_PER_THREAD: usize = PARTS_PER_THREAD;

    fn elements(&self) -> u64 {
        self.elements
    }

    fn split(self, elements: u64) -> (Self, Self) {
        let (mut rest, mut taken, mut count) = (self.tensors, 0, 0);
        while taken < elements {
            let Some(whole) = rest.next() else { break };
            taken += if whole.is_large(self.large) { 0 } else { whole.numel };
            count += chunks(self.call.kernel, &whole);
        }
        let (left_sums, right_sums) = self.sums.split_at_mut(count);
        let left = SmallGradients {
            tensors: self.tensors.before(rest),
            sums: left_sums,
            elements: taken,
            ..self
        };
        let right = SmallGradients {
            tensors: rest,
            sums: right_sums,
            elements: self.elements - taken,
            ..left
        };
        (left, right)
    }

    fn run(self) {
        let mut rest = self.sums;
        for whole in self.tensors {
            let own = rest.split_off_mut(..chunks(self.call.kernel, &whole));
            let Some(sums) = own.filter(|_| !whole.is_large(self.large)) else {
                continue;
            };
            let borrowed =
                (self.lend)(BorrowedGradient { call: self.call, whole, sums, pool: None });
            if let Err(error) = borrowed {
                let mut first = self.error.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(error);
                return;
            }
        }
    }
}
