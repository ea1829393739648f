#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod arena;
mod layout;

pub use arena::{Coalesced, HostMemory};
pub use layout::{CoalesceError, FlatLayout, LayoutOptions, SLOT_BYTES};
