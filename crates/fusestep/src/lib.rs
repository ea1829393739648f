#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod builder;
mod device;
mod figures;
mod options;
mod session;
mod threads;
mod world;

pub use builder::*;
pub use device::{Cpu, Device, SharedBackend};
pub use figures::{FIGURES_VARIABLE, Figures, FiguresError, ThreadFigures, WorldFigures};
#[cfg(feature = "adagrad")]
pub use fusestep_adagrad::{self as adagrad, AdagradTensors};
#[cfg(feature = "adamax")]
pub use fusestep_adamax::{self as adamax, AdamaxTensors};
pub use fusestep_amp as amp;
pub use fusestep_checkpoint::{self as checkpoint, Checkpoints, Saved};
pub use fusestep_coalesce as coalesce;
pub use fusestep_collective::{self as collective, Communicator};
pub use fusestep_cpu::{BorrowedPiece, CpuBackend};
#[cfg(feature = "cuda")]
pub use fusestep_cuda::{CudaBackend, DeviceInfo};
pub use fusestep_fused_adam::{self as fused_adam, AdamTensors, MixedAdamTensors, SecondMoment};
#[cfg(feature = "sgd")]
pub use fusestep_fused_sgd::{self as fused_sgd, Nesterov, SgdTensors, StepError};
#[cfg(feature = "lamb")]
pub use fusestep_lamb::{self as lamb, LambTensors};
#[cfg(feature = "lars")]
pub use fusestep_lars_momentum::{self as lars_momentum, Excluded, LarsTensors};
pub use fusestep_launch::{
    self as launch, Backend, BackendError, LaunchLimits, Master, Objective, Precision, Rounding,
    StateDType, WeightDecay,
};
#[cfg(feature = "lion")]
pub use fusestep_lion::{self as lion, LionTensors};
#[cfg(feature = "nadam")]
pub use fusestep_nadam::{self as nadam, NAdamTensors};
pub use fusestep_planner::{
    self as planner, ClipByGlobalNorm, DeviceParams, Distributed, GatheredParams, GradMut,
    GradReport, Initial, LossScale, LossScaling, MicroStepReport, Note, Optimizer, Phase, Plan,
    PlanError, Planner, ReduceDType, Run, RunAlone, Schedule, StageSeconds, State, StepReport,
    Tensors, UpdateNorms, Verdict,
};
#[cfg(feature = "rmsprop")]
pub use fusestep_rmsprop::{self as rmsprop, Centering, RmsPropTensors};
#[cfg(feature = "schedule-free")]
pub use fusestep_schedule_free::{self as schedule_free, ScheduleFreeTensors};
pub use fusestep_simd::{self as simd, Level, Pool, Team};
pub use fusestep_tensor::{self as tensor, DType, ParamDesc, Role, Shape, TensorError, Trust};
pub use fusestep_tensor_file::{self as tensor_file, TensorFile, TensorFileError};
pub use options::{
    Alone, Changed, Chosen, Conflict, Named, Names, Need, OfParams, OptionError, Overlap, OwnRule,
    Pattern, PrecisionOf, RankCores, Row, Section, StepOptions, Visit, overlaps,
};
pub use session::{Borrowed, Report, Session, SessionError};
pub use threads::threads;
pub use world::world;
#[cfg(feature = "nccl")]
pub use world::world_on_gpus;

/// Whatever went wrong, here or in the caller's own part of a rank.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
