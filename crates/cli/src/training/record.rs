//! Records of a run's updates and epochs.

use std::time::Instant;

use fusestep_planner::MicroStepReport;

use super::recorder::{Recorded, Stopped};
use super::run::Training;
use crate::options::name_of;
use crate::output::warn;
use crate::records::Records;
use crate::records::curves::Curves;
use crate::records::told::{Norms, Of, RunLine, StepLine};
use crate::train::summary::Epoch;

impl Training<'_> {
    /// Begins the records of the run on rank 0, before anything is trained.
    pub(super) fn begin_records(&mut self) -> anyhow::Result<()> {
        let args = self.args;
        if !args.records.is_some() && args.report.is_none() {
            return Ok(());
        }
        self.recorder.is_on = true;
        self.session.time_steps();
        let topology = self.session.plan().topology();
        let step = self.session.state().step();
        self.recorder.curves = args.report.is_some().then(|| Curves::from(step));
        if topology.rank > 0 {
            return Ok(());
        }
        let run = RunLine::of(Of {
            model: name_of(args.task.model),
            engine: name_of(args.engine.unwrap_or_default()),
            world: topology.world,
            config: args.config.given.as_deref(),
            resumed_step: self.resumed_epochs.map(|_| step),
        });
        self.recorder.records = Records::begin(&args.records, &run)?;
        self.recorder.run = Some(run);
        Ok(())
    }

    /// The run and the curves of all ranks, for the run's page. All ranks call it together.
    pub(super) fn recorded(&mut self) -> anyhow::Result<Option<Recorded>> {
        let Some(curves) = self.recorder.curves.take() else {
            return Ok(None);
        };
        let drawn = curves.gather(&self.names, self.session.communicator())?;
        Ok(self.recorder.run.take().map(|run| Recorded { run, drawn }))
    }

    /// Parts for the page of a run that has ended early; `None` on ranks that write none.
    pub(super) fn stopped(&mut self) -> Option<Stopped> {
        let (run, curves) = (self.recorder.run.take()?, self.recorder.curves.take()?);
        Some(Stopped {
            plan: self.session.plan().clone(),
            recorded: Recorded { run, drawn: curves.alone(&self.names) },
            history: std::mem::take(&mut self.history),
            resumed_epochs: self.resumed_epochs,
            steps: self.tally.steps,
            skipped: self.tally.skipped,
        })
    }

    /// Begins a batch, which an update's record counts from.
    pub(super) fn begin_batch(&mut self) {
        if self.recorder.is_on && self.recorder.begun.is_none() {
            self.recorder.begun = Some((Instant::now(), self.candle_ns()));
        }
    }

    /// Records the update of a micro-step, if it has made one. All losses are known by then.
    pub(super) fn record(&mut self, ended: &MicroStepReport) -> anyhow::Result<()> {
        if !self.recorder.is_on || ended.update.is_none() {
            return Ok(());
        }
        let candle_ns = self.candle_ns();
        let state = self.session.state();
        let norms = state.update_norms(self.session.backend())?;
        let Some(report) = self.session.report().copied() else { return Ok(()) };
        let rank = self.session.plan().topology().rank;
        let recorder = &mut self.recorder;
        let samples = std::mem::take(&mut recorder.samples);
        let loss_sum = std::mem::take(&mut recorder.loss_sum);
        let batch_seconds = recorder
            .begun
            .take()
            .map_or(0.0, |(at, before)| at.elapsed().as_secs_f64() - 1e-9 * (candle_ns - before));
        let mut line = StepLine::new(rank, recorder.epoch, report);
        line.report.loss = (samples > 0).then(|| loss_sum / samples as f64);
        line.update_norms = norms.map(|norms| Norms { names: &self.names, norms });
        line.model_seconds = std::mem::take(&mut recorder.model_seconds);
        line.batch_seconds = batch_seconds;
        if let Some(curves) = &mut recorder.curves {
            curves.add(&line);
        }
        if let Some(warning) = recorder.records.step(&line) {
            self.bar.suspend(|| warn(&warning));
        }
        Ok(())
    }

    /// Records the end of an epoch.
    pub(super) fn record_epoch(&mut self, ended: Epoch) {
        if !self.recorder.records.is_some() {
            return;
        }
        let (epoch, step) = (self.recorder.epoch, self.session.state().step());
        if let Some(warning) = self.recorder.records.epoch(epoch, step, ended) {
            self.bar.suspend(|| warn(&warning));
        }
    }
}
