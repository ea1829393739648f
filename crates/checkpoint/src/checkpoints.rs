//! Checkpoints of a rank in a run of many steps. Each rank adds texts of its own, such as random
//! state and its place in the data.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fusestep_planner::{Comms, PlanError, RunToLoad, RunToSave, Topology};
use fusestep_tensor::Quoted;
use fusestep_tensor_file::Files;

use crate::load::{ReadRun, read_run, take_over};
use crate::manifest::Manifest;
use crate::refusal::refuse;
use crate::{CheckpointFolder, FolderLock, Result, Saved, Saves, agree};

/// Texts of a checkpoint, by name.
type Texts = BTreeMap<String, String>;

/// Key under which a checkpoint stores the number of steps that the caller has done.
const STEPS: &str = "steps";

/// A rank's saves in the background and their folder. Each save also keeps the number of steps that
/// the caller has done and the texts that it wants remembered.
#[derive(Debug, Default)]
pub struct Checkpoints {
    saves: Saves,
    remembered: Remembered,
    folder: Option<PathBuf>,
    lock: Option<FolderLock>,
    /// Whether the files are those of a stand-in, which no other process sees.
    is_simulated: bool,
}

impl Checkpoints {
    /// Checkpoints in a file system that stands in for the machine's, written as by
    /// [`Saves::in_turns`]. Nothing is locked: only this process sees it.
    pub fn in_turns(files: Arc<dyn Files>, looks: u32) -> Self {
        Self { saves: Saves::in_turns(files, looks), is_simulated: true, ..Self::default() }
    }

    /// Texts of this rank that the next save stores and that the last resume has restored.
    pub fn remembered(&self) -> &Remembered {
        &self.remembered
    }

    /// Texts of [`Checkpoints::remembered`], to be changed.
    pub fn remembered_mut(&mut self) -> &mut Remembered {
        &mut self.remembered
    }

    /// The number of steps done after `step`, which counts from 0, if one of the saves after every
    /// `every` steps is due then.
    ///
    /// # Errors
    /// [`PlanError::SaveEvery0`], which would save nothing.
    pub fn due(every: usize, step: usize) -> Result<Option<usize>> {
        if every == 0 {
            return Err(PlanError::SaveEvery0);
        }
        let steps = step.saturating_add(1);
        Ok(steps.is_multiple_of(every).then_some(steps))
    }

    /// The texts of a run whose caller has done `steps` steps.
    pub fn texts_of(steps: usize) -> Texts {
        BTreeMap::from([(STEPS.to_owned(), steps.to_string())])
    }

    /// The number of steps that the caller had done, in the texts of the folder's checkpoint.
    ///
    /// # Errors
    /// [`PlanError::Checkpoint`] for texts without a count of steps.
    pub fn steps_of(folder: &Path, texts: &Texts) -> Result<usize> {
        let text = texts.get(STEPS);
        let steps = text.and_then(|steps| steps.parse().ok());
        steps.ok_or_else(|| {
            let found = text.map_or_else(|| "nothing".to_owned(), |text| Quoted(text).to_string());
            refuse(folder, STEPS, "a count of steps", found)
        })
    }

    /// Resumes from the folder's checkpoint, which any number of ranks may have saved. Returns the
    /// number of steps that the caller had done, or `None` if there is no checkpoint. All ranks
    /// call it.
    ///
    /// # Errors
    /// As [`crate::load`] and [`Saves::finish`]; [`PlanError::Checkpoint`] if ranks do not
    /// see the same checkpoint. On all ranks alike, before anything is written.
    pub fn resume(
        &mut self,
        run: RunToLoad<'_>,
        comms: &mut Comms<'_>,
        folder: &Path,
    ) -> Result<Option<usize>> {
        let resumed = self.resume_with(run, comms, folder, Self::steps_of)?;
        Ok(resumed.map(|(steps, _)| steps))
    }

    /// [`Checkpoints::resume`] that hands the saved texts to `check` before anything else is
    /// compared, and again if a save was finished meanwhile. Returns its result and the texts.
    ///
    /// # Errors
    /// As [`Checkpoints::resume`]; those of `check`, on all ranks alike.
    pub fn resume_with<T>(
        &mut self,
        run: RunToLoad<'_>,
        comms: &mut Comms<'_>,
        folder: &Path,
        check: impl Fn(&Path, &Texts) -> Result<T>,
    ) -> Result<Option<(T, Texts)>> {
        self.saves.finish(comms)?;
        comms.set_plan(run.plan.hash());
        let place = CheckpointFolder::of(self.saves.files(), folder);
        let read = read_any(&run, place, &check);
        let manifest = |read: &Option<(ReadRun, T)>| {
            let manifest = read.as_ref().map(|(read, _)| &read.manifest);
            manifest.map_or(0, Manifest::fingerprint)
        };
        let said = read.as_ref().map_or(0, manifest);
        let read = agree::on_checkpoint(comms, folder, read, said)?;
        let Some((read, checked)) = read else {
            return Ok(None);
        };
        let topology = run.plan.topology();
        let texts = take_over(run, read)?;
        self.remembered.restore(topology, &texts);
        Ok(Some((checked, texts)))
    }

    /// Begins a save in the background, of a run whose caller has done `steps` steps.
    ///
    /// # Errors
    /// As [`Saves::begin`]; another run that saves to the same folder. On all ranks alike.
    pub fn begin(
        &mut self,
        run: RunToSave<'_>,
        comms: &mut Comms<'_>,
        folder: &Path,
        steps: usize,
    ) -> Result<()> {
        self.begin_with(run, comms, folder, Self::texts_of(steps))
    }

    /// [`Checkpoints::begin`] with texts of the caller's own in place of a number of steps.
    ///
    /// # Errors
    /// As [`Checkpoints::begin`].
    pub fn begin_with(
        &mut self,
        run: RunToSave<'_>,
        comms: &mut Comms<'_>,
        folder: &Path,
        mut texts: Texts,
    ) -> Result<()> {
        #[cfg(feature = "tracing")]
        let _span = tracing::info_span!(target: "fusestep", "save").entered();
        self.saves.finish(comms)?;
        comms.set_plan(run.plan.hash());
        self.own_folder(comms, folder)?;
        self.remembered.gather(comms, &mut texts)?;
        self.saves.begin(run, comms, folder, texts)
    }

    /// Tensors with values that are infinite or NaN in the last save ([`Saves::non_finite`]).
    pub fn non_finite(&self) -> &[String] {
        self.saves.non_finite()
    }

    /// Advances the save in flight, as [`Saves::poll`].
    ///
    /// # Errors
    /// As [`Saves::poll`].
    pub fn poll(&mut self, comms: &mut Comms<'_>) -> Result<Option<Saved>> {
        self.saves.poll(comms)
    }

    /// Waits for the save in flight, as [`Saves::finish`].
    ///
    /// # Errors
    /// As [`Saves::finish`].
    pub fn finish(&mut self, comms: &mut Comms<'_>) -> Result<Option<Saved>> {
        self.saves.finish(comms)
    }

    /// Whether a save is in flight.
    pub fn in_flight(&self) -> bool {
        self.saves.in_flight()
    }

    /// Makes the folder and locks it, when the run saves to that folder for the first time. All
    /// ranks call it; a save does so by itself.
    ///
    /// # Errors
    /// A folder that cannot be made; another run that saves to it. On all ranks alike.
    pub fn own_folder(&mut self, comms: &mut Comms<'_>, folder: &Path) -> Result<()> {
        if self.folder.as_deref() == Some(folder) {
            return Ok(());
        }
        // The old lock goes first: it may be of the same folder, spelt in another way.
        (self.folder, self.lock) = (None, None);
        let locked = match comms.rank() {
            0 if !self.is_simulated => lock(folder).map(Some),
            _ => Ok(None),
        };
        self.lock = agree::on_outcome(comms, locked)?;
        self.folder = Some(folder.to_owned());
        Ok(())
    }
}

/// Reads the folder's checkpoint, whose texts are checked first: a caller's own settings are a
/// better reason than the tensors that follow from them.
fn read_any<T>(
    run: &RunToLoad<'_>,
    folder: CheckpointFolder<'_>,
    check: impl Fn(&Path, &Texts) -> Result<T>,
) -> Result<Option<(ReadRun, T)>> {
    let image = run.describe()?;
    let Some(manifest) = Manifest::read_if_any(folder)? else {
        return Ok(None);
    };
    let mut checked = check(folder.path, &manifest.caller)?;
    let read = read_run(image, run.params, folder, &manifest)?;
    if read.manifest.caller != manifest.caller {
        checked = check(folder.path, &read.manifest.caller)?;
    }
    Ok(Some((read, checked)))
}

fn lock(folder: &Path) -> Result<FolderLock> {
    std::fs::create_dir_all(folder)
        .map_err(|error| refuse(folder, "folder", "one that can be made", error))?;
    FolderLock::take(folder)
}

/// Key of the texts that all ranks have alike. Texts of rank `r` alone have `#r` behind it.
const KEY: &str = "remembered";

/// Texts under names, such as a serialized random generator, that a rank's checkpoint stores and a
/// resume restores.
///
/// Each rank has its own texts. They come back on as many ranks as saved them, and on another
/// number of ranks only if all had the same texts.
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
        comms: &mut Comms<'_>,
        caller: &mut BTreeMap<String, String>,
    ) -> Result<(), PlanError> {
        let own = if self.0.is_empty() {
            String::new()
        } else {
            serde_json::to_string(&self.0).unwrap_or_default()
        };
        let all = comms.gather_texts(&own)?;
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

    /// Replaces all texts by this rank's texts in a checkpoint.
    pub fn restore(&mut self, topology: Topology, caller: &BTreeMap<String, String>) {
        let of_rank = |rank: usize| caller.get(&format!("{KEY}#{rank}"));
        let as_many = of_rank(topology.world.saturating_sub(1)).is_some()
            && of_rank(topology.world).is_none();
        let own = caller.get(KEY).or_else(|| of_rank(topology.rank).filter(|_| as_many));
        let read = own.and_then(|text| serde_json::from_str(text).ok());
        self.0 = read.unwrap_or_default();
    }
}
