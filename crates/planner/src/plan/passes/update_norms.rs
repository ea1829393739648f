//! Pass `update_norms`: how far each parameter moves in a step, measured by the update itself.

use crate::error::Result;
use crate::plan::note::Verdict;
use crate::plan::passes::rewrite::{Rewrite, refuse_twice};
use crate::plan::value::Plan;

/// Measures ‖new − old‖ of every parameter as the update writes it:
/// [`crate::StepReport::update_norm`] for all of them together, [`crate::State::update_norms`] for
/// each. Together with ‖parameter‖ it tells whether a learning rate is too high, and which
/// tensors stand still.
///
/// ```text
/// norm = √(Σ (new − old)²)    in f64, of the parameter as it is stored,
///                             or of its master where it has one
/// ```
/// The sum follows the fixed tree of docs/numerics.md, so it has the same bits whatever the
/// threads, caps or backend. Of a step that is skipped it is 0, of a parameter that took no part as
/// well.
///
/// # Cost
/// No memory traffic besides 64 bytes for each 65,536 elements: what the sum needs is at hand. Its
/// arithmetic hides behind memory with f32; where parameters and state are all bf16, a step on the
/// host takes half as long again (docs/measurements.md). Chunks are of 65,536 elements whatever
/// the limits, and tables are resident unless the caller lends tensors. A step waits for a device
/// to read the sums, unless it is enqueued ([`crate::RunAlone::enqueue`]).
#[derive(Clone, Copy, Debug)]
pub struct UpdateNorms;

impl Rewrite for UpdateNorms {
    const NAME: &'static str = "update_norms";

    fn apply(&self, plan: &mut Plan) -> Result<()> {
        refuse_twice(Self::NAME, plan.update_norms)?;
        plan.update_norms = true;
        let reason = "updates sum the squares of what they change, as they write it";
        plan.note(Self::NAME, Verdict::Applied, reason);
        Ok(())
    }
}
