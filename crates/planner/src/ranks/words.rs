//! Host memory that is aligned for every element type.

use fusestep_coalesce::{HUGE_PAGE_BYTES, HostMemory};

/// Bytes aligned to 8, owned, so that a ring's thread can take them and hand them back.
///
/// Large ones lie in huge pages where the system has them: memory that comes and goes with each bucket costs one page fault for
/// 2 MiB and not 512, and ranks that walk through each other's buffers need fewer translations.
#[derive(Debug, Default)]
pub(crate) struct Words {
    memory: Memory,
    len_bytes: usize,
}

#[derive(Debug)]
enum Memory {
    Small(Vec<u64>),
    Large(HostMemory),
}

impl Default for Memory {
    fn default() -> Self {
        Self::Small(Vec::new())
    }
}

impl Memory {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Small(words) => bytemuck::cast_slice(words),
            Self::Large(memory) => memory.bytes(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Small(words) => bytemuck::cast_slice_mut(words),
            Self::Large(memory) => memory.bytes_mut(),
        }
    }
}

impl Words {
    /// Zeroed bytes.
    pub(crate) fn zeroed(len_bytes: usize) -> Self {
        let large = match len_bytes < HUGE_PAGE_BYTES {
            true => None,
            false => HostMemory::zeroed(len_bytes).ok(),
        };
        // Where even that fails, the process ends as with any allocation.
        let memory = match large {
            Some(memory) => Memory::Large(memory),
            None => Memory::Small(vec![0; len_bytes.div_ceil(8)]),
        };
        Self { memory, len_bytes }
    }

    /// Bytes of memory that are held.
    pub(crate) fn held_bytes(&self) -> usize {
        self.memory.bytes().len()
    }

    /// The same memory for other contents, of any value at first; back as it was if it is too short.
    pub(crate) fn reused(mut self, len_bytes: usize) -> Result<Self, Self> {
        if self.held_bytes() < len_bytes {
            return Err(self);
        }
        self.len_bytes = len_bytes;
        Ok(self)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.memory.bytes()[..self.len_bytes]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory.bytes_mut()[..self.len_bytes]
    }
}
