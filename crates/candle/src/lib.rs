#![doc = include_str!("../README.md")]
#![cfg_attr(not(feature = "cuda"), forbid(unsafe_code))]
#![cfg_attr(feature = "cuda", deny(unsafe_code))]

mod checkpoint;
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "handles of cudarc and addresses in candle's memory")]
mod cuda;
mod error;
mod evaluate;
mod fused;
mod gradients;
mod group;
mod lend;
mod memory;
mod optimizers;
pub mod parallel;
mod params;
mod slices;
mod start;
mod step;
mod variables;

pub use error::AdapterError;
pub use fused::Fused;
#[cfg(feature = "rmsprop")]
pub use fusestep::Centering;
#[cfg(feature = "sgd")]
pub use fusestep::Nesterov;
pub use fusestep::{
    Figures, FiguresError, OptionError, OwnRule, Report, StageSeconds, StepOptions as Options,
};
pub use fusestep_collective::{Communicator, Solo};
pub use fusestep_launch::{
    Excluded, Master, Objective, Precision, Rounding, StateDType, WeightDecay,
};
pub use fusestep_planner::{Initial, LossScale, Phase, ReduceDType, ScalePolicy, Schedule};
pub use group::group;
pub use optimizers::*;
pub use params::Params;
pub use variables::IntoVariables;

/// Optimizers may be built on one thread and stepped on another.
const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<AdamW>();
    is_send::<AnyRule>();
    is_send::<parallel::Group>();
};
