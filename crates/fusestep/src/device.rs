//! Devices that an optimizer's steps run on.

use std::num::NonZeroUsize;

use fusestep_cpu::CpuBackend;
#[cfg(feature = "cuda")]
use fusestep_cuda::CudaBackend;
use fusestep_launch::{Backend, LaunchLimits, Memory};
use fusestep_simd::Pool;

use crate::Error;

/// A device that the steps of an optimizer run on.
pub trait Device: Send {
    /// Per-launch limits: bytes of arguments, elements of a chunk and number of chunks.
    fn limits(&self) -> LaunchLimits;

    /// Opens a backend on the device for one rank, where `ranks` ranks of this process share the
    /// device.
    ///
    /// # Errors
    /// Errors of opening the backend.
    fn open(self: Box<Self>, ranks: usize) -> Result<Box<dyn Backend + Send>, Error>;
}

/// Host memory and the processor's threads, shared out among the ranks of a process.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    threads: NonZeroUsize,
}

impl Cpu {
    /// Uses as many threads as the caller's rayon pool has, or rayon's global pool if the caller is
    /// in none.
    pub fn new() -> Self {
        let threads = NonZeroUsize::new(Pool::current().threads());
        Self::with_threads(threads.unwrap_or(NonZeroUsize::MIN))
    }

    /// Uses at most so many threads for all ranks of the process together. The number changes no
    /// bits.
    pub fn with_threads(threads: NonZeroUsize) -> Self {
        Self { threads }
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Device for Cpu {
    fn limits(&self) -> LaunchLimits {
        LaunchLimits::default()
    }

    fn open(self: Box<Self>, ranks: usize) -> Result<Box<dyn Backend + Send>, Error> {
        let threads = NonZeroUsize::new(self.threads.get().div_ceil(ranks.max(1)));
        Ok(Box::new(CpuBackend::new(threads.unwrap_or(NonZeroUsize::MIN))))
    }
}

impl Device for CpuBackend {
    fn limits(&self) -> LaunchLimits {
        Memory::limits(self)
    }

    fn open(self: Box<Self>, _: usize) -> Result<Box<dyn Backend + Send>, Error> {
        Ok(self)
    }
}

impl Device for Box<dyn Backend + Send> {
    fn limits(&self) -> LaunchLimits {
        self.as_ref().limits()
    }

    fn open(self: Box<Self>, _: usize) -> Result<Box<dyn Backend + Send>, Error> {
        Ok(*self)
    }
}

#[cfg(feature = "cuda")]
impl Device for CudaBackend {
    fn limits(&self) -> LaunchLimits {
        Memory::limits(self)
    }

    fn open(self: Box<Self>, _: usize) -> Result<Box<dyn Backend + Send>, Error> {
        Ok(self)
    }
}
