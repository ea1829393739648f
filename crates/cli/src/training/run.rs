//! A run of training on one rank.

use fusestep::{Session, StepOptions};
use fusestep_models::Task;
use indicatif::ProgressBar;

use super::compared::Compared;
use super::recorder::Recorder;
use super::tally::Tally;
use crate::shadow::Shadow;
use crate::train::args::TrainArgs;
use crate::train::summary::Epoch;

/// A model being trained.
pub(super) struct Training<'a> {
    pub(super) args: &'a TrainArgs,
    pub(super) options: &'a StepOptions,
    /// Names of the parameters, in the plan's order.
    pub(super) names: Vec<&'a str>,
    pub(super) session: Session<'a>,
    pub(super) task: &'a dyn Task,
    pub(super) shadow: Option<Shadow>,
    pub(super) bar: ProgressBar,
    pub(super) tally: Tally,
    pub(super) compared: Compared,
    /// Epochs that were over in the checkpoint that the run goes on from.
    pub(super) resumed_epochs: Option<usize>,
    /// Epochs of this session that are over.
    pub(super) history: Vec<Epoch>,
    pub(super) recorder: Recorder,
    /// Whether the user was warned that state is not finite.
    pub(super) warned: bool,
}
