//! Host memory as a buffer that launches work on.

use std::any::Any;

use fusestep_launch::Buffer;

use crate::memory::HostMemory;

impl Buffer for HostMemory {
    fn len_bytes(&self) -> usize {
        self.bytes().len()
    }

    fn host(&self) -> Option<&[u8]> {
        Some(self.bytes())
    }

    fn host_mut(&mut self) -> Option<&mut [u8]> {
        Some(self.bytes_mut())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_reads_and_writes_it_in_place() {
        let mut memory = HostMemory::zeroed(5).unwrap();
        assert_eq!(Buffer::len_bytes(&memory), 5);
        memory.host_mut().unwrap().copy_from_slice(&[1, 2, 3, 4, 5]);
        assert_eq!(memory.host(), Some(&[1, 2, 3, 4, 5][..]));
        assert!(memory.as_any().is::<HostMemory>() && memory.as_any_mut().is::<HostMemory>());
    }
}
