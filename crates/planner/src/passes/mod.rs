//! Rewrites of a plan, one file each.

use std::fmt;

use crate::{Plan, PlanError};

mod coalesce_gradients;
mod fuse_optimizer;

pub use coalesce_gradients::CoalesceGradients;
pub use fuse_optimizer::FuseOptimizer;

/// A rewrite of a plan that changes how a step runs and never its bits.
///
/// A pass writes a [`crate::Note`] for everything it does, splits, skips or refuses. A refusal is no error: the plan stays as it
/// was and says why.
pub trait Pass: fmt::Debug + Send + Sync {
    /// The pass's name in notes.
    fn name(&self) -> &'static str;

    /// Rewrites `plan`.
    ///
    /// # Errors
    /// If the rewritten plan could not be run: limits too small, a layout too long.
    fn apply(&self, plan: &mut Plan) -> Result<(), PlanError>;
}
