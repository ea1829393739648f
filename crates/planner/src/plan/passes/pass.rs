//! Rewrites of a plan, one file each.

use std::fmt;

use crate::error::{PlanError, Result};
use crate::plan::value::Plan;

/// The part of a plan that a pass rewrites. Passes apply in this order; passes that rewrite the
/// same part apply in the order in which they were given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ActsOn {
    /// Layout of tensors and launches.
    Launches,
    /// Tensors that each rank has for itself.
    Distributed,
    /// Work on all gradients together.
    Gradients,
    /// Tensors that ranks share out.
    Ranks,
    /// Gradients of one call.
    Buckets,
    /// Stages that become one.
    Fusion,
    /// Updates that run beside a backward pass.
    Backward,
}

/// A rewrite of a plan: how a step runs, never its bits. Only
/// [`ClipByGlobalNorm`](crate::ClipByGlobalNorm), [`LossScaling`](crate::LossScaling),
/// [`GradientAccumulation`](crate::GradientAccumulation) and [`LocalSgd`](crate::LocalSgd) add to
/// the arithmetic.
///
/// A pass writes a [`crate::Note`] for everything it does, splits, skips or refuses. A refusal is
/// no error: the plan stays as it was and says why.
pub trait Pass: fmt::Debug + Send + Sync {
    /// The pass's name in notes.
    const NAME: &'static str;
    /// The part of a plan that the pass rewrites.
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

    /// Rewrites a plan by [`Pass::apply`].
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

pub(crate) fn refuse_twice(pass: &'static str, is_there: bool) -> Result<()> {
    if is_there { Err(PlanError::PassTwice { pass }) } else { Ok(()) }
}
