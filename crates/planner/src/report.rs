//! What one step did, and what a state says of those it has made.

use std::num::NonZeroU64;

use fusestep_amp::LossScale;
use fusestep_launch::{Backend, ControlBlock, SquareSum};
use serde::Serialize;

#[cfg(doc)]
use crate::PlanError;
use crate::norm::NormState;
use crate::update_norms::read_sums;
use crate::{Result, State};

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
    pub without_gradient: u64,
    /// Norm of all gradients, with the loss scale taken out; `None` without a pass that reads
    /// them.
    pub grad_norm: Option<f64>,
    /// Norm of what the step changed in all parameters, ‖new − old‖; `None` without pass
    /// `update_norms`.
    pub update_norm: Option<f64>,
    /// Gradient elements that are infinite or NaN; 0 without a pass that reads them.
    pub non_finite: u64,
    /// Whether the step was skipped because of them: nothing was written, no step counted.
    pub skipped: bool,
    /// The factor to multiply the next step's loss with; `None` without pass `loss_scaling`.
    pub loss_scale: Option<f64>,
    /// Tensors that a layer-wise rule has left as they are, because a norm of theirs is not
    /// finite; of those whose first element this rank updates. 0 on a device, whose
    /// [`Backend::take_skipped`](fusestep_launch::Backend::take_skipped) says it.
    pub tensors_skipped: u64,
}

/// What one micro-step of one rank did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct MicroStepReport {
    /// The update; `None` if the micro-step only added gradients.
    pub update: Option<StepReport>,
    /// Whether parameters were averaged across ranks.
    pub averaged: bool,
    /// Time in which the step waited for its gradients to be reduced, in nanoseconds: what of the
    /// calls the backward passes did not hide. Where the update is fused into the reduction
    /// there is nothing to wait for.
    pub exposed_ns: u64,
    /// Most bytes of gradient segments at one time since the update before: from ZeRO stage 2 on
    /// fewer than of all of them where they are reduced while gradients come, since those that are
    /// through give their memory to those that come.
    pub segment_peak_bytes: u64,
    /// Bytes of gradients copied from one place to another since the update before.
    pub gradient_bytes_copied: u64,
}

/// What was seen of one parameter's gradient; see
/// [`State::grad_reports`](crate::State::grad_reports).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct GradReport {
    /// Its norm, with the loss scale taken out; infinite or NaN if an element is.
    pub norm: f64,
    /// Elements that are infinite or NaN.
    pub non_finite: u64,
}

impl State {
    /// The factor to multiply the next step's loss with, and the counters behind it; `None` without
    /// pass `loss_scaling`.
    pub fn loss_scale(&self) -> Option<LossScale> {
        let scaled = self.scaled.then_some(self.norm.as_ref()).flatten();
        scaled.map(NormState::loss_scale)
    }

    /// Steps skipped so far because a gradient was not finite; 0 without a pass that looks.
    pub fn skipped(&self) -> u64 {
        self.norm.as_ref().map_or(0, |norm| norm.block.skipped)
    }

    /// What the pass that reads the gradients saw of each parameter's in the last step, in plan
    /// order, whether the step was skipped or not; `None` without such a pass.
    ///
    /// # Errors
    /// [`PlanError::Backend`].
    /// # Cost
    /// Reads 16 bytes for each parameter; the sums are there.
    pub fn grad_reports(&self, backend: &dyn Backend) -> Result<Option<Vec<GradReport>>> {
        let Some(norm) = &self.norm else {
            return Ok(None);
        };
        let mut sums = vec![SquareSum::default(); self.params.len()];
        backend.read(norm.sums.as_ref(), 0, bytemuck::cast_slice_mut(&mut sums))?;
        let scale = norm.scale_of_sums.unwrap_or_else(|| norm.scale_of(&sums));
        let report = |sum: &SquareSum| GradReport {
            norm: sum.sum.sqrt() / scale,
            non_finite: sum.non_finite,
        };
        Ok(Some(sums.iter().map(report).collect()))
    }

    /// How far each parameter moved in the last step, ‖new − old‖ in plan order; `None` without
    /// pass [`UpdateNorms`](crate::UpdateNorms). A parameter that took no part has 0, and in a
    /// step that was skipped all have.
    ///
    /// # Errors
    /// [`PlanError::Backend`].
    /// # Cost
    /// Waits for a device; reads 64 bytes for each 65,536 elements.
    pub fn update_norms(&self, backend: &dyn Backend) -> Result<Option<Vec<f64>>> {
        let Some(reader) = &self.update_reader else {
            return Ok(None);
        };
        if let Some((sums, _)) = &self.exchange.update_sums {
            return Ok(Some(sums.iter().map(|sum| sum.sqrt()).collect()));
        }
        let mut own = reader.clone();
        let skipped = match &self.norm {
            Some(norm) => ControlBlock::read(backend, norm.control.as_ref())?.found != 0,
            None => false,
        };
        read_sums(self, backend, &mut own, skipped)?;
        let norms = (0..own.params()).map(|param| own.sum(param).sqrt());
        Ok(Some(norms.collect()))
    }

    /// Micro-steps since the last update that are over.
    pub fn micro_steps(&self) -> u32 {
        self.arena.micro_steps
    }

    /// Segments of gradients whose reduction has been started: with communication streams, while
    /// gradients are still being given.
    pub fn segments_started(&self) -> usize {
        self.arena.ready.started()
    }

    /// Steps between two averages of LocalSGD, if they have been adapted.
    pub fn local_interval(&self) -> Option<u64> {
        self.adapting.every.map(NonZeroU64::get)
    }
}
