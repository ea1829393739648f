#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod arena;
#[cfg(any(test, feature = "buffer"))]
mod buffer;
mod layout;
mod memory;

pub use arena::Coalesced;
pub use layout::{CoalesceError, FlatLayout, LayoutOptions, SLOT_BYTES};
pub use memory::{HUGE_PAGE_BYTES, HostMemory, MemoryOwner, zeroed_bytes};
