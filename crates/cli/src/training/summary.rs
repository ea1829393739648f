//! The times, calls and bytes of a run, and its summary.

use std::time::Instant;

use fusestep_planner::MicroStepReport;

use super::run::Training;
use crate::options::name_of;
use crate::train::summary::{Epoch, RankNumbers, TrainSummary};
use crate::values::params_hash;

/// The moment in a run from which on it is measured.
pub(super) struct Begun {
    at: Instant,
    calls: u64,
    bytes: u64,
}

impl Training<'_> {
    /// Begins to measure.
    pub(super) fn begin(&self) -> Begun {
        let comms = self.session.comms();
        Begun { at: Instant::now(), calls: comms.calls(), bytes: comms.bytes_sent() }
    }

    /// Counts an update, and the time since `begun` as the update's.
    pub(super) fn count_update(&mut self, report: &MicroStepReport, begun: &Begun) {
        let nanoseconds = begun.at.elapsed().as_nanos() as f64;
        self.tally.update_ns += nanoseconds;
        self.tally.ours_ns += nanoseconds;
        self.tally.add(report);
        // With lanes ranks have other numbers of micro-steps, so windows are counted.
        if self.options.lanes.is_none() {
            self.tally.dropped_micro_steps += u64::from(report.dropped_micro_steps);
        }
    }

    /// Counts the time since `begun` as a batch's, and the calls and bytes sent since.
    pub(super) fn count_batch(&mut self, begun: &Begun) {
        self.tally.batch_ns += begun.at.elapsed().as_nanos() as f64;
        self.tally.calls += self.session.comms().calls() - begun.calls;
        self.tally.bytes += self.session.comms().bytes_sent() - begun.bytes;
    }

    pub(super) fn summary(&mut self, last: Epoch) -> anyhow::Result<TrainSummary> {
        let params_hash = params_hash(&mut self.session)?;
        let averages = self.averages()?;
        let written = match self.session.plan().topology().rank {
            0 => self.task.write(&averages, self.args.seed)?,
            _ => None,
        };
        let (plan, tally) = (self.session.plan(), &self.tally);
        let steps = tally.steps.max(1) as f64;
        let candle = self.shadow.as_ref().filter(|_| tally.steps > 0);
        let params = plan.params().iter();
        let parameter_bytes = params.map(|p| p.numel() * p.dtype.len_bytes() as u64);
        Ok(TrainSummary {
            model: name_of(self.args.task.model),
            backend: self.session.backend().name(),
            epochs: self.args.epochs,
            resumed_epochs: self.resumed_epochs,
            steps: tally.steps,
            skipped_steps: tally.skipped,
            dropped_micro_steps: tally.dropped_micro_steps,
            final_loss: last.loss,
            test_loss: last.test_loss,
            test_accuracy: last.test_accuracy,
            tokens_per_second: tally.tokens as f64 / (1e-9 * tally.batch_ns.max(1.0)),
            step_share: tally.ours_ns / tally.batch_ns.max(1.0),
            tokens: self.task.tokens(),
            optimizer_ns_per_step: tally.update_ns / steps,
            optimizer: plan.optimizer().name(),
            lr: plan.optimizer().lr(),
            dtype: self.args.dtype.name(),
            candle_ns_per_step: candle.map(|shadow| shadow.ns / steps),
            update_norm: tally.update_norm,
            params_hash,
            launches_per_step: match self.session.backend().device() {
                Some(_) => plan.launches(),
                None => plan.host_launches(),
            },
            ranks: RankNumbers {
                ranks: plan.topology().world,
                engine: name_of(self.args.engine.unwrap_or_default()),
                zero: plan.zero().number(),
                state_bytes_per_rank: plan.state_bytes(),
                collectives_per_step: tally.calls as f64 / steps,
                bytes_sent_per_step: tally.bytes as f64 / steps,
                layer_peak_bytes: tally.layer_peak_bytes,
                bucket_peak_bytes: tally.bucket_peak_bytes,
                parameter_bytes: parameter_bytes.sum(),
            },
            config: self.args.config.given.clone(),
            history: self.history.clone(),
            written,
        })
    }
}
