//! Memory of the host.

use std::any::Any;

use fusestep_coalesce::HostMemory;
use fusestep_launch::Buffer;

use crate::param_sums::ParamSums;

/// Host memory that counts how often it was borrowed for writing. Values derived from the memory
/// are up to date as long as the count stays the same.
#[derive(Debug)]
pub(crate) struct HostBuffer {
    memory: HostMemory,
    times_borrowed: u64,
    /// Sums over parameters that their last update has left, if the memory holds parameters.
    pub(crate) sums: Option<ParamSums>,
}

impl HostBuffer {
    pub(crate) fn new(memory: HostMemory) -> Self {
        Self { memory, times_borrowed: 0, sums: None }
    }

    /// The number of times that the bytes were borrowed for writing. As long as the number is the
    /// same, so are the bytes.
    pub(crate) fn times_borrowed(&self) -> u64 {
        self.times_borrowed
    }
}

impl Buffer for HostBuffer {
    fn len_bytes(&self) -> usize {
        self.memory.bytes().len()
    }

    fn host(&self) -> Option<&[u8]> {
        Some(self.memory.bytes())
    }

    fn host_mut(&mut self) -> Option<&mut [u8]> {
        self.times_borrowed += 1;
        Some(self.memory.bytes_mut())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}
