//! Where steps run.

use std::num::NonZeroUsize;

use fusestep_cpu::CpuBackend;
#[cfg(feature = "cuda")]
use fusestep_cuda::CudaBackend;
use fusestep_launch::{Backend, LaunchLimits};
use fusestep_simd::Pool;

use crate::Error;

/// Where the steps of an optimizer run.
pub trait Device {
    /// What one launch may carry.
    fn limits(&self) -> LaunchLimits;

    /// Makes it ready for one of so many ranks that share it.
    ///
    /// # Errors
    /// The backend's.
    fn open(self: Box<Self>, ranks: usize) -> Result<Box<dyn Backend>, Error>;
}

/// Host memory and the processor's threads, shared out among the ranks of a process.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    threads: NonZeroUsize,
}

impl Cpu {
    /// As many threads as the rayon pool has that the caller is in, or else rayon's global one.
    pub fn new() -> Self {
        let threads = NonZeroUsize::new(Pool::current().threads());
        Self::with_threads(threads.unwrap_or(NonZeroUsize::MIN))
    }

    /// At most so many threads, of all ranks of the process together; they change no bits.
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

    fn open(self: Box<Self>, ranks: usize) -> Result<Box<dyn Backend>, Error> {
        let threads = NonZeroUsize::new(self.threads.get().div_ceil(ranks.max(1)));
        Ok(Box::new(CpuBackend::new(threads.unwrap_or(NonZeroUsize::MIN))))
    }
}

impl Device for CpuBackend {
    fn limits(&self) -> LaunchLimits {
        Backend::limits(self)
    }

    fn open(self: Box<Self>, _: usize) -> Result<Box<dyn Backend>, Error> {
        Ok(self)
    }
}

#[cfg(feature = "cuda")]
impl Device for CudaBackend {
    fn limits(&self) -> LaunchLimits {
        Backend::limits(self)
    }

    fn open(self: Box<Self>, _: usize) -> Result<Box<dyn Backend>, Error> {
        Ok(self)
    }
}
