//! Reports of steps.

use serde::Serialize;

/// The report of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StepReport {
    /// The state's step after this one; a skipped step is not counted.
    pub step: u64,
    /// Launches issued.
    pub launches: u64,
    /// Elements updated; 0 if the step was skipped.
    pub elements: u64,
    /// Parameters left out because they had no gradient; neither they nor their state changed.
    pub without_gradient: u64,
    /// Norm of all gradients, with the loss scale taken out; `None` without a pass that reads
    /// them.
    pub grad_norm: Option<f64>,
    /// Norm of what the step changed in all parameters, ‖new − old‖; `None` without pass
    /// `update_norms`.
    pub update_norm: Option<f64>,
    /// Gradient elements that are infinite or NaN; 0 without a pass that reads them.
    pub non_finite: u64,
    /// Whether the step was skipped because of infinite or NaN gradients: nothing was written, no
    /// step counted.
    pub skipped: bool,
    /// The factor to multiply the next step's loss with; `None` without pass `loss_scaling`.
    pub loss_scale: Option<f64>,
    /// Tensors that a layer-wise rule has left as they are, because a norm of theirs is not
    /// finite; of those whose first element this rank updates. 0 on a device, whose
    /// [`Launches::take_skipped`](fusestep_launch::Launches::take_skipped) says it.
    pub tensors_skipped: u64,
}

/// The report of one micro-step of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct MicroStepReport {
    /// The update; `None` if the micro-step only added gradients.
    pub update: Option<StepReport>,
    /// Micro-steps whose gradients were dropped with the update, since one gradient was not finite:
    /// all micro-steps of the accumulation, or none.
    pub dropped_micro_steps: u32,
    /// Whether parameters were averaged across ranks.
    pub averaged: bool,
    /// Time in which the step waited for its gradients to be reduced, in nanoseconds: the time of
    /// calls that the backward passes did not hide. 0 if the update is fused into the reduction.
    pub exposed_ns: u64,
    /// Most bytes of gradient segments at one time since the update before. From ZeRO stage 2 on
    /// reduced segments give their memory to later ones. So the number may be smaller than the
    /// bytes of all segments.
    pub segment_peak_bytes: u64,
    /// Bytes of gradients copied from one place to another since the update before.
    pub gradient_bytes_copied: u64,
}

/// The report of one parameter's gradient; see
/// [`State::grad_reports`](crate::State::grad_reports).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct GradReport {
    /// Norm of the gradient, with the loss scale taken out; infinite or NaN if an element is.
    pub norm: f64,
    /// Elements that are infinite or NaN.
    pub non_finite: u64,
}
