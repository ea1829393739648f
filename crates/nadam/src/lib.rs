#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod reference;
mod rule;
mod slices;

pub use fusestep_elementwise::StepError;
pub use fusestep_launch::{Objective, WeightDecay};
pub use rule::NAdam;
pub use slices::NAdamTensors;
