//! All tensors in one role, as a kernel declares them and as a buffer holds them.

use std::ops::Range;

use fusestep_tensor::{DType, Role};

use crate::Buffer;

/// Whether a kernel reads or writes a tensor list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Access {
    /// Only read.
    Read,
    /// Read and written in place.
    ReadWrite,
    /// Only written, from other lists.
    Write,
}

/// All tensors in one role, as a kernel takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TensorList {
    /// The part the tensors play.
    pub role: Role,
    /// Their storage type.
    pub dtype: DType,
    /// Whether the kernel writes them.
    pub access: Access,
}

impl TensorList {
    /// The way in which elements of a tensor lie in this list.
    pub const fn stride(&self) -> Stride {
        Stride::of(self.role, self.dtype)
    }

    /// Bytes of memory traffic of so many elements: one read, and one write if written.
    pub const fn traffic_bytes(&self, elements: u64) -> u64 {
        let len_bytes = self.stride().bytes(elements);
        match self.access {
            Access::Read | Access::Write => len_bytes,
            Access::ReadWrite => len_bytes.saturating_mul(2),
        }
    }
}

/// The way in which elements of a tensor lie in a list: bytes of an entry, and the elements that
/// share one.
///
/// Element e of a tensor has entry e of most lists, and entry e / 32 of a list of units. Lists are
/// cut where tensors end or at multiples of 32 elements of a tensor; a cut elsewhere would belong
/// to neither side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stride {
    entry_bytes: u32,
    /// Binary logarithm of the elements that share an entry.
    shift: u32,
}

impl Stride {
    /// The stride of a list in this role and of this dtype.
    pub const fn of(role: Role, dtype: DType) -> Self {
        Self { entry_bytes: dtype.len_bytes() as u32, shift: role.shift() }
    }

    /// Bytes of the first `elements` elements, and so the place of the next one.
    pub const fn bytes(self, elements: u64) -> u64 {
        let rest = (elements & ((1 << self.shift) - 1) != 0) as u64;
        ((elements >> self.shift) + rest).saturating_mul(self.entry_bytes as u64)
    }

    /// [`Self::bytes`] in host memory, whose lengths fit a usize.
    #[inline]
    pub const fn len_bytes(self, elements: usize) -> usize {
        let rest = (elements & ((1 << self.shift) - 1) != 0) as usize;
        ((elements >> self.shift) + rest) * self.entry_bytes as usize
    }

    /// Bytes between two elements of a storage at which its lists may be cut, in host memory.
    #[inline]
    pub const fn between(self, elements: Range<u64>) -> usize {
        (self.bytes(elements.end) - self.bytes(elements.start)) as usize
    }

    /// Bytes of these elements in host memory, of a list that begins with a multiple of 32 elements
    /// of a tensor.
    #[inline]
    pub const fn place(self, elements: Range<usize>) -> Range<usize> {
        self.len_bytes(elements.start)..self.len_bytes(elements.end)
    }
}

/// The buffer that holds one tensor list of a storage.
#[derive(Debug)]
pub struct ListBuffer {
    /// The list's role, dtype and access.
    pub list: TensorList,
    /// Its memory.
    pub buffer: Box<dyn Buffer>,
}

impl ListBuffer {
    /// The list's role.
    pub fn role(&self) -> Role {
        self.list.role
    }

    /// The list's storage type.
    pub fn dtype(&self) -> DType {
        self.list.dtype
    }

    /// The way in which elements lie in the list.
    pub fn stride(&self) -> Stride {
        self.list.stride()
    }

    /// Whether the kernel writes the list.
    pub fn access(&self) -> Access {
        self.list.access
    }
}
