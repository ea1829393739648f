//! Recorder of a run: the next record under way, and where records go.

use std::time::Instant;

use fusestep_planner::Plan;

use crate::records::Records;
use crate::records::curves::{Curves, Drawn};
use crate::records::told::RunLine;
use crate::train::summary::Epoch;

/// Records, and what the next one is made of.
#[derive(Default)]
pub(super) struct Recorder {
    pub(super) records: Records,
    /// Curves of this rank, where the run has a page.
    pub(super) curves: Option<Curves>,
    /// Whether anything is recorded on any rank, so that steps are measured.
    pub(super) is_on: bool,
    pub(super) run: Option<RunLine>,
    /// Epoch under way.
    pub(super) epoch: usize,
    /// Losses of the update's samples, and their number.
    pub(super) loss_sum: f64,
    pub(super) samples: usize,
    pub(super) model_seconds: f64,
    /// Beginning of the update's first batch, and the time of candle's optimizer until then.
    pub(super) begun: Option<(Instant, f64)>,
}

/// A run that has ended early by an error, as far as rank 0 has seen it.
pub(crate) struct Stopped {
    pub(crate) plan: Plan,
    pub(crate) recorded: Recorded,
    pub(crate) history: Vec<Epoch>,
    pub(crate) resumed_epochs: Option<usize>,
    pub(crate) steps: u64,
    pub(crate) skipped: u64,
}

/// Content of a run's page beside the outcome: the run, and its curves.
pub(crate) struct Recorded {
    pub(crate) run: RunLine,
    pub(crate) drawn: Drawn,
}

impl Recorder {
    /// Adds the mean loss of some samples.
    pub(super) fn add_loss(&mut self, loss: f64, samples: usize) {
        self.loss_sum += loss * samples as f64;
        self.samples += samples;
    }
}
