//! The one protocol of a save: parts that need the disk, and what all ranks agree on between them.
//!
//! ```text
//! all ranks   copy of what they save                      in the call
//! rank 0      folder of the generation                    job
//! all ranks   their files, complete and synced            job
//! rank 0      manifest, then the generations before go    job
//! ```
//!
//! Rank 0 alone writes the manifest, behind the files of all ranks, and only then removes the
//! checkpoint before: a run that is killed at any instant leaves the old one or the new one.

use std::collections::BTreeMap;
use std::sync::Arc;

use fusestep_planner::{Comms, PlanError, RunImage, RunToSave};

use crate::commits::commit_files;
use crate::generation::{Generation, remove_failed};
use crate::lists::tensors_of_checkpoint;
use crate::manifest::{FORMAT, Manifest, ShardSpec, VERSION};
use crate::settings::Rules;
use crate::shards::{Written, write_snapshot};
use crate::snapshot::Snapshot;
use crate::{CheckpointFolder, Result, agree, own_values};

/// A save that has begun; all ranks have one, or none.
pub(crate) struct Flight {
    /// Steps that had been run when it began.
    pub(crate) step: u64,
    pub(crate) phase: Phase,
    plan_hash: u64,
    /// Manifest of the save on rank 0, until it is written; `None` on other ranks.
    manifest: Option<Box<Manifest>>,
    generation: Option<Generation>,
    snapshot: Arc<Snapshot>,
}

/// Part of a save that ranks agree on next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Begin,
    Write,
    Commit,
}

/// A part of a save that needs the disk and no other rank.
pub(crate) enum Job {
    /// All of a save of one rank.
    All { step: u64, manifest: Option<Box<Manifest>>, snapshot: Arc<Snapshot> },
    /// The generation's folder.
    Begin { step: u64 },
    /// A rank's files.
    Write { generation: Generation, rank: usize, snapshot: Arc<Snapshot> },
    /// The manifest.
    Commit { manifest: Box<Manifest>, generation: Generation, shards: Vec<ShardSpec> },
}

pub(crate) type Outcome = Result<Done>;

/// Results of a successful job; empty on ranks that had nothing to do.
#[derive(Debug, Default)]
pub(crate) struct Done {
    /// The generation whose folder is there.
    begun: Option<Generation>,
    /// This rank's files, written and synced.
    written: Written,
}

/// Next part of a save.
pub(crate) enum Next {
    /// This rank's job of the next part; some ranks have none.
    Job(Option<Job>),
    /// Nothing: the save is complete.
    Done,
}

impl Job {
    /// Does the job in a folder.
    pub(crate) fn run(self, folder: CheckpointFolder<'_>) -> Outcome {
        match self {
            Self::All { step, manifest, snapshot } => {
                let generation = Generation::begin(folder, step)?;
                let written = write_snapshot(folder, &generation.name(), 0, &snapshot);
                let written = written.inspect_err(|_| remove_failed(folder, &generation))?;
                let shards = written.model.into_iter().chain(written.shard).collect();
                if let Some(manifest) = manifest {
                    commit_files(*manifest, folder, &generation, shards)?;
                }
                Ok(Done::default())
            }
            Self::Begin { step } => {
                let begun = Some(Generation::begin(folder, step)?);
                Ok(Done { begun, ..Done::default() })
            }
            Self::Write { generation, rank, snapshot } => {
                generation.check_seen(folder)?;
                let written = write_snapshot(folder, &generation.name(), rank, &snapshot)?;
                Ok(Done { written, ..Done::default() })
            }
            Self::Commit { manifest, generation, shards } => {
                commit_files(*manifest, folder, &generation, shards)?;
                Ok(Done::default())
            }
        }
    }
}

impl Flight {
    /// Copies what this rank saves into `snapshot`, which no other save may be using.
    ///
    /// # Errors
    /// Errors that can be found before anything is written, on all ranks alike.
    pub(crate) fn begin(
        run: RunToSave<'_>,
        comms: &mut Comms<'_>,
        folder: CheckpointFolder<'_>,
        snapshot: &mut Arc<Snapshot>,
        caller: BTreeMap<String, String>,
    ) -> Result<Self> {
        let plan_hash = run.plan.hash();
        comms.set_plan(plan_hash);
        if Arc::get_mut(snapshot).is_none() {
            // The writer of a save that was given up still shares the old copy.
            *snapshot = Arc::default();
        }
        let copied = match Arc::get_mut(snapshot) {
            Some(own) => own.take(run, folder),
            None => Ok(()),
        };
        let manifest = copied.and_then(|()| match comms.rank() {
            0 => manifest_of(&snapshot.image, caller).map(|manifest| Some(Box::new(manifest))),
            _ => Ok(None),
        });
        let manifest = agree::on_outcome(comms, manifest)?;
        let (step, snapshot) = (run.state.step(), Arc::clone(snapshot));
        let phase = Phase::Begin;
        Ok(Self { step, phase, plan_hash, manifest, generation: None, snapshot })
    }

    /// The first job: one rank alone does all of the save at once.
    pub(crate) fn first_job(&mut self, comms: &Comms<'_>) -> Option<Job> {
        let step = self.step;
        if comms.world() == 1 {
            self.phase = Phase::Commit;
            let (manifest, snapshot) = (self.manifest.take(), Arc::clone(&self.snapshot));
            return Some(Job::All { step, manifest, snapshot });
        }
        (comms.rank() == 0).then_some(Job::Begin { step })
    }

    /// Whether any rank is still busy with its job. All ranks call it.
    pub(crate) fn is_busy(&self, comms: &mut Comms<'_>, own: bool) -> Result<bool> {
        comms.set_plan(self.plan_hash);
        comms.on_any_rank(own)
    }

    /// Goes on to the next part of a save when all ranks have done this one.
    pub(crate) fn next(
        &mut self,
        comms: &mut Comms<'_>,
        folder: CheckpointFolder<'_>,
        outcome: Outcome,
    ) -> Result<Next> {
        comms.set_plan(self.plan_hash);
        match self.phase {
            Phase::Begin => {
                let generation = agree::on_generation(comms, outcome.map(|done| done.begun))?;
                self.generation = Some(generation.clone());
                self.phase = Phase::Write;
                let snapshot = Arc::clone(&self.snapshot);
                Ok(Next::Job(Some(Job::Write { generation, rank: comms.rank(), snapshot })))
            }
            Phase::Write => {
                let shards = agree::on_shards(comms, outcome.map(|done| done.written));
                let shards = shards.inspect_err(|error| self.give_up(comms, folder, error))?;
                self.phase = Phase::Commit;
                let own = self.manifest.take().zip(self.generation.take());
                Ok(Next::Job(own.map(|(manifest, generation)| Job::Commit {
                    manifest,
                    generation,
                    shards,
                })))
            }
            Phase::Commit => {
                agree::on_outcome(comms, outcome.map(drop))?;
                Ok(Next::Done)
            }
        }
    }

    /// Removes the files of a save that one rank could not write. After a failed call other ranks
    /// may still be writing, so the files stay for the next save.
    fn give_up(&self, comms: &Comms<'_>, folder: CheckpointFolder<'_>, error: &PlanError) {
        let generation = self.generation.as_ref().filter(|_| comms.rank() == 0);
        if let Some(generation) = generation.filter(|_| !is_of_call(error)) {
            remove_failed(folder, generation);
        }
    }
}

fn is_of_call(error: &PlanError) -> bool {
    matches!(error, PlanError::Collective { .. })
}

/// The manifest of a run, without its files.
fn manifest_of(image: &RunImage, caller: BTreeMap<String, String>) -> Result<Manifest> {
    let counts = &image.counts;
    let steps_of = image.params.iter().zip(&counts.steps_of).filter_map(|(param, &step)| {
        let differs = step != counts.step && param.shape.numel() > 0;
        differs.then(|| (param.name.clone(), step))
    });
    let open = own_values::open_run(image);
    Ok(Manifest {
        format: FORMAT.to_owned(),
        version: VERSION,
        xxh3: String::new(),
        checkpoint: String::new(),
        optimizer: image.rules.first.clone(),
        objective: image.rules.objective.clone(),
        optimizer_of: image.rules.own.clone(),
        settings: Rules(&image.rules).settings(),
        schedule: image.schedule.as_ref().map(ToString::to_string),
        step: counts.step,
        skipped: counts.skipped,
        loss_scale: counts.loss_scale,
        steps_of: steps_of.collect(),
        caller,
        tensors: tensors_of_checkpoint(image, open.as_ref())?,
        open,
        generation: String::new(),
        shards: Vec::new(),
    })
}
