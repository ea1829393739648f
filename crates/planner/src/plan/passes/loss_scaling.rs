//! Pass `loss_scaling`: gradients of a scaled loss, with the scale taken out and steps that
//! overflowed skipped.

use fusestep_amp::LossScale;

use crate::error::Result;
use crate::plan::note::Verdict;
use crate::plan::passes::rewrite::{ActsOn, Rewrite, refuse_twice};
use crate::plan::value::Plan;

/// Divides all gradients of a step by the loss scale, and skips the step if one of them is infinite
/// or NaN: nothing is written then, step counts included, and a dynamic scale goes down.
///
/// The factor a loss is to be multiplied with is [`crate::State::loss_scale`]. The scale is a power
/// of two, so taking it out is exact. It is part of the factor that the update multiplies by;
/// gradients are not written.
///
/// # Cost
/// One more read of the gradients.
#[derive(Clone, Copy, Debug)]
pub struct LossScaling {
    scale: Scale,
}

#[derive(Clone, Copy, Debug)]
enum Scale {
    Of(LossScale),
    Fixed(f64),
}

impl LossScaling {
    /// PyTorch's defaults: 65,536, doubled after 2,000 good steps, halved after a bad one.
    pub fn dynamic() -> Self {
        Self::from(LossScale::dynamic())
    }

    /// A scale that never changes; it is checked when the plan is made.
    pub fn fixed(scale: f64) -> Self {
        Self { scale: Scale::Fixed(scale) }
    }

    /// The scale as a value.
    ///
    /// # Errors
    /// [`fusestep_amp::AmpError::PowerOfTwo`] for a fixed scale that is no power of two.
    pub fn scale(&self) -> Result<LossScale> {
        match self.scale {
            Scale::Of(scale) => Ok(scale),
            Scale::Fixed(scale) => Ok(LossScale::fixed(scale)?),
        }
    }
}

/// A scale with a policy of one's own.
impl From<LossScale> for LossScaling {
    fn from(scale: LossScale) -> Self {
        Self { scale: Scale::Of(scale) }
    }
}

impl Rewrite for LossScaling {
    const NAME: &'static str = "loss_scaling";
    const ACTS_ON: ActsOn = ActsOn::Gradients;

    fn apply(&self, plan: &mut Plan) -> Result<()> {
        let scale = self.scale()?;
        refuse_twice(Self::NAME, plan.gradients.loss_scale.is_some())?;
        plan.gradients.loss_scale = Some(scale);
        let policy = scale.policy();
        let changes =
            if policy.is_fixed() { "and stays so".to_owned() } else { policy.to_string() };
        let reason = format!(
            "the loss is multiplied by {}, {changes}; a step with a gradient that is not finite \
             is skipped",
            scale.scale()
        );
        plan.note(Self::NAME, Verdict::Applied, reason);
        Ok(())
    }
}
