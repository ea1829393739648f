#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod coded;
pub mod reference;
mod rule;
mod slices;

pub use coded::CodedAdamTensors;
pub use fusestep_elementwise::StepError;
pub use fusestep_elementwise::coded::{
    CodedError, CodedState, Coding, Dither, ParamSlices, decode, encode, units_of,
};
pub use fusestep_elementwise::mixed::{
    BiasCorrection, Floats, FloatsMut, MixedStep, StateMut, square_sums,
};
pub use fusestep_launch::{Objective, WeightDecay};
pub use rule::{Adam, SecondMoment};
pub use slices::{AdamBefore, AdamTensors, MixedAdamTensors};
