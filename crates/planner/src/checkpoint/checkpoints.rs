//! A rank's checkpoints, as an optimizer of many steps keeps them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fusestep_launch::Backend;

use super::manifest::{Manifest, refuse};
use super::{BorrowedParams, FolderLock, Remembered, RunToSave, Saved, Saves};
use crate::comms::Comms;
use crate::{Plan, PlanError, State};

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
    /// Saves that go through `saves`.
    pub fn new(saves: Saves) -> Self {
        Self {
            saves,
            ..Self::default()
        }
    }

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
    /// As [`Plan::load_run`] and [`Plan::finish_saves`].
    pub fn resume(
        &mut self,
        plan: &Plan,
        (state, backend): (&mut State, &dyn Backend),
        params: Option<&dyn BorrowedParams>,
        (comms, folder): (&mut Comms<'_>, &Path),
    ) -> Result<Option<usize>, PlanError> {
        plan.finish_saves(comms, &mut self.saves)?;
        if Manifest::read_if_any(folder)?.is_none() {
            return Ok(None);
        }
        let texts = plan.load_run(state, backend, params, folder)?;
        self.remembered.restore(plan.topology(), &texts);
        let steps = texts.get(STEPS).and_then(|steps| steps.parse().ok());
        let named = || {
            let found = texts.get(STEPS).map_or("nothing", String::as_str);
            refuse(folder, STEPS, "a count of steps", found.to_owned())
        };
        steps.map(Some).ok_or_else(named)
    }

    /// Begins a save behind training, of a run whose caller has done `steps` steps.
    ///
    /// # Errors
    /// As [`Plan::save_behind`]; another run that saves to the same folder. On all ranks alike.
    pub fn begin(
        &mut self,
        plan: &Plan,
        run: RunToSave<'_>,
        comms: &mut Comms<'_>,
        (folder, steps): (&Path, usize),
    ) -> Result<(), PlanError> {
        plan.finish_saves(comms, &mut self.saves)?;
        self.own_folder(plan, comms, folder)?;
        let mut texts = BTreeMap::from([(STEPS.to_owned(), steps.to_string())]);
        self.remembered.gather(plan, comms, &mut texts)?;
        plan.save_behind(run, comms, &mut self.saves, folder, texts)
    }

    /// Looks after the save in flight, as [`Plan::poll_saves`].
    ///
    /// # Errors
    /// As [`Plan::poll_saves`].
    pub fn poll(
        &mut self,
        plan: &Plan,
        comms: &mut Comms<'_>,
    ) -> Result<Option<Saved>, PlanError> {
        plan.poll_saves(comms, &mut self.saves)
    }

    /// Waits for the save in flight, as [`Plan::finish_saves`].
    ///
    /// # Errors
    /// As [`Plan::finish_saves`].
    pub fn finish(
        &mut self,
        plan: &Plan,
        comms: &mut Comms<'_>,
    ) -> Result<Option<Saved>, PlanError> {
        plan.finish_saves(comms, &mut self.saves)
    }

    /// Whether a save is in flight.
    pub fn in_flight(&self) -> bool {
        self.saves.in_flight()
    }

    /// Makes the folder and locks it, when the run saves to it for the first time.
    fn own_folder(
        &mut self,
        plan: &Plan,
        comms: &mut Comms<'_>,
        folder: &Path,
    ) -> Result<(), PlanError> {
        if self.folder.as_deref() == Some(folder) {
            return Ok(());
        }
        let locked = match plan.topology().rank {
            0 => lock(folder).map(Some),
            _ => Ok(None),
        };
        let (lock, outcome) = match locked {
            Ok(lock) => (lock, Ok(())),
            Err(error) => (None, Err(error)),
        };
        if plan.topology().world > 1 {
            comms.set_plan(plan.hash());
            plan.agree(comms, outcome)?;
        } else {
            outcome?;
        }
        self.lock = lock;
        self.folder = Some(folder.to_owned());
        Ok(())
    }
}

fn lock(folder: &Path) -> Result<FolderLock, PlanError> {
    std::fs::create_dir_all(folder).map_err(|error| {
        let expected = "one that can be made";
        refuse(folder, "folder", expected, error.to_string())
    })?;
    FolderLock::take(folder)
}
