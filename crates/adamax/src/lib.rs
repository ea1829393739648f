#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod reference;
mod rule;
mod slices;

pub use fusestep_elementwise::StepError;
pub use fusestep_launch::Objective;
pub use rule::Adamax;
pub use slices::AdamaxTensors;
