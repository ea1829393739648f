//! Rewrites of a plan, one file each.

use std::fmt;

use crate::{Plan, PlanError};

mod clip;
mod coalesce_gradients;
mod distributed;
mod fuse_all_reduce;
mod fuse_broadcast;
mod fuse_optimizer;
mod gradient_merge;
mod local_sgd;
mod loss_scaling;
mod shard;
mod update_norms;

pub use clip::ClipByGlobalNorm;
pub use coalesce_gradients::CoalesceGradients;
pub use distributed::Distributed;
pub use fuse_all_reduce::{FuseAllReduce, Oversize};
pub use fuse_broadcast::FuseBroadcast;
pub use fuse_optimizer::FuseOptimizer;
pub use gradient_merge::{GradientMerge, Merged, Reduced};
pub use local_sgd::{Averaged, Interval, LocalSgd};
pub use loss_scaling::LossScaling;
pub use shard::{Shard, Zero};
pub use update_norms::UpdateNorms;

/// What a pass decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActsOn {
    /// How the tensors of one rank are laid out and launched.
    Launches,
    /// What is done to all gradients together, those of all shards.
    Gradients,
    /// What ranks hold and send; only [`crate::Planner::plan_for`] obeys it.
    Ranks,
}

/// A rewrite of a plan: how a step runs, never its bits. Only [`ClipByGlobalNorm`], [`LossScaling`],
/// [`GradientMerge`] and [`LocalSgd`] add to the arithmetic.
///
/// A pass writes a [`crate::Note`] for everything it does, splits, skips or refuses. A refusal is no error: the plan stays as it
/// was and says why.
pub trait Pass: fmt::Debug + Send + Sync {
    /// The pass's name in notes.
    fn name(&self) -> &'static str;

    /// What the pass decides.
    fn acts_on(&self) -> ActsOn {
        ActsOn::Launches
    }

    /// Rewrites `plan`.
    ///
    /// # Errors
    /// If the rewritten plan could not be run: limits too small, a layout too long.
    fn apply(&self, plan: &mut Plan) -> Result<(), PlanError>;
}
