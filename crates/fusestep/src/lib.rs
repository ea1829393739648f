#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub use fusestep_adagrad::{self as adagrad, Adagrad, AdagradTensors};
pub use fusestep_amp as amp;
pub use fusestep_coalesce as coalesce;
pub use fusestep_cpu::{CpuBackend, LentPiece};
pub use fusestep_cuda::{CudaBackend, DeviceInfo};
pub use fusestep_fused_adam::{self as fused_adam, Adam, AdamError, AdamTensors, SecondMoment};
pub use fusestep_fused_sgd::{self as fused_sgd, Nesterov, Sgd, SgdTensors, StepError};
pub use fusestep_lamb::{self as lamb, Lamb, LambError, LambTensors};
pub use fusestep_lars_momentum::{self as lars_momentum, Excluded, Lars, LarsError, LarsTensors};
pub use fusestep_launch::{
    self as launch, Backend, BackendError, LaunchLimits, Master, Objective, Precision, Rounding,
    StateDType, WeightDecay,
};
pub use fusestep_lion::{self as lion, Lion, LionTensors};
pub use fusestep_planner::{
    self as planner, ClipByGlobalNorm, GradReport, LossScale, LossScaling, Note, Optimizer, Plan,
    PlanError, Planner, State, StepReport, Tensors, UpdateNorms, Verdict,
};
pub use fusestep_simd::{self as simd, Level, Team};
pub use fusestep_tensor::{self as tensor, DType, ParamDesc, Role, Shape, TensorError, Trust};
pub use fusestep_tensor_file::{self as tensor_file, TensorFile, TensorFileError};
