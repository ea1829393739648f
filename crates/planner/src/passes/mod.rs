//! Rewrites of a plan, one file each.

use std::fmt;

use crate::{Plan, PlanError, Result};

mod accumulate;
mod clip;
mod coalesce_gradients;
mod distributed;
mod fuse_all_reduce;
mod fuse_broadcast;
mod fuse_optimizer;
pub(crate) mod fuse_reduce_into_update;
mod local_sgd;
mod loss_scaling;
mod shard;
mod update_in_backward;
mod update_norms;

pub use accumulate::{Accumulated, GradientAccumulation, ReducedWhen};
pub use clip::ClipByGlobalNorm;
pub use coalesce_gradients::CoalesceGradients;
pub use distributed::Distributed;
pub use fuse_all_reduce::{FuseAllReduce, Oversize};
pub use fuse_broadcast::FuseBroadcast;
pub use fuse_optimizer::FuseOptimizer;
pub use fuse_reduce_into_update::FuseReduceIntoUpdate;
pub use local_sgd::{Averaged, Interval, LocalSgd};
pub use loss_scaling::LossScaling;
pub use shard::{Ownership, Shard, ZeroStage};
pub use update_in_backward::UpdateInBackward;
pub use update_norms::UpdateNorms;

/// What a pass rewrites. Passes apply in this order, and in that in which they were given where
/// they rewrite the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ActsOn {
    /// How tensors are laid out and launched.
    Launches,
    /// Which tensors each rank has for itself.
    Distributed,
    /// What is done to all gradients together.
    Gradients,
    /// What ranks share out.
    Ranks,
    /// What goes into one call.
    Buckets,
    /// Stages that become one.
    Fusion,
    /// What runs while a backward pass does.
    Backward,
}

/// A rewrite of a plan: how a step runs, never its bits. Only [`ClipByGlobalNorm`],
/// [`LossScaling`], [`GradientAccumulation`] and [`LocalSgd`] add to the arithmetic.
///
/// A pass writes a [`crate::Note`] for everything it does, splits, skips or refuses. A refusal is
/// no error: the plan stays as it was and says why.
pub trait Pass: fmt::Debug + Send + Sync {
    /// The pass's name in notes.
    const NAME: &'static str;
    /// What the pass decides.
    const ACTS_ON: ActsOn = ActsOn::Launches;

    /// Rewrites `plan`.
    ///
    /// # Errors
    /// If the rewritten plan could not be run: limits too small, a layout too long.
    fn apply(&self, plan: &mut Plan) -> Result<()>;
}

/// A pass of any type, as a planner keeps it.
pub(crate) trait AnyPass: fmt::Debug + Send + Sync {
    fn acts_on(&self) -> ActsOn;

    /// [`Pass::apply`].
    fn rewrite(&self, plan: &mut Plan) -> Result<()>;
}

impl<P: Pass> AnyPass for P {
    fn acts_on(&self) -> ActsOn {
        P::ACTS_ON
    }

    fn rewrite(&self, plan: &mut Plan) -> Result<()> {
        self.apply(plan)
    }
}

fn refuse_twice(pass: &'static str, is_there: bool) -> Result<()> {
    if is_there { Err(PlanError::PassTwice { pass }) } else { Ok(()) }
}
