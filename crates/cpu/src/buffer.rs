//! Memory of the host.

use std::any::Any;

use fusestep_coalesce::HostMemory;
use fusestep_launch::Buffer;

use crate::cached::ParamSums;

/// Host memory that counts how often it was borrowed to be written, so that what was derived from
/// it can be told from what it holds now.
#[derive(Debug)]
pub(crate) struct HostBuffer {
    memory: HostMemory,
    times_borrowed: u64,
    /// If it holds parameters: the sums that their last update took along.
    pub(crate) sums: Option<ParamSums>,
}

impl HostBuffer {
    pub(crate) fn new(memory: HostMemory) -> Self {
        Self { memory, times_borrowed: 0, sums: None }
    }

    /// How often the bytes were borrowed to be written: who finds the same number twice finds the
    /// same bytes.
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
