#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod error;
mod plan;
mod run;

pub use error::PlanError;
pub use fusestep_amp::{AmpError, LossScale, ScalePolicy};
pub use fusestep_launch::Precision;
pub use fusestep_schedule::{Phase, Schedule, ScheduleError};
pub use plan::bucket::{Bucket, Segment};
pub use plan::calls::{CallPurpose, PlannedCall};
pub use plan::cost::{CostModel, Event, EventKind};
pub use plan::group::{ParameterGroup, SizeClass};
pub use plan::lanes::{BegunLane, LaneSum, Lanes, OpenLanes};
pub use plan::note::{Note, Verdict};
pub use plan::page::html_page;
pub use plan::passes::buckets::MAX_BUCKETS;
pub use plan::passes::{
    ClipByGlobalNorm, CoalesceGradients, Distributed, FuseAllReduce, FuseBroadcast, FuseOptimizer,
    FuseReduceIntoUpdate, LossScaling, Pass, Shard, UpdateInBackward, UpdateNorms,
};
pub use plan::planner::Planner;
pub use plan::rank_summary::{RankBytes, RankSummary};
pub use plan::rule::{LEAST_INT8_ELEMENTS, NamedRule, Optimizer, in_f32, keeps_f32};
pub use plan::saved_settings::FIXED_SCALE;
pub use plan::settings::{
    Accumulated, Averaged, GradientAccumulation, Interval, LocalSgd, Oversize, Ownership,
    ReduceDType, ReducedWhen, TableKind, Tensors, ZeroStage,
};
pub use plan::stage::{
    Accumulate, Broadcast, Gather, GradientRead, Norm, Optimize, Reduce, Reduced, Stage, When,
};
pub use plan::storage::{Extent, Part, StorageSpec};
pub use plan::summary::PlanSummary;
pub use plan::topology::{Initial, MAX_WORLD, Reach, Topology};
pub use plan::value::Plan;
pub use run::alone::RunAlone;
pub use run::clock::StageSeconds;
pub use run::comms::calls::Comms;
pub use run::enqueued::EnqueuedStep;
pub use run::executor::{Brought, DerivedFrom, Lender, Sharing};
pub use run::graph::{RankGraph, StepGraph};
pub use run::image::borrowed::{BorrowedParams, RunToLoad, RunToSave};
pub use run::image::counts::RunCounts;
pub use run::image::rules::RulesImage;
pub use run::image::value::{List, ListImage, ParamImage, PartImage, RunImage};
pub use run::memory::device_params::DeviceParams;
pub use run::memory::gradient_view::GradMut;
pub use run::memory::state::{MAX_STEPS, State};
pub use run::prefetch::PendingGather;
pub use run::report::{GradReport, MicroStepReport, StepReport};
pub use run::run::Run;
pub use run::stages::gather::GatheredParams;
