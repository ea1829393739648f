//! Reports of a session's updates.

use fusestep_planner::{MicroStepReport, StageSeconds, StepReport};
use serde::Serialize;

/// Report of one update, the same in Rust, in candle, in Python and in the lines of `fusestep train
/// --log`.
///
/// [`Session::report`](crate::Session::report) has that of the last update, and
/// [`Session::on_step`](crate::Session::on_step) hands each one on. Launches, elements, calls,
/// bytes and seconds are this rank's. The other values are the same on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Updates so far; one that is skipped is not counted.
    pub step: u64,
    /// Mean of the losses told for the micro-steps of the update; `None` if none was told.
    pub loss: Option<f64>,
    /// Learning rate of the update, of parameters without a rule of their own.
    pub lr: f64,
    /// Norm of all gradients, with the loss scale taken out; `None` unless the step clips or scales
    /// its loss.
    pub grad_norm: Option<f64>,
    /// Norm of what the update changed in all parameters, ‖new − old‖; `None` without
    /// `update_norms`.
    pub update_norm: Option<f64>,
    /// Factor to multiply the next loss with; `None` unless the loss is scaled.
    pub loss_scale: Option<f64>,
    /// Whether the update was skipped, because a gradient is infinite or NaN.
    pub skipped: bool,
    /// Gradient elements that are infinite or NaN; counted where the step clips or scales its loss.
    pub non_finite: u64,
    /// Tensors that a rule with a rate for each layer has left as they are, because a norm of
    /// theirs is not finite.
    pub tensors_skipped: u64,
    /// Micro-steps whose gradients were dropped with a skipped update.
    pub dropped_micro_steps: u32,
    /// Whether parameters were averaged over ranks, under LocalSGD.
    pub averaged: bool,
    /// Launches issued.
    pub launches: u64,
    /// Elements updated; 0 if the update was skipped.
    pub elements: u64,
    /// Parameters that had no gradient and stayed as they were.
    pub without_gradient: u64,
    /// Gradients that a framework had to copy first: not contiguous, or lying in a parameter's own
    /// memory.
    pub copied_gradients: u64,
    /// Calls between ranks since the update before.
    pub calls: u64,
    /// Bytes sent to other ranks since the update before, by ring algorithms.
    pub bytes_sent: u64,
    /// Seconds of the parts of the update, where they are measured
    /// ([`Session::time_steps`](crate::Session::time_steps)).
    pub seconds: Option<StageSeconds>,
}

/// Function that hears of each update.
pub(super) type Hook<'c> = Box<dyn FnMut(&Report) + Send + 'c>;

/// Reports of a session, and what they are made of.
#[derive(Default)]
pub(super) struct Reports<'c> {
    pub(super) hook: Option<Hook<'c>>,
    pub(super) last: Option<Report>,
    /// Losses told since the last update: their sum and their number.
    loss_sum: f64,
    losses: u32,
    copied_gradients: u64,
    /// Counts at the last update.
    calls: u64,
    bytes_sent: u64,
}

/// Counts of a rank's calls so far.
pub(super) struct CallsSoFar {
    pub(super) calls: u64,
    pub(super) bytes_sent: u64,
}

impl Reports<'_> {
    pub(super) fn add_loss(&mut self, loss: f64) {
        self.loss_sum += loss;
        self.losses += 1;
    }

    pub(super) fn add_copied(&mut self, gradients: u64) {
        self.copied_gradients += gradients;
    }

    /// Counts calls from here on.
    pub(super) fn count_from(&mut self, now: &CallsSoFar) {
        (self.calls, self.bytes_sent) = (now.calls, now.bytes_sent);
    }

    /// Makes the report of an update at rate `lr`, and hands it on.
    pub(super) fn add(
        &mut self,
        update: &StepReport,
        ended: &MicroStepReport,
        lr: f64,
        now: &CallsSoFar,
        seconds: Option<StageSeconds>,
    ) {
        let loss = (self.losses > 0).then(|| self.loss_sum / f64::from(self.losses));
        let report = Report {
            step: update.step,
            loss,
            lr,
            grad_norm: update.grad_norm,
            update_norm: update.update_norm,
            loss_scale: update.loss_scale,
            skipped: update.skipped,
            non_finite: update.non_finite,
            tensors_skipped: update.tensors_skipped,
            dropped_micro_steps: ended.dropped_micro_steps,
            averaged: ended.averaged,
            launches: update.launches,
            elements: update.elements,
            without_gradient: update.without_gradient,
            copied_gradients: std::mem::take(&mut self.copied_gradients),
            calls: now.calls - self.calls,
            bytes_sent: now.bytes_sent - self.bytes_sent,
            seconds,
        };
        (self.loss_sum, self.losses) = (0.0, 0);
        self.count_from(now);
        self.last = Some(report);
        if let Some(hook) = &mut self.hook {
            hook(&report);
        }
    }
}
