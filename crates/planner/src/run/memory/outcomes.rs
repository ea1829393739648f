//! Outcomes of the steps that a state has made.

use std::num::NonZeroU64;

use fusestep_amp::LossScale;
use fusestep_launch::{Backend, ControlBlock, SquareSum};

#[cfg(doc)]
use crate::PlanError;
use crate::error::Result;
use crate::run::clock::StageSeconds;
use crate::run::memory::norm::NormState;
use crate::run::memory::state::State;
use crate::run::report::GradReport;
use crate::run::stages::update_norms::read_sums;

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

    /// Has the next step decide by the sums of squares over these gradients, in one order, of which
    /// those that [`RunAlone::squares_borrowed`](crate::RunAlone::squares_borrowed) has read for it
    /// are a part. A plan that takes no norm decides nothing.
    pub fn give_squares(&mut self, all: Vec<SquareSum>) {
        if let Some(norm) = &mut self.norm {
            norm.given = Some(all);
        }
    }

    /// Reports of each parameter's gradient in the last step, in plan order, whether the step was
    /// skipped or not; `None` without a pass that reads the gradients.
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

    /// Measures the parts of every step from here on, for [`State::stage_seconds`].
    ///
    /// # Cost
    /// Two readings of the host's clock for each stage and each gradient given.
    pub fn time_stages(&mut self) {
        self.clock.start();
    }

    /// Seconds that the parts of the last update took on this rank, its micro-steps included;
    /// `None` before the first update since [`State::time_stages`]. Steps that are recorded or
    /// enqueued are not measured.
    pub fn stage_seconds(&self) -> Option<StageSeconds> {
        self.clock.last()
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

    /// Steps between two averages of LocalSGD, as [`Interval::Adaptive`](crate::Interval) last set
    /// them.
    ///
    /// `None` until the first of its averages, and always for a fixed interval.
    pub fn local_interval(&self) -> Option<u64> {
        self.adapting.every.map(NonZeroU64::get)
    }
}
