//! Run-time SIMD dispatch, prefetch, a thread team, memory streams and a stopwatch.
//!
//! Kernel bodies are ordinary Rust loops over fixed-size blocks; [`Level::run`] compiles them once per instruction set and
//! calls the widest that the processor has. Rust neither contracts nor reassociates floating-point operations, so every level
//! gives the same bits. This is the only crate of the CPU path that holds `unsafe` code: a prefetch hint, a look at the
//! processor's counter, the hand-over of a borrowed closure to the threads of a [`Team`], and the lending of slices between threads that [`Seat::meet`].
#![deny(unsafe_op_in_unsafe_fn)]

mod bell;
mod level;
mod meet;
#[cfg(test)]
mod meet_tests;
mod prefetch;
mod stopwatch;
mod stream;
mod sync;
mod team;

pub use level::{Level, LevelError};
pub use meet::{Meet, Offer, Peers, Seat, seats};
pub use prefetch::{prefetch_ahead, prefetch_bytes};
pub use stopwatch::Stopwatch;
pub use stream::{MAX_WRITTEN, PREFETCH_DISTANCES, stream};
pub use team::{MAX_SHARED, MAX_THREADS, Order, Split, Team};
