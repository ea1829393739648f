//! Backend of fusestep on host memory: SIMD kernels on a team of threads.
#![forbid(unsafe_code)]

mod backend;
mod pieces;

pub use backend::CpuBackend;
