//! The CPU backend: host memory, and launches as one parallel scope.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};

use fusestep_coalesce::HostMemory;
use fusestep_launch::{
    Backend, BackendError, Batch, Buffer, CONTROL_BYTES, Conclude, ControlBlock, Gate, HostCall,
    Launch, LaunchLimits, LaunchReport, LeafSquares, MAX_SUMS, Reduce, Replicas, SquareSum,
};
use fusestep_simd::{Level, Pool};

use crate::buffer::HostBuffer;
use crate::chunks::ChunkPieces;
use crate::leaves;
use crate::pieces::Pieces;
use crate::reduced::ReducedPieces;

pub(crate) const NAME: &str = "cpu";

pub(crate) const FOREIGN: BackendError = BackendError::ForeignBuffer { backend: NAME };

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
    /// Value of `skipped` at the last [`Backend::take_skipped`].
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
        let host = buffer.host_mut().ok_or(BackendError::ForeignBuffer { backend: NAME })?;
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
        let host = buffer.host().ok_or(BackendError::ForeignBuffer { backend: NAME })?;
        let source = host.get(offset_bytes..).and_then(|rest| rest.get(..bytes.len()));
        match source {
            Some(source) => bytes.copy_from_slice(source),
            None => {
                return Err(out_of_bounds(offset_bytes, bytes.len(), buffer.len_bytes()));
            }
        }
        Ok(())
    }

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
        let foreign = BackendError::ForeignBuffer { backend: NAME };
        let launches = reduce.batches.len() as u64;
        let list = reduce.list.ok_or(foreign.clone())?;
        let elements = list.buffer.host().ok_or(foreign)?;
        let partials = partials(reduce.partials, reduce.first_partial, reduce.batches)?;
        self.pool.run(ChunkPieces::new(
            reduce.kernel,
            self.level,
            (reduce.batches, reduce.offsets),
            elements,
            partials,
        ));
        Ok(LaunchReport { launches, elements: 0 })
    }

    fn conclude(&self, conclude: Conclude<'_>) -> Result<LaunchReport, BackendError> {
        let foreign = || BackendError::ForeignBuffer { backend: NAME };
        let partials = conclude.partials.host().ok_or_else(foreign)?;
        let tensors = conclude.tensors.host().ok_or_else(foreign)?;
        let sums = conclude.sums.host_mut().ok_or_else(foreign)?;
        let found = conclude.control.len_bytes();
        let control = conclude.control.host_mut().ok_or_else(foreign)?;
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

    fn takes_host_memory(&self) -> bool {
        true
    }

    fn take_skipped(&self) -> Result<u64, BackendError> {
        let all = self.skipped.load(Ordering::Relaxed);
        Ok(all - self.told.swap(all, Ordering::Relaxed))
    }

    fn skipped(&self) -> u64 {
        self.skipped.load(Ordering::Relaxed)
    }

    fn synchronize(&self) -> Result<(), BackendError> {
        Ok(())
    }
}

/// The places of the sums of all chunks of `batches`, of which the first has number `first`.
pub(crate) fn partials<'a>(
    buffer: &'a mut dyn Buffer,
    first: u64,
    batches: &[Batch],
) -> Result<&'a mut [SquareSum], BackendError> {
    let found = buffer.len_bytes();
    let foreign = BackendError::ForeignBuffer { backend: NAME };
    let sums: &mut [SquareSum] = bytemuck::cast_slice_mut(buffer.host_mut().ok_or(foreign)?);
    let chunks: u64 = batches.iter().map(|b| u64::from(b.chunks)).sum();
    let (first, chunks) = (first as usize, chunks as usize);
    let places = sums.get_mut(first..).and_then(|rest| rest.get_mut(..chunks));
    places.ok_or_else(|| {
        let width = size_of::<SquareSum>();
        out_of_bounds(first * width, chunks * width, found)
    })
}

/// The gate of a launch, as its control block sets it.
pub(crate) fn gate(launch: &Launch<'_>) -> Result<Gate, BackendError> {
    Gate::on_host(launch.control).ok_or(BackendError::ForeignBuffer { backend: NAME })
}

/// The arguments that all parts of a launch share.
pub(crate) fn host_call<'a>(level: Level, launch: &Launch<'a>, grad_factor: f64) -> HostCall<'a> {
    HostCall {
        level,
        scalars: launch.scalars,
        grad_factor,
        step_scalars: launch.step_scalars,
        changes: None,
        squares: None,
    }
}

pub(crate) fn out_of_bounds(offset_bytes: usize, len_bytes: usize, found: usize) -> BackendError {
    BackendError::OutOfBounds { backend: NAME, offset_bytes, len_bytes, found }
}
