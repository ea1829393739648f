//! Calls between ranks.

pub(crate) mod bytes;
pub(crate) mod calls;
pub(crate) mod handshake;
pub(crate) mod scatter;
pub(crate) mod segment_calls;
pub(crate) mod shard_groups;
pub(crate) mod slices;
pub(crate) mod sums;
pub(crate) mod texts;
