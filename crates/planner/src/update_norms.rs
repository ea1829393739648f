//! How far parameters moved: the memory for the sums that updates leave, and their readers.

use std::ops::Range;

use fusestep_launch::{
    Backend, Buffer, CHUNK_ELEMENTS, UnitSums, UpdateSums, fold_units, tree_sum,
};

use crate::comms::Comms;
use crate::exchange::{Scope, sum_over};
use crate::step::RankStep;
use crate::{Plan, Result, State, StepReport, StorageSpec};

/// Places for the sums over what updates change in one storage.
pub(crate) struct UpdateRows {
    /// A [`UnitSums`] for each chunk.
    rows: Box<dyn Buffer>,
    /// Row of each tensor's first chunk, and one past the last tensor's.
    firsts: Vec<u64>,
}

impl UpdateRows {
    pub(crate) fn allocate(spec: &StorageSpec, backend: &dyn Backend) -> Result<Self> {
        let mut firsts = Vec::with_capacity(spec.members.len() + 1);
        let mut next = 0;
        firsts.push(next);
        for tensor in 0..spec.members.len() {
            let chunks = spec.layout.numel(tensor);
            next += chunks.div_ceil(u64::from(CHUNK_ELEMENTS));
            firsts.push(next);
        }
        Ok(Self {
            // A row is smaller than the chunk's elements, of which there is a list as long.
            rows: backend.allocate(next as usize * size_of::<UnitSums>())?,
            firsts,
        })
    }

    /// What a launch borrows of them.
    pub(crate) fn lend(&mut self) -> UpdateSums<'_> {
        UpdateSums { rows: self.rows.as_mut(), firsts: &self.firsts }
    }
}

/// What is kept to read the sums without allocating.
#[derive(Clone)]
pub(crate) struct UpdateReader {
    /// Of each chunk, parameter by parameter; 0 of those that took no part.
    chunks: Vec<f64>,
    /// Each parameter's first chunk, and one past the last's.
    firsts: Vec<usize>,
    /// A copy of rows that the host cannot read in place.
    copy: Vec<UnitSums>,
}

impl UpdateReader {
    pub(crate) fn of(plan: &Plan) -> Option<Self> {
        if !plan.update_norms {
            return None;
        }
        let chunks = plan.params.iter().map(|param| chunks_of(param.numel()));
        let firsts = std::iter::once(0).chain(chunks.scan(0, |next, chunks| {
            *next += chunks;
            Some(*next)
        }));
        let firsts: Vec<usize> = firsts.collect();
        Some(Self {
            chunks: vec![0.0; firsts.last().copied().unwrap_or(0)],
            firsts,
            copy: Vec::new(),
        })
    }

    /// Where those of one parameter are.
    fn place(&self, param: usize) -> Range<usize> {
        self.firsts[param]..self.firsts[param + 1]
    }

    pub(crate) fn params(&self) -> usize {
        self.firsts.len() - 1
    }

    pub(crate) fn sum(&self, param: usize) -> f64 {
        sum_of(&self.chunks[self.place(param)])
    }
}

/// The sum over chunks of a parameter, or over parameters.
fn sum_of(sums: &[f64]) -> f64 {
    tree_sum(sums.len(), |at| sums[at])
}

/// Chunks of the fixed tree that so many elements have.
pub(crate) fn chunks_of(numel: u64) -> usize {
    // Tensors are allocated, so their element counts fit a usize.
    numel.div_ceil(u64::from(CHUNK_ELEMENTS)) as usize
}

/// Writes the norm of what the step that `report` is of has changed.
pub(crate) fn report(
    state: &mut State,
    backend: &dyn Backend,
    report: &mut StepReport,
) -> Result<()> {
    if let Some((_, total)) = &state.exchange.update_sums {
        report.update_norm = Some(total.sqrt());
        return Ok(());
    }
    // Taken out, so that the rest of the state can be read.
    let Some(mut reader) = state.update_reader.take() else {
        return Ok(());
    };
    let read = read_sums(state, backend, &mut reader, report.skipped);
    let sum = tree_sum(reader.params(), |param| reader.sum(param));
    report.update_norm = Some(sum.sqrt());
    state.update_reader = Some(reader);
    read
}

/// Reads the chunks of each parameter that the last step's batches have; a skipped one has none.
pub(crate) fn read_sums(
    state: &State,
    backend: &dyn Backend,
    reader: &mut UpdateReader,
    skipped: bool,
) -> Result<()> {
    let UpdateReader { chunks, firsts: places, copy } = reader;
    chunks.fill(0.0);
    if skipped {
        return Ok(());
    }
    let mut copied = None;
    for (&storage, batches) in state.updated.iter().zip(&state.schedule.batches) {
        let own = &state.storages[storage];
        let Some(UpdateRows { rows, firsts }) = &own.update_rows else {
            continue;
        };
        let units: &[UnitSums] = match rows.host() {
            Some(bytes) => bytemuck::cast_slice(bytes),
            None => {
                if copied != Some(storage) {
                    let count = rows.len_bytes() / size_of::<UnitSums>();
                    copy.resize(count, UnitSums::default());
                    backend.read(rows.as_ref(), 0, bytemuck::cast_slice_mut(copy))?;
                    copied = Some(storage);
                }
                copy
            }
        };
        for record in batches.iter().flat_map(|batch| &batch.records) {
            let before = chunks_of(record.first_element);
            let count = chunks_of(record.numel);
            let from = firsts[record.tensor as usize] as usize + before;
            let to = places[own.spec.members[record.tensor as usize] as usize] + before;
            let units = units[from..from + count].iter();
            for (chunk, units) in chunks[to..to + count].iter_mut().zip(units) {
                *chunk = fold_units(units);
            }
        }
    }
    Ok(())
}

/// Tells all ranks how far each parameter moved.
pub(crate) fn share(step: &mut RankStep<'_, '_>, skipped: bool) -> Result<()> {
    // Taken out, so that the rest of the state can be read.
    let Some(mut own) = step.state.update_reader.take() else {
        return Ok(());
    };
    let read = read_sums(step.state, step.backend, &mut own, skipped);
    let sums = read.and_then(|()| sums_of_ranks(step.plan, step.comms, &own));
    step.state.update_reader = Some(own);
    step.state.exchange.update_sums = Some(sums?);
    Ok(())
}

/// The sum over each parameter, and the total over all ranks.
fn sums_of_ranks(
    plan: &Plan,
    comms: &mut Comms<'_>,
    own: &UpdateReader,
) -> Result<(Vec<f64>, f64)> {
    let distributed = |param: usize| plan.is_distributed(param);
    let mut told = own.chunks.clone();
    if plan.zero != crate::ZeroStage::None && plan.reduces() {
        for param in (0..own.params()).filter(|&param| distributed(param)) {
            told[own.place(param)].fill(0.0);
        }
        sum_over(comms, &mut told, Scope::ShardGroup)?;
    }
    let sum = |param: usize| {
        if distributed(param) { own.sum(param) } else { sum_of(&told[own.place(param)]) }
    };
    let sums: Vec<f64> = (0..own.params()).map(sum).collect();
    let total = total_over_slices(plan, comms, &sums, distributed)?;
    Ok((sums, total))
}

/// The sum over all parameters, each rank's slices of distributed ones counted once: those of
/// rank 0 in their places, the others behind.
fn total_over_slices(
    plan: &Plan,
    comms: &mut Comms<'_>,
    sums: &[f64],
    distributed: impl Fn(usize) -> bool,
) -> Result<f64> {
    let params: Vec<usize> = (0..sums.len()).filter(|&param| distributed(param)).collect();
    let (rank, world) = (plan.topology.rank, plan.topology.world);
    let mut all = vec![0.0; world * params.len()];
    for (at, &param) in params.iter().enumerate() {
        all[rank * params.len() + at] = sums[param];
    }
    if !all.is_empty() {
        sum_over(comms, &mut all, Scope::World)?;
    }
    let mut of_first = sums.to_vec();
    for (at, &param) in params.iter().enumerate() {
        of_first[param] = all[at];
    }
    of_first.extend(all.get(params.len()..).unwrap_or_default());
    Ok(sum_of(&of_first))
}
