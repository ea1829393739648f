//! Run-time SIMD dispatch, conversions of 16-bit floats, prefetch, a thread team, memory streams
//! and a stopwatch.
//!
//! Kernel bodies are ordinary Rust loops over fixed-size blocks; [`Level::run`] compiles them once
//! per instruction set and calls the widest that the processor has. Rust neither contracts nor
//! reassociates floating-point operations, so every level gives the same bits. This is the only
//! crate of the CPU path that holds `unsafe` code: a prefetch hint, stores past the caches, a look
//! at the processor's counter, the hand-over of a borrowed closure to the threads of a [`Team`],
//! and the lending of slices between threads at a [`Rendezvous`].
#![deny(unsafe_op_in_unsafe_fn)]

mod copy;
mod level;
mod narrow;
mod notifier;
mod prefetch;
mod rendezvous;
#[cfg(test)]
mod rendezvous_tests;
mod stopwatch;
mod stream;
mod sync;
mod team;

pub use copy::{StreamingCopies, copy_bytes, streaming};
pub use level::{Level, LevelError};
pub use narrow::{
    join_bf16, narrow_bf16, narrow_bf16_at_random, narrow_bf16_pair, narrow_bf16_pair_at_random,
    narrow_f16, split_bf16, widen_bf16, widen_bf16_pair, widen_f16,
};
pub use prefetch::{prefetch_ahead, prefetch_bytes};
pub use rendezvous::{
    Claim, Contribution, MAX_REPLICAS, Participant, Peers, Rendezvous, Replicas, participants,
};
pub use stopwatch::Stopwatch;
pub use stream::{MAX_WRITTEN, PREFETCH_DISTANCES, stream};
pub use team::{MAX_SHARED, MAX_THREADS, Order, Split, Team};
