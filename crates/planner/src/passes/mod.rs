//! Rewrites of a plan, one file each.

use std::fmt;

use crate::{Plan, PlanError};

mod clip;
mod coalesce_gradients;
mod fuse_optimizer;
mod loss_scaling;

pub use clip::ClipByGlobalNorm;
pub use coalesce_gradients::CoalesceGradients;
pub use fuse_optimizer::FuseOptimizer;
pub use loss_scaling::LossScaling;

/// A rewrite of a plan: how a step runs, never its bits. Only [`ClipByGlobalNorm`] and [`LossScaling`] add to the arithmetic.
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
