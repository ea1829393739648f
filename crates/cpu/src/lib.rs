//! Backend of fusestep on host memory: SIMD kernels on a team of threads.
#![forbid(unsafe_code)]

mod backend;
mod buffer;
mod carried;
mod chunks;
mod leaves;
mod lent;
mod lent_gradients;
mod pieces;
mod reduced;
mod tensors;
mod update_sums;
mod window;

pub use backend::CpuBackend;
pub use lent::{Lend, LentPiece};
pub use lent_gradients::{LendGradient, LentGradient};
