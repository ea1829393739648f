#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod backend;
mod backend_error;
mod batch;
mod buffer;
mod control;
mod error;
mod format;
mod gradient_sums;
mod host;
mod kernel;
mod launch;
mod leaves;
mod limits;
mod normed;
mod pack;
mod precision;
pub mod random_bits;
mod reduction;
mod resident;
mod rule;
mod rule_error;
mod settings;
mod step_scalars;
mod tensor_list;
mod tree_sum;
mod update_sums;

pub use backend::{
    Backend, DeviceBackend, DeviceStream, DeviceSums, HostLaunches, Launches, Memory, Tables,
};
pub use backend_error::BackendError;
pub use batch::{Batch, Batchable, MAX_LAUNCHES, Record, batches, merged};
pub use buffer::Buffer;
pub use control::{CONTROL_BYTES, ControlBlock, Gate};
pub use error::LaunchError;
pub use format::{FLAG_STOCHASTIC, FLAG_WIDE_GRADS, Format, KEY_BYTES, Layout, ORIGIN_WORDS};
pub use gradient_sums::{Accumulate, Accumulation};
pub use host::{
    ACROSS_BYTES, AcrossRanks, CHUNK_LEAVES, HostCall, HostList, HostRun, HostSpan, HostSpans,
    LEAF_ELEMENTS, LeafSums, MAX_LISTS, Places,
};
pub use kernel::MultiTensorKernel;
pub use launch::{Launch, LaunchReport, Replicas, Replicated, SumsOfRanks};
pub use leaves::{ChunkSums, FoldLeaves, LeafSquares, TensorSums, leaf_place};
pub use limits::{
    ARGUMENT_BYTES_CLASSIC, ARGUMENT_BYTES_LARGE, ArgumentLayout, CHUNK_ELEMENTS, HEADER_BYTES,
    LaunchLimits,
};
pub use normed::{
    CHUNK_UNITS, Excluded, FINISHED_BYTES, MAX_SUMS, NormedKernel, Outcome, ROW_VALUES,
    SumsAndUpdate, WORKSPACE_BYTES, Workspace,
};
pub use pack::{
    Addresses, CONCLUSION_BYTES, pack, pack_conclusion, pack_reduction, pack_reduction_of_tensors,
    pack_tensors, pack_update_sums,
};
pub use precision::{GradDType, Master, Precision, Rounding, StateDType};
pub use reduction::{
    Conclude, ControlRule, MultiTensorReduction, Reduce, SquareSum, TensorPartials,
};
pub use resident::{
    FLAG_RESIDENT, GROUP_BYTES, Graph, ResidentTable, STEPS_BYTES, pack_launch_of_table,
    pack_reduction_table, pack_reduction_table_of_tensors, pack_steps, pack_table,
    pack_table_of_tensors, resident_step_scalars,
};
pub use rule::{Domain, Objective, UpdateRule, WeightDecay, check_hyper, check_width, tuned};
pub use rule_error::RuleError;
pub use settings::{Setting, SettingValue, Settings, Switch};
pub use step_scalars::{GroupValues, HYPER_VALUES, ResidentStepScalars};
pub use tensor_list::{Access, ListBuffer, Stride, TensorList};
pub use tree_sum::{Summand, TREE_WIDTH, tree_sum};
pub use update_sums::{ChangedRecord, UnitSums, UpdateSums, fold_units};
