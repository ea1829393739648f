#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod backend;
mod borrowed;
mod borrowed_gradients;
mod buffer;
mod cached;
mod call;
mod chunks;
mod errors;
mod leaves;
mod measured;
mod param_sums;
mod pieces;
mod reduced;
mod tensors;
mod update_sums;
mod window;

pub use backend::CpuBackend;
pub use borrowed::{BorrowedPiece, Lend};
pub use borrowed_gradients::{BorrowedGradient, LendGradient};
pub use measured::LendRead;
