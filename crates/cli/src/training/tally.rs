//! Counts, times and bytes of a run.

use fusestep_planner::MicroStepReport;

/// Counts, times and bytes of the steps so far.
#[derive(Default)]
pub(super) struct Tally {
    /// Updates.
    pub(super) steps: u64,
    /// Updates that were skipped.
    pub(super) skipped: u64,
    /// Micro-steps whose gradients were dropped with the skipped updates; with lanes those of all
    /// ranks.
    pub(super) dropped_micro_steps: u64,
    /// Time of steps, and calls and bytes sent for them.
    pub(super) update_ns: f64,
    /// Time of whole batches without candle's optimizer, and the part of it that is ours: steps,
    /// and parameters and gradients handed over.
    pub(super) batch_ns: f64,
    pub(super) ours_ns: f64,
    /// Tokens of all batches: images, or characters.
    pub(super) tokens: usize,
    pub(super) calls: u64,
    pub(super) bytes: u64,
    /// The most bytes of whole parameters beside the state, and of segments of gradients.
    pub(super) layer_peak_bytes: u64,
    pub(super) bucket_peak_bytes: u64,
    /// Norm of the last update, if it is measured.
    pub(super) update_norm: Option<f64>,
}

impl Tally {
    pub(super) fn add(&mut self, report: &MicroStepReport) {
        if let Some(update) = report.update {
            self.steps += 1;
            self.skipped += u64::from(update.skipped);
            self.update_norm = update.update_norm;
        }
        self.bucket_peak_bytes = self.bucket_peak_bytes.max(report.segment_peak_bytes);
    }

    /// Counts the micro-batches of all ranks that were dropped with the update of a window of
    /// lanes: as many at any number of ranks.
    pub(super) fn drop_window(&mut self, report: &MicroStepReport, micro_batches: usize) {
        if report.update.is_some_and(|update| update.skipped) {
            self.dropped_micro_steps += micro_batches as u64;
        }
    }
}
