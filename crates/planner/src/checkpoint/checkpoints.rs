//! A rank's checkpoints, as an optimizer of many steps keeps them, with texts of its own: random
//! state, its place in the data.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fusestep_launch::Backend;
use fusestep_tensor::Quoted;

use super::manifest::{Manifest, refuse};
use super::save::ReadRun;
use super::{BorrowedParams, FolderLock, RunToSave, Saved, Saves, agree, save};
use crate::comms::Comms;
use crate::{Plan, PlanError, Result, State, Topology};

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
    /// As [`Plan::load`] and [`Saves::finish`]; [`PlanError::Checkpoint`] if ranks do not
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
        // Let go of first: it may be the same folder, spelt in another way.
        (self.folder, self.lock) = (None, None);
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

/// What a checkpoint's texts of all ranks are called, and those of rank `r` with `#r` behind.
const KEY: &str = "remembered";

/// Texts under names, such as a serialized random generator, that go with a rank's checkpoint and
/// come back with it.
///
/// Each rank has its own. They come back on as many ranks as they were saved on; on another number
/// only if all ranks had the same.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Remembered(BTreeMap<String, String>);

impl Remembered {
    /// Puts a text under a name, in place of the one there.
    pub fn set(&mut self, name: impl Into<String>, text: impl Into<String>) {
        self.0.insert(name.into(), text.into());
    }

    /// The text under a name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Adds the texts of all ranks to those that rank 0 saves. All ranks call it.
    ///
    /// # Errors
    /// [`PlanError::Collective`].
    pub fn gather(
        &self,
        plan: &Plan,
        comms: &mut Comms<'_>,
        caller: &mut BTreeMap<String, String>,
    ) -> Result<(), PlanError> {
        let own = if self.0.is_empty() {
            String::new()
        } else {
            serde_json::to_string(&self.0).unwrap_or_default()
        };
        let all = agree::gather_texts(plan, comms, &own)?;
        if all.iter().all(|text| *text == all[0]) {
            if !all[0].is_empty() {
                caller.insert(KEY.to_owned(), own);
            }
            return Ok(());
        }
        for (rank, text) in all.into_iter().enumerate() {
            caller.insert(format!("{KEY}#{rank}"), text);
        }
        Ok(())
    }

    /// Takes over what a checkpoint's texts have for this rank; nothing of what was set before
    /// stays.
    pub fn restore(&mut self, topology: Topology, caller: &BTreeMap<String, String>) {
        let of_rank = |rank: usize| caller.get(&format!("{KEY}#{rank}"));
        let as_many = of_rank(topology.world.saturating_sub(1)).is_some()
            && of_rank(topology.world).is_none();
        let own = caller.get(KEY).or_else(|| of_rank(topology.rank).filter(|_| as_many));
        let read = own.and_then(|text| serde_json::from_str(text).ok());
        self.0 = read.unwrap_or_default();
    }
}
