#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod coded;
pub mod reference;
mod rule;
mod slices;

pub use coded::CodedLambTensors;
pub use fusestep_elementwise::StepError;
pub use fusestep_elementwise::coded::{CodedState, ParamSlices, units_of};
pub use fusestep_launch::Excluded;
pub use fusestep_tensor::Trust;
pub use rule::Lamb;
pub use slices::LambTensors;
