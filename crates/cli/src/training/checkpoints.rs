//! Checkpoints of a run: read to go on from, and written while the run trains. Beside the tensors
//! they hold the position of the run in its images.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{bail, ensure};
use fusestep_checkpoint::Manifest;
use fusestep_planner::PlanError;

use super::run::Training;
use super::saved_as::{check, keep, saved_as};
use crate::output::{non_finite, warn, warn_non_finite};
use crate::places;
use crate::train::args::MOST_EPOCHS;

/// Makes the folder of a new checkpoint. A checkpoint to go on from must be there already; rank 0
/// checks this for all ranks, and no folder is made.
pub(super) fn make_folder(folder: &Path, resume: bool, first: bool) -> anyhow::Result<()> {
    if !resume {
        return places::make_folder("--checkpoint", folder);
    }
    ensure!(
        !first || Manifest::read_if_any(folder)?.is_some(),
        "--checkpoint {}: expected a checkpoint to go on from, found {}; give its folder, or \
         leave --resume out to begin one there",
        folder.display(),
        if folder.is_dir() { "a folder without a manifest.json" } else { "no such folder" }
    );
    Ok(())
}

/// Refuses to replace a checkpoint without --resume, or another program's files.
pub(super) fn check_folder(folder: &Path, resume: bool) -> anyhow::Result<()> {
    let found = Manifest::read_if_any(folder)?;
    if let Some(manifest) = found.filter(|_| !resume) {
        bail!(
            "--checkpoint {}: expected a folder without a checkpoint, found one of step {}; give \
             --resume to go on from it, or another folder",
            folder.display(),
            manifest.step
        );
    }
    Ok(())
}

impl Training<'_> {
    /// Goes on from the checkpoint, if that is asked for; returns the position of the run in it.
    pub(super) fn resume(&mut self) -> anyhow::Result<Option<Position>> {
        let folder = self.args.checkpoint.as_ref();
        let Some(folder) = folder.filter(|_| self.args.resume) else {
            return Ok(None);
        };
        if self.args.any_settings {
            self.session.state_mut().any_settings();
        }
        let batch = super::batch_of(self.args, self.options);
        let of_epoch = self.task.samples_of_epoch().div_ceil(batch);
        let (own, any) = (saved_as(self.args, self.options), self.args.any_settings);
        let resumed = self.session.resume_with(folder, |folder, texts| {
            check(folder, &own, texts, any)?;
            position_in(folder, texts, of_epoch)
        })?;
        self.session.meet()?;
        Ok(resumed)
    }

    /// Warns of parameters of the checkpoint that are not finite; all ranks call it together.
    pub(super) fn warn_of_resumed(&mut self) -> anyhow::Result<()> {
        let gathered = self.session.gather(&self.names)?;
        let params = self.session.plan().params().iter().enumerate();
        let found = params.filter(|(at, param)| param.dtype.non_finite(gathered.bytes(*at)) > 0);
        let names: Vec<&str> = found.map(|(_, param)| param.name.as_str()).collect();
        if let Some(folder) = self.args.checkpoint.as_ref()
            && let Some(told) = non_finite(names)
            && self.session.plan().topology().rank == 0
        {
            let place = folder.display();
            self.bar.suspend(|| {
                warn(&format!(
                    "warning: {place}: {told}, and the run that goes on from it keeps them; give an \
                     earlier --checkpoint"
                ));
            });
        }
        Ok(())
    }

    /// Begins a save, which is written while training goes on.
    pub(super) fn save(&mut self, position: Position) -> anyhow::Result<()> {
        let Some(folder) = &self.args.checkpoint else {
            return Ok(());
        };
        let mut texts = position.texts();
        keep(saved_as(self.args, self.options), &mut texts);
        self.session.begin_save_with(folder, texts)?;
        self.warn();
        Ok(())
    }

    /// Waits for the save in flight.
    pub(super) fn finish_saves(&mut self) -> anyhow::Result<()> {
        self.session.finish_saves()?;
        self.warn();
        Ok(())
    }

    /// Warns once which tensors that this rank has saved are not finite.
    pub(super) fn warn(&mut self) {
        let names = self.session.non_finite();
        if let Some(folder) = &self.args.checkpoint
            && !names.is_empty()
            && !std::mem::replace(&mut self.warned, true)
        {
            let names = names.iter().map(String::as_str);
            self.bar.suspend(|| warn_non_finite(folder, names));
        }
    }
}

/// The position in a checkpoint's texts.
fn position_in(
    folder: &Path,
    texts: &BTreeMap<String, String>,
    of_epoch: usize,
) -> Result<Position, PlanError> {
    let position = Position::read(texts, of_epoch);
    position.ok_or_else(|| PlanError::Checkpoint {
        path: folder.display().to_string(),
        what: "position".to_owned(),
        expected: "where the run was".to_owned(),
        found: "none that a run has".to_owned(),
    })
}

/// Position of a run in its images.
#[derive(Clone, Copy, Debug)]
pub(super) struct Position {
    /// Epochs that are over.
    pub(super) epochs: usize,
    /// Batches of the next epoch that are over, and the sum of their images' losses.
    pub(super) batches: usize,
    pub(super) loss_sum: f64,
    /// Mean loss of the last epoch that is over; NaN before the first.
    pub(super) last_loss: f64,
}

impl Default for Position {
    fn default() -> Self {
        Self { epochs: 0, batches: 0, loss_sum: 0.0, last_loss: f64::NAN }
    }
}

impl Position {
    /// The texts that are saved.
    fn texts(self) -> BTreeMap<String, String> {
        // Bits instead of decimals, so that means are the same to the last bit.
        let bits = |value: f64| format!("{:016x}", value.to_bits());
        let entries = [
            ("epochs", self.epochs.to_string()),
            ("batches", self.batches.to_string()),
            ("loss_sum", bits(self.loss_sum)),
            ("last_loss", bits(self.last_loss)),
        ];
        entries.map(|(key, value)| (key.to_owned(), value)).into()
    }

    /// The position in saved texts; `None` if it is no position of a run whose epochs have
    /// `of_epoch` batches.
    fn read(texts: &BTreeMap<String, String>, of_epoch: usize) -> Option<Self> {
        let count = |key: &str, most| {
            let count = texts.get(key)?.parse().ok();
            count.filter(|&count: &usize| count <= most)
        };
        let bits = |key: &str| u64::from_str_radix(texts.get(key)?, 16).ok();
        Some(Self {
            epochs: count("epochs", MOST_EPOCHS)?,
            batches: count("batches", of_epoch)?,
            loss_sum: f64::from_bits(bits("loss_sum")?),
            // Older checkpoints lack this entry.
            last_loss: bits("last_loss").map_or(f64::NAN, f64::from_bits),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_is_within_a_run() {
        let saved = |epochs, batches| {
            let position = Position { epochs, batches, ..Position::default() };
            position.texts()
        };
        let read = Position::read(&saved(MOST_EPOCHS, 45), 45).unwrap();
        assert_eq!((read.epochs, read.batches), (MOST_EPOCHS, 45));
        for (epochs, batches) in [(MOST_EPOCHS + 1, 0), (usize::MAX, 0), (1, 46), (1, usize::MAX)] {
            assert!(Position::read(&saved(epochs, batches), 45).is_none());
        }
    }
}
