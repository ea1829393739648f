//! The sums over whole tensors that LARS and LAMB need, where shards of many ranks lie on devices:
//! nothing waits for the host.
//!
//! ```text
//! leaves of this rank, in rows ─► all-reduce ─► chunks ─► tensors, with every update
//! ```
//! A row has the sums of up to eight leaves that lie in one rank's part, so that every row is one
//! rank's. All others have zeros there, and adding up over ranks changes no bit of a sum.

use std::ops::Range;

use fusestep_collective::{Operation, ReduceOp};
use fusestep_launch::{
    Backend, Batch, Batchable, Buffer, CHUNK_UNITS, ChunkSums, FoldLeaves, GroupValues,
    LEAF_ELEMENTS, MAX_SUMS, ROW_VALUES, ResidentTable, TensorSums, batches, leaf_place,
};
use fusestep_tensor::DType;

use crate::device_norm::table;
use crate::leaves::chunks_of_leaves;
use crate::step::RankStep;
use crate::{Optimize, Plan, Result, Stage, State, TableKind, gather, launches, reduce};

const ROW_BYTES: usize = ROW_VALUES as usize * size_of::<f64>();

const ROW_ELEMENTS: u64 = CHUNK_UNITS * LEAF_ELEMENTS;

/// What lies on the device for it, and where.
pub(crate) struct DeviceTrust {
    /// The sums of every leaf of all tensors.
    rows: Box<dyn Buffer>,
    /// Where each leaf's are among them.
    index: Box<dyn Buffer>,
    /// The leaves of every chunk.
    places: Box<dyn Buffer>,
    /// The sums of every chunk.
    sums: Box<dyn Buffer>,
    /// The chunks of every parameter.
    tensors: Box<dyn Buffer>,
    /// The rows of each parameter, in the order of its elements.
    of_params: Vec<Vec<Row>>,
    /// What this rank sums up while the same tensors take part; `None` if that is not known.
    pub(crate) own: Option<Vec<OwnSums>>,
    /// Whether the sums are those of the step under way.
    filled: bool,
}

/// Elements of a parameter whose leaves have a row.
#[derive(Clone)]
struct Row {
    elements: Range<u64>,
    number: u64,
}

/// What this rank sums up of one stage.
pub(crate) struct OwnSums {
    stage: Optimize,
    runs: Vec<Run>,
}

/// Batches whose rows follow each other.
struct Run {
    batches: Vec<Batch>,
    /// The first of the rows.
    first: u64,
    /// Where tables are resident, once it is built.
    table: Option<Box<dyn ResidentTable>>,
}

/// How far stage `trust` goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaves {
    /// Tables are built where they are missing.
    Tables,
    /// And the sums are taken.
    Sums,
}

impl DeviceTrust {
    /// The memory, if the plan may run the stage on the backend's device: made before any call is
    /// under way there, for which a driver may wait.
    pub(crate) fn of(plan: &Plan, backend: &dyn Backend) -> Result<Option<Self>> {
        if backend.device().is_none()
            || !sums_may_stay_on_devices(plan)
            || !plan.stages.contains(&Stage::Trust)
        {
            return Ok(None);
        }
        let (of_params, count) = rows_of_leaves(plan)?;
        let (mut index, mut leaves) = (Vec::new(), Vec::with_capacity(of_params.len()));
        for rows in &of_params {
            let first = index.len();
            for row in rows {
                let numel = row.elements.end - row.elements.start;
                for leaf in 0..numel.div_ceil(LEAF_ELEMENTS) {
                    let Some(place) = leaf_place(row.number, leaf) else {
                        return Ok(None);
                    };
                    index.push(place);
                }
            }
            leaves.push(first..index.len());
        }
        let (places, tensors) = chunks_of_leaves(&leaves);
        Ok(Some(Self {
            rows: backend.allocate(count as usize * ROW_BYTES)?,
            sums: backend.allocate(places.len() * size_of::<[f64; MAX_SUMS]>())?,
            index: table(backend, bytemuck::cast_slice(&index))?,
            places: table(backend, bytemuck::cast_slice(&places))?,
            tensors: table(backend, bytemuck::cast_slice(&tensors))?,
            of_params,
            own: None,
            filled: false,
        }))
    }

    /// The learning rate of each rule is another from now on.
    pub(crate) fn set_lr(
        &mut self,
        backend: &dyn Backend,
        lr_of: impl Fn(&Optimize) -> f64,
    ) -> Result<()> {
        for OwnSums { stage, runs } in self.own.iter_mut().flatten() {
            for table in runs.iter_mut().filter_map(|run| run.table.as_mut()) {
                backend.set_table_lr(table.as_mut(), lr_of(stage))?;
            }
        }
        Ok(())
    }

    /// The sums for updates, if they are those of the step under way.
    pub(crate) fn sums(&self) -> Option<TensorSums<'_>> {
        self.filled.then_some(TensorSums::Device(ChunkSums {
            sums: self.sums.as_ref(),
            tensors: self.tensors.as_ref(),
        }))
    }

    fn own_sums(&self, plan: &Plan, (stage, all): &(Optimize, Vec<Batch>)) -> Result<OwnSums> {
        let members = &plan.storages[stage.storage].members;
        let mut runs: Vec<(Vec<Batchable>, u64)> = Vec::new();
        let mut next = None;
        for (batch, record) in
            all.iter().flat_map(|batch| batch.records.iter().map(move |record| (batch, record)))
        {
            let rows = &self.of_params[members[record.tensor as usize] as usize];
            let end = record.first_element + record.numel;
            let first = rows.partition_point(|row| row.elements.end <= record.first_element);
            for row in rows[first..].iter().take_while(|row| row.elements.start < end) {
                if next != Some(row.number) {
                    runs.push((Vec::new(), row.number));
                }
                next = Some(row.number + 1);
                let (run, _) = runs.last_mut().expect("a run has begun with its first row");
                run.push(Batchable {
                    tensor: record.tensor,
                    first_element: row.elements.start,
                    numel: row.elements.end - row.elements.start,
                    group: batch.groups[usize::from(record.group)],
                });
            }
        }
        let kernel = plan.kernel_of(members[0])?;
        let limits = plan.limits_of(kernel.as_ref());
        let runs = runs.into_iter().map(|(run, first)| {
            let layout = kernel.argument_layout();
            Ok(Run { batches: batches(kernel.entry(), run, layout, limits)?, first, table: None })
        });
        Ok(OwnSums { stage: stage.clone(), runs: runs.collect::<Result<_>>()? })
    }
}

/// Whether sums over gradients and tensors of several ranks can stay on devices: nothing else
/// has to know them on the host.
pub(crate) fn sums_may_stay_on_devices(plan: &Plan) -> bool {
    let has_slices = plan.storages.iter().any(|spec| spec.distributed);
    plan.reduces() && !plan.update_norms && !has_slices
}

/// The rows of each parameter whose rule takes sums over it, and how many there are.
fn rows_of_leaves(plan: &Plan) -> Result<(Vec<Vec<Row>>, u64)> {
    let mut rows = vec![Vec::new(); plan.params.len()];
    let mut count = 0;
    for (storage, spec) in plan.storages.iter().enumerate() {
        let Some(&member) = spec.members.first() else {
            continue;
        };
        if plan.kernel_of(member)?.normed().is_none() {
            continue;
        }
        let of_storage = plan.buckets.iter().filter(|b| b.storage == storage);
        let ranks = 0..plan.shard_place().world;
        let mut parts: Vec<Range<u64>> = of_storage
            .flat_map(|bucket| ranks.clone().map(|rank| bucket.part(rank)))
            .filter(|part| !part.is_empty())
            .collect();
        parts.sort_unstable_by_key(|part| part.start);
        for (tensor, &member) in spec.members.iter().enumerate() {
            let tensor = spec.layout.range(tensor);
            let first = parts.partition_point(|part| part.end <= tensor.start);
            for part in parts[first..].iter().take_while(|part| part.start < tensor.end) {
                let start = part.start.max(tensor.start) - tensor.start;
                let end = part.end.min(tensor.end) - tensor.start;
                for at in (start..end).step_by(ROW_ELEMENTS as usize) {
                    rows[member as usize]
                        .push(Row { elements: at..end.min(at + ROW_ELEMENTS), number: count });
                    count += 1;
                }
            }
        }
    }
    Ok((rows, count))
}

/// Stage `trust` on devices: enqueues all of it. Whether it runs there.
pub(crate) fn sum_tensors(step: &mut RankStep<'_, '_>) -> Result<bool> {
    let Some(mut own) = step.state.exchange.trust_on_device.take() else {
        return Ok(false);
    };
    own.filled = false;
    let done =
        if step.comms.is_on_device_of(step.backend) { fill_sums(step, &mut own) } else { Ok(()) };
    let filled = own.filled;
    step.state.exchange.trust_on_device = Some(own);
    done.map(|()| filled)
}

/// Builds what a recording of the stage cannot wait for; updates look for sums on the device
/// from now on.
pub(crate) fn build_tables(plan: &Plan, state: &mut State, backend: &dyn Backend) -> Result<()> {
    let Some(mut own) = state.exchange.trust_on_device.take() else {
        return Ok(());
    };
    own.filled = true;
    let built = own_leaves(plan, state, backend, &mut own, Leaves::Tables);
    state.exchange.trust_on_device = Some(own);
    built
}

/// Takes the sums of this rank's leaves.
fn own_leaves(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    own: &mut DeviceTrust,
    leaves: Leaves,
) -> Result<()> {
    let mut parts: Vec<OwnSums> = match own.own.take() {
        Some(parts) => parts,
        None => {
            let parts = state.exchange.trust.iter();
            parts.map(|part| own.own_sums(plan, part)).collect::<Result<_, _>>()?
        }
    };
    let resident = state.tables.kind == TableKind::Resident;
    let rows = &mut own.rows;
    for OwnSums { stage, runs } in parts.iter_mut().filter(|part| !part.runs.is_empty()) {
        let rule = state.storages[stage.storage].spec.rule;
        let values: Vec<GroupValues> = launches::group_values(state, rule).collect();
        reduce::with_gradients(plan, state, stage.bucket, |state| {
            for run in runs {
                let Some(launch) = launches::with_batches(plan, state, stage, &run.batches) else {
                    continue;
                };
                let place = (rows.as_ref(), run.first);
                if resident && run.table.is_none() {
                    run.table = backend.place_leaf_sums(&launch, &values, place)?;
                }
                match &run.table {
                    _ if leaves == Leaves::Tables => {}
                    Some(table) => backend.leaf_sums_of_table(&launch, table.as_ref())?,
                    None => backend.leaf_sums_into(&launch, (rows.as_mut(), run.first))?,
                }
            }
            Ok(())
        })?;
    }
    own.own = Some(parts);
    Ok(())
}

fn fill_sums(step: &mut RankStep<'_, '_>, own: &mut DeviceTrust) -> Result<()> {
    step.backend.zero(own.rows.as_mut())?;
    own_leaves(step.plan, step.state, step.backend, own, Leaves::Sums)?;
    let call = (Operation::AllReduce(ReduceOp::Sum), DType::F64, None);
    let all = 0..own.rows.len_bytes();
    gather::on_device(step.backend, step.comms, (&mut own.rows, all), call)?;
    step.backend.fold_leaves(FoldLeaves {
        leaves: own.rows.as_ref(),
        index: Some(own.index.as_ref()),
        places: own.places.as_ref(),
        partials: own.sums.as_mut(),
    })?;
    own.filled = true;
    Ok(())
}
