//! The CPU backend: host memory, and launches as one parallel scope.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};

use fusestep_coalesce::HostMemory;
use fusestep_launch::{
    Backend, BackendError, Buffer, CONTROL_BYTES, Conclude, ControlBlock, Gate, HostLaunches,
    Launch, LaunchLimits, LaunchReport, Launches, LeafSquares, MAX_SUMS, Memory, Reduce, Replicas,
    SquareSum,
};
use fusestep_simd::{Level, Pool};

use crate::buffer::HostBuffer;
use crate::call::{gate, host_call};
use crate::chunks::{ChunkPieces, partials};
use crate::errors::{FOREIGN, NAME, out_of_bounds};
use crate::leaves;
use crate::pieces::Pieces;
use crate::reduced::ReducedPieces;

/// Backend that runs kernels on the host.
///
/// All batches of a launch run in one parallel scope over all chunks of all tensors, so per-launch
/// limits cost nothing here. The bits depend neither on the threads nor on the SIMD level.
#[derive(Debug)]
pub struct CpuBackend {
    pool: Pool,
    level: Level,
    limits: LaunchLimits,
    /// Number of tensors that kernels have left as they are.
    skipped: AtomicU64,
    /// Value of `skipped` at the last [`Launches::take_skipped`].
    told: AtomicU64,
}

impl CpuBackend {
    /// A backend on the caller's thread and at most `threads − 1` workers of the caller's rayon
    /// pool. It uses the processor's widest SIMD level.
    pub fn new(threads: NonZeroUsize) -> Self {
        Self::in_pool(Pool::new(threads))
    }

    /// A backend that works on all threads of the caller's rayon pool, or of rayon's global one.
    pub fn with_all_threads() -> Self {
        Self::in_pool(Pool::current())
    }

    /// A backend on the threads of `pool`; [`Pool::of`] takes a rayon pool of the program's choice.
    pub fn in_pool(pool: Pool) -> Self {
        Self {
            pool,
            level: Level::detect(),
            limits: LaunchLimits::default(),
            skipped: AtomicU64::new(0),
            told: AtomicU64::new(0),
        }
    }

    /// This backend at another SIMD level.
    pub fn at_level(mut self, level: Level) -> Self {
        self.level = level;
        self
    }

    /// This backend with other limits; they change the plan, not the bits.
    pub fn with_limits(mut self, limits: LaunchLimits) -> Self {
        self.limits = limits;
        self
    }

    /// The threads among which launches are shared out.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(crate) fn count_skipped(&self) -> &AtomicU64 {
        &self.skipped
    }

    /// The SIMD level in use.
    pub fn level(&self) -> Level {
        self.level
    }
}

impl Backend for CpuBackend {
    fn host(&self) -> Option<&dyn HostLaunches> {
        Some(self)
    }
}

impl Memory for CpuBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn limits(&self) -> LaunchLimits {
        self.limits
    }

    fn allocate(&self, len_bytes: usize) -> Result<Box<dyn Buffer>, BackendError> {
        match HostMemory::zeroed(len_bytes) {
            Ok(memory) => Ok(Box::new(HostBuffer::new(memory))),
            Err(_) => Err(BackendError::OutOfMemory { backend: NAME, len_bytes }),
        }
    }

    fn write(
        &self,
        buffer: &mut dyn Buffer,
        offset_bytes: usize,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        let found = buffer.len_bytes();
        let host = buffer.host_mut().ok_or(FOREIGN)?;
        let target = host.get_mut(offset_bytes..).and_then(|rest| rest.get_mut(..bytes.len()));
        match target {
            Some(target) => target.copy_from_slice(bytes),
            None => return Err(out_of_bounds(offset_bytes, bytes.len(), found)),
        }
        Ok(())
    }

    fn read(
        &self,
        buffer: &dyn Buffer,
        offset_bytes: usize,
        bytes: &mut [u8],
    ) -> Result<(), BackendError> {
        let host = buffer.host().ok_or(FOREIGN)?;
        let source = host.get(offset_bytes..).and_then(|rest| rest.get(..bytes.len()));
        match source {
            Some(source) => bytes.copy_from_slice(source),
            None => {
                return Err(out_of_bounds(offset_bytes, bytes.len(), buffer.len_bytes()));
            }
        }
        Ok(())
    }

    fn synchronize(&self) -> Result<(), BackendError> {
        Ok(())
    }
}

impl Launches for CpuBackend {
    fn launch(&self, launch: Launch<'_>) -> Result<LaunchReport, BackendError> {
        if launch.kernel.normed().is_some() {
            // The sums come from the whole tensor, so a tensor must not be cut between threads at
            // an arbitrary element.
            return self.launch_by_tensor(launch, &|piece| {
                piece.run();
                Ok(())
            });
        }
        let report = LaunchReport::of(launch.batches);
        let Gate::Open(grad_factor) = gate(&launch)? else {
            return Ok(report);
        };
        let call = host_call(self.level, &launch, grad_factor);
        let pieces = Pieces::new(launch, call)?;
        self.pool.run(pieces);
        Ok(report)
    }

    fn reduce(&self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError> {
        let launches = reduce.batches.len() as u64;
        let list = reduce.list.ok_or(FOREIGN)?;
        let elements = list.buffer.host().ok_or(FOREIGN)?;
        let partials = partials(reduce.partials, reduce.first_partial, reduce.batches)?;
        self.pool.run(ChunkPieces::new(
            reduce.kernel,
            self.level,
            reduce.batches,
            reduce.offsets,
            elements,
            partials,
        ));
        Ok(LaunchReport { launches, elements: 0 })
    }

    fn conclude(&self, conclude: Conclude<'_>) -> Result<LaunchReport, BackendError> {
        let partials = conclude.partials.host().ok_or(FOREIGN)?;
        let tensors = conclude.tensors.host().ok_or(FOREIGN)?;
        let sums = conclude.sums.host_mut().ok_or(FOREIGN)?;
        let found = conclude.control.len_bytes();
        let control = conclude.control.host_mut().ok_or(FOREIGN)?;
        let control = control
            .get_mut(..CONTROL_BYTES)
            .ok_or_else(|| out_of_bounds(0, CONTROL_BYTES, found))?;
        let mut block: ControlBlock = bytemuck::pod_read_unaligned(control);
        conclude.rule.run_host(
            bytemuck::cast_slice(partials),
            bytemuck::cast_slice(tensors),
            bytemuck::cast_slice_mut(sums),
            &mut block,
        );
        control.copy_from_slice(bytemuck::bytes_of(&block));
        Ok(LaunchReport { launches: 1, elements: 0 })
    }

    fn leaf_squares(
        &self,
        leaves: LeafSquares<'_>,
        sums: &mut [SquareSum],
    ) -> Result<(), BackendError> {
        leaves::leaf_squares(&self.pool, self.level, leaves, sums)
    }

    fn leaf_sums(
        &self,
        launch: &Launch<'_>,
        sums: &mut [[f64; MAX_SUMS]],
    ) -> Result<(), BackendError> {
        leaves::leaf_sums(&self.pool, self.level, launch, sums)
    }

    fn take_skipped(&self) -> Result<u64, BackendError> {
        let all = self.skipped.load(Ordering::Relaxed);
        Ok(all - self.told.swap(all, Ordering::Relaxed))
    }

    fn skipped(&self) -> u64 {
        self.skipped.load(Ordering::Relaxed)
    }
}

impl HostLaunches for CpuBackend {
    fn launch_reduced(
        &self,
        launch: Launch<'_>,
        replicas: Replicas<'_, '_, '_>,
    ) -> Result<LaunchReport, BackendError> {
        let report = LaunchReport::of(launch.batches);
        if let Some(pieces) = ReducedPieces::new(launch, replicas, self.level)? {
            self.pool.run(pieces);
        }
        Ok(report)
    }
}
