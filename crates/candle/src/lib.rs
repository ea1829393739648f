#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod error;
mod fused;
mod gradients;
mod params;
mod variables;

pub use error::AdapterError;
pub use fused::{Fused, Report};
pub use fusestep_fused_sgd::{Nesterov, Sgd as ParamsSgd};
pub use fusestep_launch::{Master, Objective, Precision, Rounding, StateDType, WeightDecay};
pub use fusestep_lion::Lion as ParamsLion;
pub use params::Params;
pub use variables::IntoVariables;

/// AdamW: a drop-in for [`candle_nn::AdamW`].
pub type AdamW = Fused<candle_nn::ParamsAdamW>;

/// SGD, with momentum, Nesterov, dampening and decay where [`candle_nn::SGD`] has a learning rate.
pub type Sgd = Fused<ParamsSgd>;

/// Lion.
pub type Lion = Fused<ParamsLion>;

/// Whatever rule the planner knows, chosen as the program runs.
pub type AnyRule = Fused<fusestep_planner::Optimizer>;
