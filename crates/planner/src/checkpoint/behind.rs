//! Saves in the background, which training does not wait for.
//!
//! ```text
//! all ranks   copy of what they save, into memory kept for it               in the call
//! rank 0      folder of the generation                                      behind
//! all ranks   their files, complete and synced                              behind
//! rank 0      manifest, then the generations before it go                   behind
//! ```
//!
//! Between two parts all ranks agree, in a call that all of them make anyway. So the commit point
//! is the same as of a save in line, and an error comes on all ranks in one call. No rank has to
//! guess from files what another has done. A call during a part costs one reduction of a byte.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fusestep_tensor_file::{Disk, Files};

use super::commits::commit_files;
use super::generation::{Generation, remove_failed};
use super::manifest::Manifest;
use super::shards::write_snapshot;
use super::snapshot::Snapshot;
use super::writer::{Done, Job, Outcome, Writer};
use super::{CheckpointFolder, RunToSave, agree, save, snapshot};
use crate::run::comms::calls::Comms;
use crate::{Plan, Result};

/// One rank's saves in the background: memory for copies, their writer, and the one save in flight.
///
/// Dropping `Saves` waits for the files that this rank is writing. With one rank the save is
/// complete then; with many [`Saves::finish`] completes it.
pub struct Saves {
    files: Arc<dyn Files>,
    writer: Writer,
    /// The copy that the last save was made from; the writer shares it until the files are written.
    snapshot: Arc<Snapshot>,
    flight: Option<Flight>,
}

/// A save in flight; all ranks have one, or none.
struct Flight {
    folder: PathBuf,
    step: u64,
    phase: Phase,
    /// Outcome of this rank's part of the phase; `None` while the writer is busy.
    outcome: Option<Outcome>,
    /// Manifest of the save on rank 0, until it is written; `None` on other ranks.
    manifest: Option<Manifest>,
    generation: Option<Generation>,
}

/// Part of a save that ranks agree on next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Begin,
    Write,
    Commit,
}

/// A complete save, from which a run resumes from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Steps that had been run when the save was begun.
    pub step: u64,
}

impl std::fmt::Debug for Saves {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let phase = self.flight.as_ref().map(|flight| flight.phase);
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
        let writer = Writer::Turns { looks: looks.max(1), job: None };
        Self::of(files, writer)
    }

    fn of(files: Arc<dyn Files>, writer: Writer) -> Self {
        Self { files, writer, snapshot: Arc::default(), flight: None }
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

    /// Begins a save of all that [`Plan::save`] saves: waits for an earlier save, makes a copy and
    /// returns. All ranks call it, between micro-steps. Then they call [`Saves::poll`] in every
    /// step, until it reports the save as complete.
    ///
    /// # Errors
    /// Errors of [`Plan::save`] that can be found before anything is written. The error of an
    /// earlier save, and then this save has not been begun. All ranks return an error together.
    /// # Cost
    /// One copy of what this rank saves; two small calls.
    pub fn begin(
        &mut self,
        plan: &Plan,
        run: RunToSave<'_>,
        comms: &mut Comms<'_>,
        folder: &Path,
        caller: BTreeMap<String, String>,
    ) -> Result<()> {
        self.finish(plan, comms)?;
        run.state.check_plan(plan)?;
        let files = Arc::clone(&self.files);
        let place = CheckpointFolder::of(files.as_ref(), folder);
        if Arc::get_mut(&mut self.snapshot).is_none() {
            // The writer of a save that was given up still shares the old copy.
            self.snapshot = Arc::default();
        }
        let copied = save::check_between(run.state).and_then(|()| {
            let own = Arc::get_mut(&mut self.snapshot);
            own.map_or(Ok(()), |own| snapshot::take(plan, run, place, own))
        });
        let manifest = copied.and_then(|()| match plan.topology().rank {
            0 => save::manifest_of(plan, run.state, caller).map(Some),
            _ => Ok(None),
        });
        let manifest = agree::on_outcome(plan, comms, manifest)?;
        let flight = Flight {
            folder: folder.to_owned(),
            step: run.state.step(),
            phase: Phase::Begin,
            outcome: None,
            manifest,
            generation: None,
        };
        take_off(plan, self, flight);
        Ok(())
    }

    /// Advances the save in flight, if there is one, without waiting for a disk; returns the save
    /// when it is complete. All ranks call it alike, for example in every step.
    ///
    /// # Errors
    /// As [`Plan::save`], on all ranks in the same call; the checkpoint before is as it was,
    /// and nothing is in flight any more.
    /// # Cost
    /// One reduction of a byte while a save is in flight, and nothing otherwise.
    pub fn poll(&mut self, plan: &Plan, comms: &mut Comms<'_>) -> Result<Option<Saved>> {
        let Some(flight) = &mut self.flight else {
            return Ok(None);
        };
        if flight.outcome.is_none() {
            flight.outcome = self.writer.look();
        }
        let is_busy = flight.outcome.is_none();
        match agree::on_any_rank(plan, comms, is_busy) {
            Ok(true) => Ok(None),
            Ok(false) => advance(plan, comms, self),
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
    pub fn finish(&mut self, plan: &Plan, comms: &mut Comms<'_>) -> Result<Option<Saved>> {
        let mut saved = None;
        while let Some(flight) = &mut self.flight {
            if flight.outcome.is_none() {
                flight.outcome = self.writer.wait();
            }
            saved = advance(plan, comms, self)?.or(saved);
        }
        Ok(saved)
    }

    /// Hands a job to the writer. Returns an outcome at once if there is no job, or if the writer
    /// cannot take it.
    fn hand_over(&mut self, job: Option<Job>) -> Option<Outcome> {
        match job {
            None => Some(Ok(Done::default())),
            Some(job) => self.writer.begin(job).err().map(Err),
        }
    }
}

/// Begins the first part of a save: one rank alone does all of it at once.
fn take_off(plan: &Plan, saves: &mut Saves, mut flight: Flight) {
    let (files, folder) = (Arc::clone(&saves.files), flight.folder.clone());
    let step = flight.step;
    let job: Option<Job> = if plan.topology().world == 1 {
        flight.phase = Phase::Commit;
        let (snapshot, manifest) = (Arc::clone(&saves.snapshot), flight.manifest.take());
        Some(Box::new(move || {
            let folder = CheckpointFolder::of(files.as_ref(), &folder);
            let generation = Generation::begin(folder, step)?;
            let written = write_snapshot(folder, &generation.name(), 0, &snapshot);
            let written = written.inspect_err(|_| remove_failed(folder, &generation))?;
            let shards = written.model.into_iter().chain(written.shard).collect();
            if let Some(manifest) = manifest {
                commit_files(manifest, folder, &generation, shards)?;
            }
            Ok(Done::default())
        }))
    } else if plan.topology().rank == 0 {
        Some(Box::new(move || {
            let folder = CheckpointFolder::of(files.as_ref(), &folder);
            let begun = Some(Generation::begin(folder, step)?);
            Ok(Done { begun, ..Done::default() })
        }))
    } else {
        None
    };
    flight.outcome = saves.hand_over(job);
    saves.flight = Some(flight);
}

/// Goes on to the next part of a save when all ranks have done this one.
fn advance(plan: &Plan, comms: &mut Comms<'_>, saves: &mut Saves) -> Result<Option<Saved>> {
    let Some(mut flight) = saves.flight.take() else {
        return Ok(None);
    };
    let outcome = flight.outcome.take();
    let outcome = outcome.unwrap_or(Ok(Done::default()));
    comms.set_plan(plan.hash());
    let rank = plan.topology().rank;
    let (files, folder) = (Arc::clone(&saves.files), flight.folder.clone());
    match flight.phase {
        Phase::Begin => {
            let begun = outcome.map(|done| done.begun);
            let generation = agree::on_generation(plan, comms, begun)?;
            flight.generation = Some(generation.clone());
            flight.phase = Phase::Write;
            let snapshot = Arc::clone(&saves.snapshot);
            let job: Job = Box::new(move || {
                let folder = CheckpointFolder::of(files.as_ref(), &folder);
                generation.check_seen(folder)?;
                let written = write_snapshot(folder, &generation.name(), rank, &snapshot)?;
                Ok(Done { written, ..Done::default() })
            });
            flight.outcome = saves.hand_over(Some(job));
        }
        Phase::Write => {
            let written = outcome.map(|done| done.written);
            let shards = agree::on_shards(plan, comms, written);
            let shards = shards.inspect_err(|error| {
                let folder = CheckpointFolder::of(saves.files.as_ref(), &flight.folder);
                if let Some(generation) = &flight.generation {
                    save::give_up(plan, folder, generation, error);
                }
            })?;
            flight.phase = Phase::Commit;
            let own = flight.manifest.take().zip(flight.generation.take());
            let job = own.map(|(manifest, generation)| -> Job {
                Box::new(move || {
                    let folder = CheckpointFolder::of(files.as_ref(), &folder);
                    let committed = commit_files(manifest, folder, &generation, shards);
                    committed.map(|()| Done::default())
                })
            });
            flight.outcome = saves.hand_over(job);
        }
        Phase::Commit => {
            agree::on_outcome(plan, comms, outcome.map(drop))?;
            return Ok(Some(Saved { step: flight.step }));
        }
    }
    saves.flight = Some(flight);
    Ok(None)
}
