#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod coded;
pub mod reference;
mod rule;
mod slices;

pub use coded::CodedSgdTensors;
pub use fusestep_elementwise::StepError;
pub use fusestep_elementwise::coded::{CodedState, ParamSlices, units_of};
pub use fusestep_launch::{Objective, WeightDecay};
pub use rule::{Nesterov, Sgd};
pub use slices::SgdTensors;
