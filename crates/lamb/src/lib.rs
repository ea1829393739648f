#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod reference;
mod rule;
mod slices;

pub use fusestep_elementwise::StepError;
pub use fusestep_launch::Excluded;
pub use fusestep_tensor::Trust;
pub use rule::Lamb;
pub use slices::LambTensors;
