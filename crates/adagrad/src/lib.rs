#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod coded;
pub mod reference;
mod rule;
mod slices;

pub use coded::CodedAdagradTensors;
pub use fusestep_elementwise::StepError;
pub use fusestep_elementwise::coded::{CodedState, ParamSlices, units_of};
pub use fusestep_launch::Objective;
pub use rule::Adagrad;
pub use slices::AdagradTensors;
