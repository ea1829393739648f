//! All tensors in one role, as a kernel declares them and as a buffer holds them.

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
    /// Bytes of memory traffic per element: one read, and one write if written.
    pub const fn traffic_bytes(&self) -> u64 {
        let len_bytes = self.dtype.len_bytes() as u64;
        match self.access {
            Access::Read | Access::Write => len_bytes,
            Access::ReadWrite => 2 * len_bytes,
        }
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

    /// Whether the kernel writes the list.
    pub fn access(&self) -> Access {
        self.list.access
    }
}
