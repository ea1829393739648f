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
mod options;
pub mod parallel;
mod params;
mod planning;
mod ranked;
mod variables;

pub use error::AdapterError;
pub use fused::{Fused, Report};
pub use fusestep_adagrad::Adagrad as ParamsAdagrad;
pub use fusestep_collective::{Communicator, Solo};
pub use fusestep_fused_sgd::{Nesterov, Sgd as ParamsSgd};
pub use fusestep_lamb::Lamb as ParamsLamb;
pub use fusestep_lars_momentum::Lars as ParamsLars;
pub use fusestep_launch::{
    Excluded, Master, Objective, Precision, Rounding, StateDType, WeightDecay,
};
pub use fusestep_lion::Lion as ParamsLion;
pub use fusestep_planner::{LossScale, Phase, ScalePolicy, Schedule};
pub use fusestep_rmsprop::{Centering, RmsProp as ParamsRmsProp};
pub use fusestep_schedule_free::ScheduleFree as ParamsScheduleFree;
pub use group::ParamGroup;
pub use options::{Fusion, Initial, Options};
pub use params::Params;
pub use ranked::Ranked;
pub use variables::IntoVariables;

/// AdamW: a drop-in for [`candle_nn::AdamW`].
pub type AdamW = Fused<candle_nn::ParamsAdamW>;

/// SGD, with momentum, Nesterov, dampening and decay where [`candle_nn::SGD`] has a learning rate.
pub type Sgd = Fused<ParamsSgd>;

/// Lion.
pub type Lion = Fused<ParamsLion>;

/// Adagrad.
pub type Adagrad = Fused<ParamsAdagrad>;

/// RMSprop.
pub type RmsProp = Fused<ParamsRmsProp>;

/// Schedule-Free AdamW.
pub type ScheduleFree = Fused<ParamsScheduleFree>;

/// LARS: momentum with a rate for each layer.
pub type Lars = Fused<ParamsLars>;

/// LAMB: Adam with a rate for each layer.
pub type Lamb = Fused<ParamsLamb>;

/// Whatever rule the planner knows, chosen as the program runs.
pub type AnyRule = Fused<fusestep_planner::Optimizer>;
