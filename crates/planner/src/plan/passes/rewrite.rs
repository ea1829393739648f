//! Interface of passes.

use crate::error::{PlanError, Result};
use crate::plan::value::Plan;

/// The part of a plan that a pass rewrites. Passes apply in this order; passes that rewrite the
/// same part apply in the order in which they were given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ActsOn {
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

/// A rewrite of a plan ([`crate::Pass`]).
pub(crate) trait Rewrite {
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

pub(crate) fn refuse_twice(pass: &'static str, is_there: bool) -> Result<()> {
    if is_there { Err(PlanError::PassTwice { pass }) } else { Ok(()) }
}
