#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod config;
mod cpu;
pub mod device;
pub mod reference;
mod slices;

pub use config::{Adam, AdamError, Objective, SecondMoment, WeightDecay};
pub use cpu::AdamKernel;
pub use slices::AdamTensors;
