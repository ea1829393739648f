//! A training step planned once and run many times.
//!
//! Parameter descriptors become a naive [`Plan`], one launch per tensor; passes rewrite it and write down what they did, why they
//! split and why they refused ([`Note`]). A plan is an ordinary value: print it, compare it, cost it, test it without a device.
//! [`Plan::allocate`] makes the [`State`] it runs on, [`Plan::run`] runs one step; naive and rewritten plans run in the same loop.
#![forbid(unsafe_code)]

mod checkpoint;
mod display;
mod error;
mod explain;
mod group;
mod html;
mod master;
mod norm;
mod optimizer;
mod passes;
mod plan;
mod planner;
mod precision;
mod ranks;
mod report;
mod run;
mod stage;
mod state;
mod storage;
mod table;
mod update_norms;

pub use checkpoint::StateTensors;
pub use error::PlanError;
pub use explain::{Note, Verdict};
pub use fusestep_amp::{AmpError, LossScale, ScalePolicy};
pub use fusestep_launch::Precision;
pub use group::SizeClass;
pub use html::html_page;
pub use optimizer::Optimizer;
pub use passes::{
    ActsOn, Averaged, ClipByGlobalNorm, CoalesceGradients, Distributed, FuseAllReduce,
    FuseBroadcast, FuseOptimizer, GradientMerge, Interval, LocalSgd, LossScaling, Merged, Oversize,
    Pass, Reduced, Shard, UpdateNorms, Zero,
};
pub use plan::{Plan, PlanSummary};
pub use planner::{Planner, Tensors};
pub(crate) use precision::Precisions;
pub use ranks::{
    BroadcastGroup, Bucket, Comms, CostModel, Event, EventKind, Flat, FolderLock, GatheredParams,
    Held, Manifest, OpenRun, OpenWindow, Ownership, PendingGather, Piece, RankPlan, RankReport,
    RankState, RankSummary, ShardSpec, Span, TensorSpec, Topology, WholeTensors, groups_by_layer,
    owners_greedy_even, owners_in_use_order,
};
pub use report::{GradReport, StepReport};
pub use run::Lender;
pub use stage::{GradientRead, HyperClass, Norm, Optimize, Stage, StorageSpec};
pub use state::State;
pub use table::{StepGraph, TableKind};
