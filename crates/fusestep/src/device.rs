//! Devices that an optimizer's steps run on.

use std::num::NonZeroUsize;
use std::sync::Arc;

use fusestep_cpu::CpuBackend;
#[cfg(feature = "cuda")]
use fusestep_cuda::CudaBackend;
use fusestep_launch::{Backend, LaunchLimits, Memory};
use fusestep_simd::Pool;

use crate::{Error, Figures};

/// A backend that a session and its program may share.
pub type SharedBackend = Arc<dyn Backend + Send + Sync>;

/// A device that the steps of an optimizer run on.
pub trait Device: Send {
    /// Per-launch limits: bytes of arguments, elements of a chunk and number of chunks.
    fn limits(&self) -> LaunchLimits;

    /// Chooses from a machine's figures what the program has left open; returns the reason of a
    /// choice that is not the default.
    fn choose(&mut self, _: &Figures) -> Option<String> {
        None
    }

    /// Opens a backend on the device for one rank, where `ranks` ranks of this process share the
    /// device.
    ///
    /// # Errors
    /// Errors of opening the backend.
    fn open(self: Box<Self>, ranks: usize) -> Result<SharedBackend, Error>;
}

/// Host memory and the processor's threads, shared out among the ranks of a process.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    threads: NonZeroUsize,
    /// Whether the number of threads is the program's own.
    is_given: bool,
}

impl Cpu {
    /// Uses as many threads as the caller's rayon pool has, or rayon's global pool if the caller is
    /// in none.
    pub fn new() -> Self {
        let threads = NonZeroUsize::new(Pool::current().threads());
        Self { threads: threads.unwrap_or(NonZeroUsize::MIN), is_given: false }
    }

    /// Uses at most so many threads for all ranks of the process together. The number changes no
    /// bits.
    pub fn with_threads(threads: NonZeroUsize) -> Self {
        Self { threads, is_given: true }
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

    fn choose(&mut self, figures: &Figures) -> Option<String> {
        let all = self.threads;
        let enough = figures.threads(all.get()).and_then(NonZeroUsize::new);
        self.threads = enough.filter(|enough| *enough < all && !self.is_given)?;
        Some(figures.text_of_threads(self.threads.get(), all.get()))
    }

    fn open(self: Box<Self>, ranks: usize) -> Result<SharedBackend, Error> {
        let threads = NonZeroUsize::new(self.threads.get().div_ceil(ranks.max(1)));
        Ok(Arc::new(CpuBackend::new(threads.unwrap_or(NonZeroUsize::MIN))))
    }
}

impl Device for CpuBackend {
    fn limits(&self) -> LaunchLimits {
        Memory::limits(self)
    }

    fn open(self: Box<Self>, _: usize) -> Result<SharedBackend, Error> {
        Ok(Arc::new(*self))
    }
}

impl Device for SharedBackend {
    fn limits(&self) -> LaunchLimits {
        self.as_ref().limits()
    }

    fn open(self: Box<Self>, _: usize) -> Result<SharedBackend, Error> {
        Ok(*self)
    }
}

#[cfg(feature = "cuda")]
impl Device for CudaBackend {
    fn limits(&self) -> LaunchLimits {
        Memory::limits(self)
    }

    fn open(self: Box<Self>, _: usize) -> Result<SharedBackend, Error> {
        Ok(Arc::new(*self))
    }
}
