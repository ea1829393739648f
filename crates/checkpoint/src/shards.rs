//! Tensors in the files of a generation: ranks write ranges of tensors, and readers put whole
//! tensors together from all files.

use std::collections::{HashMap, HashSet};
use std::path::Path;

#[cfg(doc)]
use fusestep_planner::PlanError;
use fusestep_tensor::Quoted;
use fusestep_tensor_file::TensorFile;

use crate::Result;
use crate::commits::commit;
use crate::generation::{Generation, remove_failed};
use crate::manifest::{Manifest, ShardSpec, TensorSpec};
use crate::refusal::refuse;
use crate::shard_file::{
    InModel, TensorPart, first_key, read_shard, shard_len, tensor_key, write_model, write_shard,
};
use crate::snapshot::{File, Snapshot};
use crate::values::{self, SavedTensors, WholeTensors};
use crate::{CheckpointFolder, OpenRun};

/// Most files that a checkpoint is written as.
pub const MAX_SHARDS: usize = 1 << 16;

/// Most times that a reader begins again because a run has saved meanwhile.
const MOST_TRIES: usize = 100;

/// Files that a rank has written; none if other ranks save the same values.
#[derive(Clone, Debug, Default)]
pub(crate) struct Written {
    pub(crate) model: Option<ShardSpec>,
    pub(crate) shard: Option<ShardSpec>,
}

impl Manifest {
    /// Reads a checkpoint whole, of the newest generation if a run saves meanwhile.
    ///
    /// # Errors
    /// As [`Manifest::read`] and [`Manifest::read_tensors`].
    pub fn read_whole<'a>(folder: impl Into<CheckpointFolder<'a>>) -> Result<(Self, WholeTensors)> {
        let folder = folder.into();
        let (manifest, tensors) = Self::read(folder)?.read_newest(folder)?;
        Ok((manifest, tensors.whole))
    }

    /// The tensors of this checkpoint, or of the newest generation if a run saves meanwhile.
    pub(crate) fn read_newest(&self, folder: CheckpointFolder<'_>) -> Result<(Self, SavedTensors)> {
        let mut manifest = self.clone();
        for _ in 0..MOST_TRIES {
            match manifest.read_noted(folder) {
                Ok(tensors) => return Ok((manifest, tensors)),
                Err(error) => {
                    let now = Self::read(folder)?;
                    if now == manifest {
                        return Err(error);
                    }
                    manifest = now;
                }
            }
        }
        let tensors = manifest.read_noted(folder)?;
        Ok((manifest, tensors))
    }

    /// Reads every file, compares it with its checksum and puts the tensors together.
    ///
    /// # Errors
    /// [`PlanError::Checkpoint`] naming the file, and the tensor where it can be told, that
    /// is missing, damaged or foreign.
    /// # Cost
    /// The whole checkpoint in memory, once for the files being read and once for the tensors.
    pub fn read_tensors<'a>(
        &self,
        folder: impl Into<CheckpointFolder<'a>>,
    ) -> Result<WholeTensors> {
        Ok(self.read_noted(folder.into())?.whole)
    }

    /// The tensors of [`Self::read_tensors`], and the counts of infinite and NaN values that their
    /// writers have noted.
    fn read_noted(&self, folder: CheckpointFolder<'_>) -> Result<SavedTensors> {
        self.check_lengths(folder)?;
        let mut whole = Whole::default();
        for shard in &self.shards {
            let path = folder.join(&self.generation).join(&shard.file);
            let file = read_shard(folder, &path, shard)?;
            for name in file.entries().keys() {
                self.place(&file, name, &mut whole)?;
            }
        }
        let path = folder.join(&self.generation);
        for (name, spec) in &self.tensors {
            let ranges = whole.ranges.remove(name).unwrap_or_default();
            check_covered(&path, name, spec.shape.numel(), ranges)?;
            whole.tensors.whole.entry(name.clone()).or_default();
        }
        Ok(whole.tensors)
    }

    /// Puts one range of a file into its tensor.
    fn place(&self, file: &TensorFile, name: &str, whole: &mut Whole) -> Result<()> {
        let path = file.path();
        let tensor = file.metadata().get(&tensor_key(name));
        let tensor = tensor.map_or(name, String::as_str);
        let Some((tensor, spec)) = self.tensors.get_key_value(tensor) else {
            return Err(refuse(path, name, "a tensor of the manifest", "another"));
        };
        let expected = format!("{} {}", spec.dtype, spec.shape);
        let entry = &file.entries()[name];
        if entry.element_type() != Some(spec.dtype) {
            return Err(refuse(path, name, &expected, entry.dtype_name()));
        }
        let width = spec.dtype.len_bytes();
        let bytes = file.bytes(name).unwrap_or_default();
        let numel = (bytes.len() / width) as u64;
        let first = match file.metadata().get(&first_key(name)) {
            None => Some(0),
            Some(text) => text.parse::<u64>().ok(),
        };
        let range = first.and_then(|first| Some((first, first.checked_add(numel)?)));
        let Some((first, end)) = range.filter(|(_, end)| *end <= spec.shape.numel()) else {
            let from = file.metadata().get(&first_key(name));
            let from = from.map_or("0", String::as_str);
            let found = format!("{numel} elements from {} on", Quoted(from));
            return Err(refuse(path, name, &expected, found));
        };
        let noted = if self.has_checksum() { values::noted_in(file, name)? } else { None };
        if let Some(count) = noted {
            let sum = whole.tensors.non_finite.entry(tensor.clone()).or_default();
            *sum = sum.saturating_add(count);
        }
        let place = whole.tensors.whole.entry(tensor.clone()).or_default();
        // `check_lengths` has compared the tensors with the files, so this takes no more memory
        // than they do on disk.
        place.resize(spec.shape.numel() as usize * width, 0);
        place[first as usize * width..end as usize * width].copy_from_slice(bytes);
        let ranges = whole.ranges.entry(tensor.clone()).or_default();
        ranges.push((first, end));
        Ok(())
    }

    /// Compares the tensors' lengths with those of the files, so that a manifest cannot ask for
    /// more memory than the files take on disk.
    fn check_lengths(&self, folder: CheckpointFolder<'_>) -> Result<()> {
        let mut on_disk = 0u64;
        for shard in &self.shards {
            let found = shard_len(folder, &self.generation, shard)?;
            on_disk = on_disk.saturating_add(found);
        }
        let needed = self.tensors.values().try_fold(0u64, |sum, spec| {
            let numel = spec.shape.numel();
            let len_bytes = numel.checked_mul(spec.dtype.len_bytes() as u64)?;
            sum.checked_add(len_bytes)
        });
        if needed.is_some_and(|needed| needed <= on_disk) {
            return Ok(());
        }
        let expected = format!("tensors of at most the {on_disk} bytes of all files");
        let path = folder.join(&self.generation);
        Err(refuse(&path, "tensors", &expected, "longer ones"))
    }

    /// Checks that the files of all ranks are there. Ranks without a common file system would each
    /// see their own only.
    pub(crate) fn check_shards_seen(&self, folder: CheckpointFolder<'_>) -> Result<()> {
        let path = folder.join(&self.generation);
        for shard in &self.shards {
            let _ = folder.kind_soon(&path.join(&shard.file));
            shard_len(folder, &self.generation, shard)?;
        }
        Ok(())
    }

    /// Writes the same tensors again as a checkpoint of `count` files. If a run saves meanwhile,
    /// the tensors are those of the newest generation.
    ///
    /// # Errors
    /// As [`Self::read_tensors`]; [`PlanError::File`].
    pub fn reshard<'a>(
        &self,
        from: impl Into<CheckpointFolder<'a>>,
        to: impl Into<CheckpointFolder<'a>>,
        count: usize,
    ) -> Result<Self> {
        let (manifest, tensors) = self.read_newest(from.into())?;
        manifest.write_whole(&tensors, to.into(), count)
    }

    /// Writes tensors as a checkpoint of `count` files.
    pub(crate) fn write_whole(
        &self,
        tensors: &SavedTensors,
        to: CheckpointFolder<'_>,
        count: usize,
    ) -> Result<Self> {
        if !(1..=MAX_SHARDS).contains(&count) {
            let expected = format!("1 to {MAX_SHARDS}");
            return Err(refuse(to.path, "number of files", &expected, count));
        }
        let generation = Generation::begin(to, self.step)?;
        let written = self.write_generation(tensors, to, count, &generation);
        written.inspect_err(|_| remove_failed(to, &generation))
    }

    fn write_generation(
        &self,
        tensors: &SavedTensors,
        to: CheckpointFolder<'_>,
        count: usize,
        generation: &Generation,
    ) -> Result<Self> {
        let mut manifest = self.clone();
        manifest.generation = generation.name();
        manifest.checkpoint = generation.checkpoint();
        manifest.shards.clear();
        let parts = self.tensors.iter().filter_map(|(tensor, spec)| {
            let of_model = Some(self.of_model(tensor, spec)?);
            let (bytes, dtype) = (tensors.bytes(tensor), spec.dtype);
            Some(TensorPart { tensor, dtype, first: 0, bytes, of_model, non_finite: 0 })
        });
        let parts: Vec<TensorPart<'_>> = parts.collect();
        if !parts.is_empty() {
            let spec = write_model(to, &manifest.generation, &parts)?;
            manifest.shards.push(spec);
        }
        let in_model: HashSet<&str> = parts.iter().map(|part| part.tensor).collect();
        for shard in 0..count as u64 {
            let mut parts = Vec::new();
            for (name, spec) in &self.tensors {
                if in_model.contains(name.as_str()) {
                    continue;
                }
                let (numel, count) = (spec.shape.numel(), count as u64);
                let bound = |at: u64| at * (numel / count) + at.min(numel % count);
                let (first, end) = (bound(shard), bound(shard + 1));
                let width = spec.dtype.len_bytes();
                let bytes = &tensors.bytes(name)[first as usize * width..end as usize * width];
                parts.push(TensorPart {
                    tensor: name,
                    dtype: spec.dtype,
                    first,
                    bytes,
                    of_model: None,
                    non_finite: match tensors.non_finite.get(name) {
                        Some(_) => spec.dtype.non_finite(bytes),
                        None => 0,
                    },
                });
            }
            let spec = write_shard(to, &manifest.generation, shard as usize, &parts)?;
            manifest.shards.push(spec);
        }
        commit(manifest, to)
    }

    /// A tensor's name in the model's file, if the tensor goes there. Parameters that all ranks
    /// share go there, and rank 0's parameters if each rank has its own.
    fn of_model<'a>(&self, tensor: &'a str, spec: &'a TensorSpec) -> Option<InModel<'a>> {
        let averages = self.open.as_ref().is_some_and(OpenRun::averages);
        let key = if averages { tensor.strip_suffix("#0").unwrap_or(tensor) } else { tensor };
        let name = key.strip_suffix("@param")?;
        let sliced = self.open.iter().flat_map(|open| &open.slices);
        let fits = !name.is_empty() && name != "__metadata__";
        let whole = fits && sliced.into_iter().all(|slice| slice != name);
        whole.then_some(InModel { name, shape: &spec.shape })
    }
}

/// Writes a rank's files of a generation, synced.
pub(crate) fn write_snapshot(
    folder: CheckpointFolder<'_>,
    generation: &str,
    rank: usize,
    snapshot: &Snapshot,
) -> Result<Written> {
    let mut written = Written::default();
    let model = snapshot.parts(File::Model);
    if !model.is_empty() {
        written.model = Some(write_model(folder, generation, &model)?);
    }
    let shard = snapshot.parts(File::Shard);
    if !shard.is_empty() {
        snapshot.tell_non_finite(&shard);
        written.shard = Some(write_shard(folder, generation, rank, &shard)?);
    }
    Ok(written)
}

/// Tensors being put together.
#[derive(Default)]
struct Whole {
    tensors: SavedTensors,
    /// Ranges of elements found of each tensor, in any order.
    ranges: HashMap<String, Vec<(u64, u64)>>,
}

/// Refuses ranges that leave elements out or overlap.
fn check_covered(path: &Path, name: &str, numel: u64, mut ranges: Vec<(u64, u64)>) -> Result<()> {
    ranges.retain(|(first, end)| first < end);
    ranges.sort_unstable();
    let mut covered = 0;
    for (first, end) in ranges {
        if first != covered {
            let what = if first < covered { "again" } else { "next" };
            let expected = format!("each of {numel} elements once, {covered} after {covered}");
            return Err(refuse(path, name, &expected, format_args!("element {first} {what}")));
        }
        covered = end;
    }
    if covered == numel {
        return Ok(());
    }
    Err(refuse(path, name, format_args!("{numel} elements in all shards"), covered))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_covered_once_each_in_any_order_or_the_ranges_are_refused() {
        let check = |numel, ranges: &[(u64, u64)]| {
            let checked = check_covered(Path::new("shard"), "w", numel, ranges.to_vec());
            checked.map_err(|error| error.to_string())
        };
        for whole in [&[(0, 10)][..], &[(4, 10), (0, 4)], &[(0, 0), (0, 10)]] {
            assert_eq!(check(10, whole), Ok(()));
        }
        assert_eq!(check(0, &[]), Ok(()));
        for (ranges, found) in [
            (&[(0, 5), (4, 10)][..], "element 4 again"),
            (&[(0, 10), (0, 10)], "element 0 again"),
            (&[(0, 4), (5, 10)], "element 5 next"),
            (&[(1, 10)], "element 1 next"),
            (&[(0, 9)], "found 9"),
            (&[], "found 0"),
        ] {
            let error = check(10, ranges).unwrap_err();
            assert!(error.contains(found), "{ranges:?}: {error}");
        }
    }
}
