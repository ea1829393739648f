#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub use fusestep_coalesce as coalesce;
pub use fusestep_cpu::{CpuBackend, LentPiece};
pub use fusestep_cuda::{CudaBackend, DeviceInfo};
pub use fusestep_fused_adam::{
    self as fused_adam, Adam, AdamError, AdamTensors, Objective, SecondMoment, WeightDecay,
};
pub use fusestep_lamb::{self as lamb, Lamb, LambError, LambTensors};
pub use fusestep_lars_momentum::{self as lars_momentum, Excluded, Lars, LarsError, LarsTensors};
pub use fusestep_launch::{self as launch, Backend, BackendError, LaunchLimits};
pub use fusestep_planner::{
    self as planner, Note, Optimizer, Plan, PlanError, Planner, State, StepReport, Tensors, Verdict,
};
pub use fusestep_simd::{self as simd, Level, Team};
pub use fusestep_tensor::{self as tensor, DType, ParamDesc, Role, Shape, TensorError, Trust};
pub use fusestep_tensor_file::{self as tensor_file, TensorFile, TensorFileError};
