#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod absorb;
mod allocate;
mod arena;
mod average;
mod averages;
mod batches;
mod bucket;
mod bytes;
mod calls;
mod checkpoint;
mod comms;
mod cost;
mod device_norm;
mod device_params;
mod device_trust;
mod display;
mod enqueue;
mod error;
mod exchange;
mod finish;
mod gather;
mod gradient_memory;
mod gradients;
mod group;
mod handshake;
mod html;
mod in_backward;
mod launches;
mod leaves;
mod master;
mod norm;
mod optimizer;
mod passes;
mod plan;
mod planner;
mod prefetch;
mod rank_summary;
mod ready;
mod reduce;
mod region;
mod replaced_rule;
mod report;
mod run;
mod segment_calls;
mod shard_groups;
mod stage;
mod state;
mod step;
mod storage;
mod summary;
mod table;
mod tensors;
mod topology;
mod update_norms;
mod wanted;

pub use bucket::{Bucket, MAX_BUCKETS, Segment};
pub use calls::{CallPurpose, PlannedCall};
pub use checkpoint::{
    BorrowedParams, CheckpointFolder, Checkpoints, FolderLock, MAX_SHARDS, Manifest, OpenRun,
    OpenWindow, Remembered, RunToSave, Saved, Saves, ShardSpec, StateTensors, TensorSpec, Verified,
    WholeTensors,
};
pub use comms::Comms;
pub use cost::{CostModel, Event, EventKind};
pub use device_params::DeviceParams;
pub use enqueue::{RankGraph, StepGraph};
pub use error::PlanError;
pub(crate) use error::Result;
pub use fusestep_amp::{AmpError, LossScale, ScalePolicy};
pub use fusestep_launch::Precision;
pub use fusestep_schedule::{Phase, Schedule, ScheduleError};
pub use gather::GatheredParams;
pub use group::SizeClass;
pub use html::html_page;
pub use optimizer::Optimizer;
pub(crate) use optimizer::Precisions;
pub use passes::{
    Accumulated, ActsOn, Averaged, ClipByGlobalNorm, CoalesceGradients, Distributed, FuseAllReduce,
    FuseBroadcast, FuseOptimizer, FuseReduceIntoUpdate, GradientAccumulation, Interval, LocalSgd,
    LossScaling, Oversize, Ownership, Pass, ReducedWhen, Shard, UpdateInBackward, UpdateNorms,
    ZeroStage,
};
pub use plan::Plan;
pub use planner::{Planner, Tensors};
pub use prefetch::PendingGather;
pub use rank_summary::{RankBytes, RankSummary};
pub use report::{GradReport, MicroStepReport, StepReport};
pub use run::Lender;
pub use stage::{
    Accumulate, Broadcast, Extent, Gather, GradientRead, Norm, Optimize, ParameterGroup, Part,
    Reduce, Reduced, Stage, StorageSpec, When,
};
pub use state::{MAX_STEPS, State};
pub use summary::{Note, PlanSummary, Verdict};
pub use table::TableKind;
pub use topology::{MAX_WORLD, Reach, Topology};
