//! What one step did.

use serde::Serialize;

/// What one step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StepReport {
    /// The state's step after this one; a skipped step is not counted.
    pub step: u64,
    /// Launches issued.
    pub launches: u64,
    /// Elements updated; 0 if the step was skipped.
    pub elements: u64,
    /// Parameters left out because they had no gradient; neither they nor their state changed.
    pub absent: u64,
    /// Norm of all gradients, with the loss scale taken out; `None` without a pass that reads them.
    pub grad_norm: Option<f64>,
    /// Norm of what the step changed in all parameters, ‖new − old‖; `None` without pass `update_norms`.
    pub update_norm: Option<f64>,
    /// Gradient elements that are infinite or NaN; 0 without a pass that reads them.
    pub non_finite: u64,
    /// Whether the step was skipped because of them: nothing was written, no step counted.
    pub skipped: bool,
    /// The factor to multiply the next step's loss with; `None` without pass `loss_scaling`.
    pub loss_scale: Option<f64>,
}

/// What was seen of one parameter's gradient; see [`State::grad_reports`](crate::State::grad_reports).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct GradReport {
    /// Its norm, with the loss scale taken out; infinite or NaN if an element is.
    pub norm: f64,
    /// Elements that are infinite or NaN.
    pub non_finite: u64,
}
