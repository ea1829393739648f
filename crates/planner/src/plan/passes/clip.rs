//! Pass `clip_by_global_norm`: gradients times one factor, so that their common norm stays below a
//! limit.

use fusestep_amp::MaxNorm;

use crate::error::Result;
use crate::plan::note::Verdict;
use crate::plan::passes::rewrite::{ActsOn, Rewrite, refuse_twice};
use crate::plan::value::Plan;

/// Multiplies all gradients of a step by min(1, max_norm / (norm + 1e-6)), where norm is that of
/// all of them together.
///
/// The factor is formed in f64 and rounded once to each update's type; the update multiplies by it
/// as it reads the gradient, so nothing is written besides. A step whose gradients are not all
/// finite is skipped.
///
/// # Cost
/// One more read of the gradients.
/// # Source
/// Pascanu, Mikolov & Bengio 2013, arXiv:1211.5063; PyTorch's `clip_grad_norm_`.
#[derive(Clone, Copy, Debug)]
pub struct ClipByGlobalNorm {
    max_norm: f64,
}

impl ClipByGlobalNorm {
    /// Clips to this norm, which is checked when the plan is made.
    pub fn new(max_norm: f64) -> Self {
        Self { max_norm }
    }
}

impl Rewrite for ClipByGlobalNorm {
    const NAME: &'static str = "clip_by_global_norm";
    const ACTS_ON: ActsOn = ActsOn::Gradients;

    fn apply(&self, plan: &mut Plan) -> Result<()> {
        let max_norm = MaxNorm::new(self.max_norm)?;
        refuse_twice(Self::NAME, plan.gradients.max_norm.is_some())?;
        plan.gradients.max_norm = Some(max_norm);
        let reason = format!(
            "gradients of a norm above {} are multiplied by {} / (norm + 1e-6) as the update \
             reads them",
            self.max_norm, self.max_norm
        );
        plan.note(Self::NAME, Verdict::Applied, reason);
        Ok(())
    }
}
