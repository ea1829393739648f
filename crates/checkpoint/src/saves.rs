//! Saves, in the background or in line; between two parts all ranks agree.
//!
//! In the background training does not wait for the disk: ranks agree in a call that all of them
//! make anyway. An error comes on all ranks in one call. No rank has to guess from files what
//! another has done. A call during a part costs one reduction of a byte.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fusestep_planner::{Comms, RunToSave};
use fusestep_tensor_file::{Disk, Files};

use crate::flight::{Done, Flight, Job, Next, Outcome};
use crate::snapshot::Snapshot;
use crate::writer::Writer;
use crate::{CheckpointFolder, Result};

/// One rank's saves in the background: memory for copies, their writer, and the one save in flight.
///
/// Dropping `Saves` waits for the files that this rank is writing. With one rank the save is
/// complete then; with many [`Saves::finish`] completes it.
pub struct Saves {
    files: Arc<dyn Files>,
    writer: Writer,
    /// The copy that the last save was made from; the writer shares it until the files are written.
    snapshot: Arc<Snapshot>,
    flight: Option<InFlight>,
}

/// A save in flight, with its folder.
struct InFlight {
    flight: Flight,
    folder: PathBuf,
    /// Outcome of this rank's part of the phase; `None` while the writer is busy.
    outcome: Option<Outcome>,
}

/// A complete save, from which a run resumes from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Steps that had been run when the save was begun.
    pub step: u64,
}

impl std::fmt::Debug for Saves {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let phase = self.flight.as_ref().map(|own| own.flight.phase);
        f.debug_struct("Saves").field("flight", &phase).finish_non_exhaustive()
    }
}

impl Default for Saves {
    fn default() -> Self {
        Self::new()
    }
}

impl Saves {
    /// Saves to the machine's file systems, written by threads of their own.
    pub fn new() -> Self {
        Self::of(Arc::new(Disk), Writer::Thread(None))
    }

    /// Saves to a file system that stands in for the machine's, written by the calling thread. The
    /// `looks`-th call that polls a part of a save writes that part. Simulations use it, since
    /// nothing in them may depend on threads.
    pub fn in_turns(files: Arc<dyn Files>, looks: u32) -> Self {
        let writer = Writer::Turns { looks: looks.max(1), work: None };
        Self::of(files, writer)
    }

    fn of(files: Arc<dyn Files>, writer: Writer) -> Self {
        Self { files, writer, snapshot: Arc::default(), flight: None }
    }

    /// The file system that is saved to.
    pub(crate) fn files(&self) -> &dyn Files {
        self.files.as_ref()
    }

    /// Whether a save is in flight.
    pub fn in_flight(&self) -> bool {
        self.flight.is_some()
    }

    /// Tensors with values that are infinite or NaN in what this rank has written of the last save,
    /// as far as it has been written.
    pub fn non_finite(&self) -> &[String] {
        self.snapshot.non_finite()
    }

    /// Begins a save of all that [`save`] saves: waits for an earlier save, makes a copy and
    /// returns. All ranks call it, between micro-steps. Then they call [`Saves::poll`] in every
    /// step, until it reports the save as complete.
    ///
    /// # Errors
    /// Errors of [`save`] that can be found before anything is written. The error of an earlier
    /// save, and then this save has not been begun. All ranks return an error together.
    /// # Cost
    /// One copy of what this rank saves; two small calls.
    pub fn begin(
        &mut self,
        run: RunToSave<'_>,
        comms: &mut Comms<'_>,
        folder: &Path,
        caller: BTreeMap<String, String>,
    ) -> Result<()> {
        self.finish(comms)?;
        let place = CheckpointFolder::of(self.files.as_ref(), folder);
        let mut flight = Flight::begin(run, comms, place, &mut self.snapshot, caller)?;
        let job = flight.first_job(comms);
        let folder = folder.to_owned();
        let outcome = self.hand_over(&folder, job);
        self.flight = Some(InFlight { flight, folder, outcome });
        Ok(())
    }

    /// Advances the save in flight, if there is one, without waiting for a disk; returns the save
    /// when it is complete. All ranks call it alike, for example in every step.
    ///
    /// # Errors
    /// As [`save`], on all ranks in the same call; the checkpoint before is as it was, and nothing
    /// is in flight any more.
    /// # Cost
    /// One reduction of a byte while a save is in flight, and nothing otherwise.
    pub fn poll(&mut self, comms: &mut Comms<'_>) -> Result<Option<Saved>> {
        let Some(own) = &mut self.flight else {
            return Ok(None);
        };
        if own.outcome.is_none() {
            own.outcome = self.writer.look();
        }
        match own.flight.is_busy(comms, own.outcome.is_none()) {
            Ok(true) => Ok(None),
            Ok(false) => self.advance(comms),
            Err(error) => {
                self.flight = None;
                Err(error)
            }
        }
    }

    /// Waits until no save is in flight; all ranks call it, at the end of training. Returns the
    /// save that this call has completed.
    ///
    /// # Errors
    /// As [`Saves::poll`].
    pub fn finish(&mut self, comms: &mut Comms<'_>) -> Result<Option<Saved>> {
        let mut saved = None;
        while let Some(own) = &mut self.flight {
            if own.outcome.is_none() {
                own.outcome = self.writer.wait();
            }
            saved = self.advance(comms)?.or(saved);
        }
        Ok(saved)
    }

    /// Goes on to the next part of the save in flight; after an error nothing is in flight.
    fn advance(&mut self, comms: &mut Comms<'_>) -> Result<Option<Saved>> {
        let Some(mut own) = self.flight.take() else {
            return Ok(None);
        };
        let outcome = own.outcome.take().unwrap_or(Ok(Done::default()));
        let folder = CheckpointFolder::of(self.files.as_ref(), &own.folder);
        match own.flight.next(comms, folder, outcome)? {
            Next::Done => Ok(Some(Saved { step: own.flight.step })),
            Next::Job(job) => {
                own.outcome = self.hand_over(&own.folder, job);
                self.flight = Some(own);
                Ok(None)
            }
        }
    }

    /// Hands a job to the writer. Returns an outcome at once if there is no job, or if the writer
    /// cannot take it.
    fn hand_over(&mut self, folder: &Path, job: Option<Job>) -> Option<Outcome> {
        let Some(job) = job else {
            return Some(Ok(Done::default()));
        };
        let (files, folder) = (Arc::clone(&self.files), folder.to_owned());
        let work = move || job.run(CheckpointFolder::of(files.as_ref(), &folder));
        self.writer.begin(Box::new(work)).err().map(Err)
    }
}

/// Saves parameters, optimizer state and counts, and texts of the caller's own, and waits for it;
/// all ranks call it, between micro-steps. [`Saves::begin`] does not wait for the disk.
///
/// Every rank writes what it updates; in the middle of a merge window also its sums, and under
/// LocalSGD everything, because ranks differ ([`crate::OpenRun`]). Rank 0 then writes the manifest,
/// and only then removes the checkpoint before: a run that is killed at any instant leaves the old
/// one or the new one.
///
/// # Errors
/// [`PlanError::Checkpoint`], [`PlanError::File`] of any rank, on that rank;
/// [`PlanError::OtherRank`] on the others. The checkpoint before is as it was.
/// [`PlanError::Conflict`] between the gradients of a micro-step.
///
/// [`PlanError::Checkpoint`]: fusestep_planner::PlanError::Checkpoint
/// [`PlanError::Conflict`]: fusestep_planner::PlanError::Conflict
/// [`PlanError::File`]: fusestep_planner::PlanError::File
/// [`PlanError::OtherRank`]: fusestep_planner::PlanError::OtherRank
pub fn save<'a>(
    run: RunToSave<'_>,
    comms: &mut Comms<'_>,
    folder: impl Into<CheckpointFolder<'a>>,
    caller: BTreeMap<String, String>,
) -> Result<()> {
    let (folder, mut snapshot) = (folder.into(), Arc::default());
    let mut flight = Flight::begin(run, comms, folder, &mut snapshot, caller)?;
    let mut job = flight.first_job(comms);
    loop {
        let outcome = job.map_or_else(|| Ok(Done::default()), |job| job.run(folder));
        match flight.next(comms, folder, outcome)? {
            Next::Done => return Ok(()),
            Next::Job(next) => job = next,
        }
    }
}
