//! Snapshot of a rank's part of a checkpoint, copied from its state.

use std::ops::Range;
use std::sync::OnceLock;

use fusestep_launch::{Backend, BackendError};
use fusestep_tensor::{DType, Role, Shape};

use super::lists;
use super::refusal::refuse;
use super::shard_file::TensorPart;
use super::{CheckpointFolder, progress, values};
use crate::run::memory::storage::Held;
use crate::{Plan, Result, State, Tensors, ZeroStage};

/// State, backend and parameters of the run that a save stores.
#[derive(Clone, Copy)]
pub struct RunToSave<'a> {
    /// Optimizer state and counts, and parameters unless the caller keeps them.
    pub state: &'a State,
    /// The state's backend.
    pub backend: &'a dyn Backend,
    /// Parameters that the caller keeps ([`Tensors::Borrowed`]).
    pub params: Option<&'a dyn BorrowedParams>,
}

/// State, backend and parameters of the run that a resume writes to.
pub struct RunToLoad<'a> {
    /// Optimizer state and counts, and parameters unless the caller keeps them.
    pub state: &'a mut State,
    /// The state's backend.
    pub backend: &'a dyn Backend,
    /// Parameters that the caller keeps ([`Tensors::Borrowed`]).
    pub params: Option<&'a dyn BorrowedParams>,
}

impl std::fmt::Debug for RunToLoad<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunToLoad").field("step", &self.state.step()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for RunToSave<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunToSave").field("step", &self.state.step()).finish_non_exhaustive()
    }
}

/// Parameters that the caller's framework keeps ([`Tensors::Borrowed`]), by their positions in the
/// plan, as saving and resuming read and write them.
pub trait BorrowedParams {
    /// Copies a whole parameter.
    ///
    /// # Errors
    /// Errors of the framework; a length that is not the parameter's.
    fn read(&self, param: usize, bytes: &mut [u8]) -> Result<(), BackendError>;

    /// Writes a whole parameter in place.
    ///
    /// # Errors
    /// As [`BorrowedParams::read`].
    fn write(&self, param: usize, bytes: &[u8]) -> Result<(), BackendError>;
}

/// A rank's part of a checkpoint at one moment. Later snapshots reuse its memory, so that only the
/// first copy waits for pages.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    bytes: Vec<u8>,
    parts: Vec<Placed>,
    /// Tensors with values that are infinite or NaN, once the tensors are written.
    non_finite: OnceLock<Vec<String>>,
}

/// Consecutive elements of a tensor in a snapshot.
#[derive(Debug)]
struct Placed {
    tensor: String,
    dtype: DType,
    first: u64,
    place: Range<usize>,
    source: Source,
}

/// Source of the bytes of a part.
#[derive(Debug)]
enum Source {
    /// Elements of this rank's shard.
    Held(Role, usize, Held),
    /// A whole parameter, with its name and shape in the model's file.
    Param(usize, (String, Shape)),
    /// Sums and counts, which are small or have been copied; empty once they are in the snapshot.
    Copied(Vec<u8>),
}

impl Snapshot {
    /// The parts of one file, in order: the model's or the shard's.
    pub(super) fn parts(&self, file: File) -> impl Iterator<Item = TensorPart<'_>> {
        let in_model = |placed: &Placed| matches!(placed.source, Source::Param(..));
        let parts = self.parts.iter().filter(move |part| in_model(part) == (file == File::Model));
        parts.map(|Placed { tensor, dtype, first, place, source }| {
            let bytes = &self.bytes[place.clone()];
            let (of_model, non_finite) = match source {
                Source::Held(role, ..) => (None, values::non_finite_of(*role, *dtype, bytes)),
                Source::Param(_, of_model) => (Some(of_model), 0),
                Source::Copied(_) => (None, 0),
            };
            TensorPart { tensor, dtype: *dtype, first: *first, bytes, of_model, non_finite }
        })
    }

    /// Tensors with values that are infinite or NaN, once the tensors are written.
    pub(super) fn non_finite(&self) -> &[String] {
        self.non_finite.get().map_or(&[], Vec::as_slice)
    }

    /// Remembers the tensors of these parts that have infinite or NaN values.
    pub(super) fn tell_non_finite(&self, parts: &[TensorPart<'_>]) {
        let found = parts.iter().filter(|part| part.non_finite > 0);
        let mut names: Vec<String> = found.map(|part| part.tensor.to_owned()).collect();
        names.dedup();
        let _ = self.non_finite.set(names);
    }

    /// Makes room for so many bytes; the old content is lost.
    fn make_room(&mut self, folder: CheckpointFolder<'_>, len_bytes: usize) -> Result<()> {
        if let Some(more) = len_bytes.checked_sub(self.bytes.len()) {
            self.bytes.try_reserve_exact(more).map_err(|_| {
                let expected = format!("{len_bytes} bytes beside the state");
                refuse(folder.path, "memory", &expected, "less; save in line, or on more ranks")
            })?;
            self.bytes.resize(len_bytes, 0);
        }
        Ok(())
    }
}

/// A file that a rank writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum File {
    /// Whole parameters under their own names.
    Model,
    Shard,
}

pub(super) fn take(
    plan: &Plan,
    run: RunToSave<'_>,
    folder: CheckpointFolder<'_>,
    into: &mut Snapshot,
) -> Result<()> {
    into.parts.clear();
    into.non_finite = OnceLock::new();
    check_borrowed(plan, run.params, folder)?;
    parts_to_save(plan, run.state, run.backend, &mut into.parts)?;
    let len_bytes = into.parts.last().map_or(0, |placed| placed.place.end);
    into.make_room(folder, len_bytes)?;
    for Placed { tensor, dtype, place, source, .. } in &mut into.parts {
        let bytes = &mut into.bytes[place.clone()];
        match (source, run.params) {
            (Source::Held(role, param, held), _) => {
                run.state.read_held(run.backend, *role, *param, held, bytes)?;
                values::check_saved(run.state, *param, *role, *dtype, bytes)
                    .map_err(|(expected, found)| refuse(folder.path, tensor, &expected, found))?;
            }
            (Source::Param(param, _), Some(params)) => params.read(*param, bytes)?,
            (Source::Param(_, (name, _)), None) => {
                run.state.read(run.backend, Role::Param, name, bytes)?;
            }
            (Source::Copied(own), _) => bytes.copy_from_slice(&std::mem::take(own)),
        }
    }
    Ok(())
}

/// Refuses a save in which both the caller and the state keep the parameters, or neither does.
pub(super) fn check_borrowed(
    plan: &Plan,
    params: Option<&dyn BorrowedParams>,
    folder: CheckpointFolder<'_>,
) -> Result<()> {
    let borrowed = plan.tensors == Tensors::Borrowed;
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

/// Lists the parts that this rank saves, one behind the other.
fn parts_to_save(
    plan: &Plan,
    state: &State,
    backend: &dyn Backend,
    parts: &mut Vec<Placed>,
) -> Result<()> {
    let mut add = |tensor: String, dtype: DType, elements: Range<u64>, source| {
        let start = parts.last().map_or(0, |placed: &Placed| placed.place.end);
        // Copies of any element type begin where its elements may lie.
        let start = start.next_multiple_of(8);
        let numel = (elements.end - elements.start) as usize;
        let place = start..start + numel * dtype.len_bytes();
        parts.push(Placed { tensor, dtype, first: elements.start, place, source });
    };
    let rank = plan.topology().rank;
    for (param, desc) in plan.params().iter().enumerate() {
        // Values that all ranks have alike are saved once.
        let shared = plan.has_own(param) || plan.saves_shared();
        for (role, dtype) in lists::saved_lists(plan, param)? {
            let key = lists::key(plan, param, role, rank);
            if role == Role::Param && in_model(plan, param) {
                if rank == 0 {
                    let named = (desc.name.clone(), desc.shape.clone());
                    add(key, dtype, 0..desc.numel(), Source::Param(param, named));
                    continue;
                } else if !plan.has_own(param) {
                    continue;
                }
            }
            if !shared {
                continue;
            }
            for held in state.shard_places(role, param)? {
                let elements = held.elements.clone();
                add(key.clone(), dtype, elements, Source::Held(role, param, held));
            }
        }
    }
    if let Some(open) = progress::open_run(plan, state) {
        progress::open_parts(plan, state, backend, &open, |tensor, dtype, first, bytes| {
            let numel = (bytes.len() / dtype.len_bytes()) as u64;
            add(tensor, dtype, first..first + numel, Source::Copied(bytes));
        })?;
    }
    Ok(())
}

/// Whether rank 0 saves a parameter whole in the model's file. At ZeRO stage 3 no rank has a whole
/// parameter, and a parameter in slices is never whole.
fn in_model(plan: &Plan, param: usize) -> bool {
    let name = &plan.params()[param].name;
    plan.zero() != ZeroStage::Three && !plan.is_distributed(param) && name != METADATA_NAME
}

/// Name of the texts in a safetensors file; no tensor can have that name.
const METADATA_NAME: &str = "__metadata__";
