//! A rank's checkpoints, as an optimizer of many steps keeps them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fusestep_launch::Backend;
use fusestep_tensor::Quoted;

use super::manifest::{Manifest, refuse};
use super::save::ReadRun;
use super::{BorrowedParams, FolderLock, Remembered, RunToSave, Saved, Saves, agree, save};
#[cfg(doc)]
use crate::PlanError;
use crate::comms::Comms;
use crate::{Plan, Result, State};

/// What a checkpoint calls the number of steps that the caller has done.
const STEPS: &str = "steps";

/// A rank's saves behind training, the folder they go to, and what else is kept in them: how many
/// steps the caller has done and what it wants remembered.
#[derive(Debug, Default)]
pub struct Checkpoints {
    saves: Saves,
    remembered: Remembered,
    folder: Option<PathBuf>,
    lock: Option<FolderLock>,
}

impl Checkpoints {
    /// Texts of this rank that the next save takes and the last resume has brought.
    pub fn remembered(&self) -> &Remembered {
        &self.remembered
    }

    /// [`Checkpoints::remembered`], to be changed.
    pub fn remembered_mut(&mut self) -> &mut Remembered {
        &mut self.remembered
    }

    /// Goes on from the folder's checkpoint, of however many ranks; returns how many steps the
    /// caller had done, or nothing if there is no checkpoint. All ranks call it.
    ///
    /// # Errors
    /// As [`Plan::load_run`] and [`Saves::finish`]; [`PlanError::Checkpoint`] if ranks do not
    /// see the same checkpoint. On all ranks alike, before anything is written.
    pub fn resume(
        &mut self,
        plan: &Plan,
        (state, backend): (&mut State, &dyn Backend),
        params: Option<&dyn BorrowedParams>,
        (comms, folder): (&mut Comms<'_>, &Path),
    ) -> Result<Option<usize>> {
        self.saves.finish(plan, comms)?;
        let read = read_any(plan, state, params, folder);
        let manifest = |read: &Option<(ReadRun, usize)>| {
            let manifest = read.as_ref().map(|(run, _)| &run.manifest);
            manifest.map_or(0, Manifest::fingerprint)
        };
        let said = read.as_ref().map_or(0, manifest);
        let read = agree::on_checkpoint(plan, comms, folder, (read, said))?;
        let Some((run, steps)) = read else {
            return Ok(None);
        };
        let texts = save::take_over(plan, state, backend, params, run)?;
        self.remembered.restore(plan.topology(), &texts);
        Ok(Some(steps))
    }

    /// Begins a save behind training, of a run whose caller has done `steps` steps.
    ///
    /// # Errors
    /// As [`Saves::begin`]; another run that saves to the same folder. On all ranks alike.
    pub fn begin(
        &mut self,
        plan: &Plan,
        run: RunToSave<'_>,
        comms: &mut Comms<'_>,
        (folder, steps): (&Path, usize),
    ) -> Result<()> {
        self.saves.finish(plan, comms)?;
        self.own_folder(plan, comms, folder)?;
        let mut texts = BTreeMap::from([(STEPS.to_owned(), steps.to_string())]);
        self.remembered.gather(plan, comms, &mut texts)?;
        self.saves.begin(plan, run, comms, folder, texts)
    }

    /// Looks after the save in flight, as [`Saves::poll`].
    ///
    /// # Errors
    /// As [`Saves::poll`].
    pub fn poll(&mut self, plan: &Plan, comms: &mut Comms<'_>) -> Result<Option<Saved>> {
        self.saves.poll(plan, comms)
    }

    /// Waits for the save in flight, as [`Saves::finish`].
    ///
    /// # Errors
    /// As [`Saves::finish`].
    pub fn finish(&mut self, plan: &Plan, comms: &mut Comms<'_>) -> Result<Option<Saved>> {
        self.saves.finish(plan, comms)
    }

    /// Whether a save is in flight.
    pub fn in_flight(&self) -> bool {
        self.saves.in_flight()
    }

    /// Makes the folder and locks it, when the run saves to it for the first time.
    fn own_folder(&mut self, plan: &Plan, comms: &mut Comms<'_>, folder: &Path) -> Result<()> {
        if self.folder.as_deref() == Some(folder) {
            return Ok(());
        }
        let locked = match plan.topology().rank {
            0 => lock(folder).map(Some),
            _ => Ok(None),
        };
        self.lock = agree::on_outcome(plan, comms, locked)?;
        self.folder = Some(folder.to_owned());
        Ok(())
    }
}

/// Reads the folder's checkpoint, and how many steps its caller had done.
fn read_any(
    plan: &Plan,
    state: &State,
    params: Option<&dyn BorrowedParams>,
    folder: &Path,
) -> Result<Option<(ReadRun, usize)>> {
    let Some(manifest) = Manifest::read_if_any(folder)? else {
        return Ok(None);
    };
    let run = save::read_run(plan, state, params, (folder.into(), &manifest))?;
    let text = run.manifest.caller.get(STEPS);
    let steps = text.and_then(|steps| steps.parse().ok());
    let refused = || {
        let found = text.map_or_else(|| "nothing".to_owned(), |text| Quoted(text).to_string());
        refuse(folder, STEPS, "a count of steps", found)
    };
    let steps = steps.ok_or_else(refused)?;
    Ok(Some((run, steps)))
}

fn lock(folder: &Path) -> Result<FolderLock> {
    std::fs::create_dir_all(folder)
        .map_err(|error| refuse(folder, "folder", "one that can be made", error))?;
    FolderLock::take(folder)
}
