#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod config;
mod cpu;
pub mod device;
pub mod reference;

pub use config::{AmpError, Finding, LossScale, MaxNorm, ScalePolicy};
pub use cpu::{GradientRule, NormKernel, norm_kernel};
