#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod config;
mod cpu;
pub mod device;
pub mod reference;
mod slices;

pub use config::{Adam, SecondMoment};
pub use cpu::AdamKernel;
pub use fusestep_elementwise::StepError;
pub use fusestep_launch::{Objective, WeightDecay};
pub use slices::AdamTensors;
