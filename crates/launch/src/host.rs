//! Tensors in host memory, cut into pieces that one thread updates.

use bytemuck::Pod;
use fusestep_simd::Level;

/// Most tensor lists of one kernel.
pub const MAX_LISTS: usize = 8;

/// What all pieces of one launch share.
#[derive(Clone, Copy, Debug)]
pub struct HostCall<'a> {
    /// The instruction set to use.
    pub level: Level,
    /// The kernel's scalars, as it wrote them.
    pub scalars: &'a [u8],
    /// The kernel's sets, one after the other, as it wrote them; a piece names its own by [`HostPiece::class`].
    pub sets: &'a [u8],
}

/// The bytes of one list's part of a piece.
#[derive(Debug, Default)]
pub enum HostList<'a> {
    /// The kernel has no such list.
    #[default]
    Absent,
    /// Read only.
    Read(&'a [u8]),
    /// Read and written.
    ReadWrite(&'a mut [u8]),
}

impl<'a> HostList<'a> {
    /// The elements, to be read.
    ///
    /// # Panics
    /// If the list is absent or its bytes are not aligned elements of `T`: backends cut lists by the kernel's own dtypes.
    pub fn elements<T: Pod>(self) -> &'a [T] {
        match self {
            HostList::Read(bytes) => bytemuck::cast_slice(bytes),
            HostList::ReadWrite(bytes) => bytemuck::cast_slice(bytes),
            HostList::Absent => panic!("the kernel asked for a list that it did not declare"),
        }
    }

    /// The elements, to be updated in place.
    ///
    /// # Panics
    /// If the list is absent, read only, or its bytes are not aligned elements of `T`.
    pub fn elements_mut<T: Pod>(self) -> &'a mut [T] {
        match self {
            HostList::ReadWrite(bytes) => bytemuck::cast_slice_mut(bytes),
            _ => panic!("the kernel asked to write a list that it declared as read only"),
        }
    }

    /// Cuts the list after `len_bytes`.
    ///
    /// # Panics
    /// If the list is shorter.
    pub fn split_at(self, len_bytes: usize) -> (Self, Self) {
        match self {
            HostList::Absent => (HostList::Absent, HostList::Absent),
            HostList::Read(bytes) => {
                let (left, right) = bytes.split_at(len_bytes);
                (HostList::Read(left), HostList::Read(right))
            }
            HostList::ReadWrite(bytes) => {
                let (left, right) = bytes.split_at_mut(len_bytes);
                (HostList::ReadWrite(left), HostList::ReadWrite(right))
            }
        }
    }
}

/// Consecutive elements of one tensor, the same ones in every list.
#[derive(Debug)]
pub struct HostPiece<'a> {
    /// The lists in the kernel's order; the rest is absent.
    pub lists: [HostList<'a>; MAX_LISTS],
    /// Index of the tensor's set in [`HostCall::sets`].
    pub class: u32,
}
