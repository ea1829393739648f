//! Host memory that is aligned for every element type.

/// Bytes aligned to 8, owned, so that a ring's thread can take them and hand them back.
#[derive(Clone, Debug, Default)]
pub(crate) struct Words {
    words: Vec<u64>,
    len_bytes: usize,
}

impl Words {
    /// Zeroed bytes.
    pub(crate) fn zeroed(len_bytes: usize) -> Self {
        Self {
            words: vec![0; len_bytes.div_ceil(8)],
            len_bytes,
        }
    }

    /// Bytes of memory that are held.
    pub(crate) fn held_bytes(&self) -> usize {
        8 * self.words.len()
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
        &bytemuck::cast_slice(&self.words)[..self.len_bytes]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len_bytes]
    }
}
