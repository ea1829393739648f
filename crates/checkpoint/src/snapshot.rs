//! Snapshot of a rank's part of a checkpoint, copied from its run.

use std::sync::OnceLock;

use fusestep_planner::{BorrowedParams, List, PartImage, RunImage, RunToSave, Tensors};
use fusestep_tensor::DType;

use crate::refusal::refuse;
use crate::shard_file::{InModel, TensorPart};
use crate::values::SavedList;
use crate::{CheckpointFolder, Result, counts, lists, own_values, values};

/// A rank's part of a checkpoint at one moment. Later snapshots reuse its memory, so that only the
/// first copy waits for pages.
#[derive(Debug, Default)]
pub(crate) struct Snapshot {
    pub(crate) image: RunImage,
    /// Names of the image's parts in the checkpoint.
    keys: Vec<String>,
    /// This rank's counts, where ranks have counts of their own.
    counts: Option<Counts>,
    /// Tensors with values that are infinite or NaN, once the tensors are written.
    non_finite: OnceLock<Vec<String>>,
}

/// Counts of a rank under their name.
#[derive(Debug)]
struct Counts {
    key: String,
    bytes: Vec<u8>,
}

/// A file that a rank writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum File {
    /// Whole parameters under their own names.
    Model,
    Shard,
}

impl Snapshot {
    /// Copies what a rank saves.
    pub(crate) fn take(&mut self, run: RunToSave<'_>, folder: CheckpointFolder<'_>) -> Result<()> {
        self.non_finite = OnceLock::new();
        check_borrowed(run.plan.tensors(), run.params, folder)?;
        self.image.take(run)?;
        let (image, rank) = (&self.image, self.image.topology.rank);
        let key = |part: &PartImage| lists::key_of(image, part.param, part.list, rank);
        self.keys = image.parts.iter().map(key).collect();
        for (part, key) in image.parts.iter().zip(&self.keys) {
            let List::Role(role) = part.list else {
                continue;
            };
            let PartImage { param, dtype, .. } = *part;
            let saved = SavedList { param, role, dtype, bytes: image.bytes(part) };
            values::check_saved(image, saved)
                .map_err(|(expected, found)| refuse(folder.path, key, expected, found))?;
        }
        self.counts = own_values::open_run(image).map(|_| Counts {
            key: own_values::progress_key(rank),
            bytes: counts::to_bytes(&image.counts),
        });
        Ok(())
    }

    /// The parts of one file, in order: the model's or the shard's.
    pub(crate) fn parts(&self, file: File) -> Vec<TensorPart<'_>> {
        let (image, of_model) = (&self.image, file == File::Model);
        let parts = image.parts.iter().zip(&self.keys);
        let parts = parts.filter(|(part, _)| part.whole == of_model);
        let mut parts: Vec<_> = parts.map(|(part, key)| part_of(image, part, key)).collect();
        if let Some(Counts { key, bytes }) = self.counts.as_ref().filter(|_| !of_model) {
            let (tensor, dtype) = (key.as_str(), DType::U8);
            parts.push(TensorPart {
                tensor,
                dtype,
                first: 0,
                bytes,
                of_model: None,
                non_finite: 0,
            });
        }
        parts
    }

    /// Tensors with values that are infinite or NaN, once the tensors are written.
    pub(crate) fn non_finite(&self) -> &[String] {
        self.non_finite.get().map_or(&[], Vec::as_slice)
    }

    /// Remembers the tensors of these parts that have infinite or NaN values.
    pub(crate) fn tell_non_finite(&self, parts: &[TensorPart<'_>]) {
        let found = parts.iter().filter(|part| part.non_finite > 0);
        let mut names: Vec<String> = found.map(|part| part.tensor.to_owned()).collect();
        names.dedup();
        let _ = self.non_finite.set(names);
    }
}

fn part_of<'a>(image: &'a RunImage, part: &'a PartImage, key: &'a str) -> TensorPart<'a> {
    let PartImage { param, list, dtype, first, whole, .. } = part;
    let (bytes, param) = (image.bytes(part), &image.params[*param]);
    let non_finite = match list {
        List::Role(role) if !whole => values::non_finite_of(*role, *dtype, bytes),
        _ => 0,
    };
    let of_model = whole.then_some(InModel { name: &param.name, shape: &param.shape });
    TensorPart { tensor: key, dtype: *dtype, first: *first, bytes, of_model, non_finite }
}

/// Refuses a save in which both the caller and the state keep the parameters, or neither does.
pub(crate) fn check_borrowed(
    tensors: Tensors,
    params: Option<&dyn BorrowedParams>,
    folder: CheckpointFolder<'_>,
) -> Result<()> {
    let borrowed = tensors == Tensors::Borrowed;
    if borrowed == params.is_some() {
        return Ok(());
    }
    let (expected, found) = if borrowed {
        ("the parameters that the caller keeps", "a state alone")
    } else {
        ("a state that keeps its parameters", "the caller's as well")
    };
    Err(refuse(folder.path, "parameters", expected, found))
}
