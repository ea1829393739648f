//! Memory of a call on the device.

use std::ops::Range;

use crate::driver::Address;

/// Addresses of a call's memory on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Memory {
    Same(Address),
    Two { send: Address, receive: Address },
}

impl Memory {
    /// Address of the input at an offset of the whole.
    pub(crate) fn input(self, start: usize) -> Address {
        let (Memory::Same(base) | Memory::Two { send: base, .. }) = self;
        base + start as u64
    }

    /// Address of the result at an offset of the whole.
    pub(crate) fn result(self, start: usize) -> Address {
        let (Memory::Same(base) | Memory::Two { receive: base, .. }) = self;
        base + start as u64
    }

    /// Address of the own block as input; an input buffer of its own holds this block alone.
    pub(crate) fn input_block(self, block: &Range<usize>) -> Address {
        match self {
            Memory::Same(base) => base + block.start as u64,
            Memory::Two { send, .. } => send,
        }
    }

    /// Address of the own block as result; a result buffer of its own holds this block alone.
    pub(crate) fn result_block(self, block: &Range<usize>) -> Address {
        match self {
            Memory::Same(base) => base + block.start as u64,
            Memory::Two { receive, .. } => receive,
        }
    }
}
