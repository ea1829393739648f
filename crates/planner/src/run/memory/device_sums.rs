//! Sums over leaves on devices, and the tables of their places.

use std::ops::Range;

use fusestep_launch::{
    Backend, Batch, Batchable, Buffer, CHUNK_UNITS, ChunkSums, LEAF_ELEMENTS, MAX_SUMS, ROW_VALUES,
    ResidentTable, TensorSums, batches, leaf_place,
};

use crate::error::Result;
use crate::plan::leaves::chunks_of_leaves;
use crate::plan::stage::{Optimize, Stage};
use crate::plan::value::Plan;
use crate::run::memory::device;

/// A table in the backend's memory.
pub(crate) fn table(backend: &dyn Backend, bytes: &[u8]) -> Result<Box<dyn Buffer>> {
    let mut buffer = backend.allocate(bytes.len())?;
    backend.write(buffer.as_mut(), 0, bytes)?;
    Ok(buffer)
}

const ROW_BYTES: usize = ROW_VALUES as usize * size_of::<f64>();

const ROW_ELEMENTS: u64 = CHUNK_UNITS * LEAF_ELEMENTS;

/// Memory of stage `trust` on a device, and the places in it.
pub(crate) struct DeviceTrust {
    /// The sums of every leaf of all tensors.
    pub(crate) rows: Box<dyn Buffer>,
    /// The row of each leaf among them.
    pub(crate) index: Box<dyn Buffer>,
    /// The leaves of every chunk.
    pub(crate) places: Box<dyn Buffer>,
    /// The sums of every chunk.
    pub(crate) sums: Box<dyn Buffer>,
    /// The chunks of every parameter.
    tensors: Box<dyn Buffer>,
    /// The rows of each parameter, in the order of its elements.
    of_params: Vec<Vec<Row>>,
    /// Sums of this rank while the same tensors take part; `None` if these are not known.
    pub(crate) own: Option<Vec<OwnSums>>,
    /// Whether the sums are those of the step under way.
    pub(crate) filled: bool,
}

/// Elements of a parameter whose leaves have a row.
#[derive(Clone)]
struct Row {
    elements: Range<u64>,
    number: u64,
}

/// Sums of this rank for one stage.
pub(crate) struct OwnSums {
    pub(crate) stage: Optimize,
    pub(crate) runs: Vec<Run>,
}

/// Batches whose rows follow each other.
pub(crate) struct Run {
    pub(crate) batches: Vec<Batch>,
    /// The first of the rows.
    pub(crate) first: u64,
    /// The table on the device, where tables are resident and it is built.
    pub(crate) table: Option<Box<dyn ResidentTable>>,
}

/// Extent of the work of stage `trust`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaves {
    /// Missing tables are built.
    Tables,
    /// Missing tables are built and the sums are taken.
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

    /// Sets the learning rate of each rule from now on.
    pub(crate) fn set_lr(
        &mut self,
        backend: &dyn Backend,
        lr_of: impl Fn(&Optimize) -> f64,
    ) -> Result<()> {
        for OwnSums { stage, runs } in self.own.iter_mut().flatten() {
            for table in runs.iter_mut().filter_map(|run| run.table.as_mut()) {
                device::of_tables(backend)?.set_table_lr(table.as_mut(), lr_of(stage))?;
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

    pub(crate) fn own_sums(
        &self,
        plan: &Plan,
        (stage, all): &(Optimize, Vec<Batch>),
    ) -> Result<OwnSums> {
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
