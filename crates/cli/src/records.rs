//! Records of a run while it trains: lines of JSON for programs, events for TensorBoard, and curves
//! for the page of the run.

pub(crate) mod curves;
mod events;
mod lines;
pub(crate) mod told;

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use clap::Args;
use fusestep_tensor::counted;
use fusestep_tensor_file::check_writable;

use self::events::Events;
use self::lines::Lines;
use self::told::{EpochLine, RunLine, StepLine};
use crate::places::{make_folder, require_apart, require_beside, require_folder};
use crate::train::summary::Epoch;

/// Flags of records.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct RecordArgs {
    /// Write a line of JSON for every update: loss, rate, norms, scale, seconds of each part, bytes
    /// sent. Rank 0 writes it; with --resume lines are added to the file that is there
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Write the same numbers as events that TensorBoard reads, in a file of their own in this
    /// folder. Rank 0 writes it
    #[arg(long, value_name = "DIR")]
    tensorboard: Option<PathBuf>,
}

impl RecordArgs {
    /// Whether anything is recorded.
    pub(crate) fn is_some(&self) -> bool {
        self.log.is_some() || self.tensorboard.is_some()
    }

    /// Refuses places where records cannot be written, before anything is trained.
    ///
    /// # Errors
    /// A missing folder, a log of another run, a file that would be lost.
    pub(crate) fn check(
        &self,
        report: Option<&PathBuf>,
        checkpoint: Option<&PathBuf>,
        resume: bool,
    ) -> anyhow::Result<()> {
        require_apart(("--report", report), &[("--log", self.log.as_ref())])?;
        if let Some(path) = &self.log {
            require_folder("--log", path)?;
            check_writable(path).context("--log")?;
            if let Some(folder) = checkpoint {
                require_beside("--log", path, "--checkpoint", folder)?;
            }
            let len_bytes = std::fs::metadata(path).map_or(0, |found| found.len());
            ensure!(
                resume || len_bytes == 0,
                "--log {}: expected a new file, found one of {}, which may be another run's; give \
                 another path, or --resume to add to it",
                path.display(),
                counted(len_bytes, "byte")
            );
        }
        let Some(folder) = &self.tensorboard else {
            return Ok(());
        };
        make_folder("--tensorboard", folder)?;
        check_writable(&folder.join(events::NAME)).context("--tensorboard")
    }
}

/// Records of a run on one rank; of all ranks the first one writes files.
#[derive(Default)]
pub(crate) struct Records {
    lines: Option<Lines>,
    events: Option<Events>,
}

impl Records {
    /// Begins the records of a run.
    ///
    /// # Errors
    /// A file that cannot be opened or written, after its flag.
    pub(crate) fn begin(args: &RecordArgs, run: &RunLine) -> anyhow::Result<Self> {
        let lines = |path: &PathBuf| {
            let begun = Lines::open(path).and_then(|mut lines| lines.add(run).map(|()| lines));
            begun.with_context(|| format!("--log {}: cannot write", path.display()))
        };
        let events = |folder: &PathBuf| {
            let begun = Events::create(folder, run.resumed_step);
            begun.with_context(|| format!("--tensorboard {}: cannot write", folder.display()))
        };
        Ok(Self {
            lines: args.log.as_ref().map(lines).transpose()?,
            events: args.tensorboard.as_ref().map(events).transpose()?,
        })
    }

    /// Whether somebody reads what is recorded.
    pub(crate) fn is_some(&self) -> bool {
        self.lines.is_some() || self.events.is_some()
    }

    /// Records an update. Returns a warning about a file that takes no more; the run goes on
    /// without it.
    pub(crate) fn step(&mut self, step: &StepLine<'_>) -> Option<String> {
        let line = self.lines.as_mut().map(|lines| lines.add(step));
        let event = self.events.as_mut().map(|events| events.step(step));
        self.given_up(line, event)
    }

    /// Records the end of an epoch, as [`Records::step`].
    pub(crate) fn epoch(&mut self, epoch: usize, step: u64, ended: Epoch) -> Option<String> {
        let line = EpochLine::new(epoch, step, ended);
        let line = self.lines.as_mut().map(|lines| lines.add(&line));
        let event = self.events.as_mut().map(|events| events.epoch(step, ended));
        self.given_up(line, event)
    }

    /// Gives up files that could not be written; returns a warning about them.
    fn given_up(
        &mut self,
        line: Option<std::io::Result<()>>,
        event: Option<std::io::Result<()>>,
    ) -> Option<String> {
        let told = |flag: &str, path: &Path, error: &std::io::Error| {
            format!(
                "warning: {flag} {}: cannot write ({error}); the run goes on, and nothing more is \
                 recorded there",
                path.display()
            )
        };
        let mut warnings = Vec::new();
        if let Some(Err(error)) = line
            && let Some(lines) = self.lines.take()
        {
            warnings.push(told("--log", lines.path(), &error));
        }
        if let Some(Err(error)) = event
            && let Some(events) = self.events.take()
        {
            warnings.push(told("--tensorboard", events.path(), &error));
        }
        (!warnings.is_empty()).then(|| warnings.join("\n"))
    }
}
