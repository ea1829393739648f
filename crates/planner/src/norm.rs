//! The stage that reads all gradients before anything is updated, and the memory it works in.

use fusestep_amp::{GradientRule, LossScale, MaxNorm};
use fusestep_launch::{
    Backend, Batch, Buffer, Conclude, ControlBlock, ControlRule, LaunchReport,
    MultiTensorReduction, Reduce, SquareSum, TensorPartials, tree_sum,
};
use fusestep_tensor::{Role, counted};

use crate::batches::LaunchCount;
use crate::display::bytes;
use crate::run::Executor;
use crate::storage::StorageState;
use crate::{GradientRead, Norm, Plan, Result, Stage, State, Verdict, batches};

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Gradients {
    pub(crate) max_norm: Option<MaxNorm>,
    pub(crate) loss_scale: Option<LossScale>,
}

impl Gradients {
    /// The rule of the control block; `None` if no pass asks for one.
    pub(crate) fn rule(&self) -> Option<GradientRule> {
        if self.max_norm.is_none() && self.loss_scale.is_none() {
            return None;
        }
        Some(GradientRule {
            max_norm: self.max_norm.unwrap_or(MaxNorm::UNLIMITED),
            loss_scale: self.loss_scale.unwrap_or(LossScale::unscaled()),
        })
    }
}

/// Adds the stage, once the passes have said where tensors lie.
pub(crate) fn place(plan: &mut Plan) -> Result<()> {
    if plan.gradients.rule().is_none() {
        return Ok(());
    }
    let rank = plan.shard_place().rank;
    let mut reads = Vec::new();
    let read =
        |storage, bucket, elements| GradientRead { storage, bucket, elements, batches: Vec::new() };
    // Of reduced gradients every rank reads its part, even where it has all of them.
    for (index, bucket) in plan.buckets.iter().enumerate() {
        reads.push(read(bucket.storage, Some(index), bucket.part(rank)));
    }
    for (storage, spec) in plan.storages.iter().enumerate() {
        if plan.buckets.is_empty() || spec.distributed {
            reads.push(read(storage, None, 0..spec.layout.total_numel()));
        }
    }
    let mut launches = LaunchCount::default();
    for read in &mut reads {
        read.batches = batches::of_read(plan, read, |_| true)?;
        launches.add(&read.batches, "amp_norm")?;
    }
    let norm = Norm { reads };
    let reason = format!(
        "{} of gradients are read once, in {}, before the first update",
        bytes(plan.gradient_bytes()),
        counted(norm.launches() as u64, "launch"),
    );
    plan.note("norm", Verdict::Applied, reason);
    plan.stages.insert(0, Stage::Norm(norm));
    Ok(())
}

/// The memory of the stage: partial sums, the sums of tensors and the control block.
pub(crate) struct NormState {
    /// One for each storage.
    kernels: Vec<Box<dyn MultiTensorReduction>>,
    pub(crate) rule: GradientRule,
    scalars: Vec<u8>,
    partials: Box<dyn Buffer>,
    tensors: Box<dyn Buffer>,
    /// Of each parameter's gradient; nothing if others write the control block.
    pub(crate) sums: Box<dyn Buffer>,
    pub(crate) control: Box<dyn Buffer>,
    /// What `control` holds, as far as the host knows.
    pub(crate) block: ControlBlock,
    /// The loss scale of the gradients whose sums are in `sums`.
    /// `None` if only what they add up to tells.
    pub(crate) scale_of_sums: Option<f64>,
    /// Whether `tensors` is what the schedule asks for.
    pub(crate) placed: bool,
}

impl NormState {
    /// The memory for a plan; `None` if the plan has no such stage.
    pub(crate) fn allocate(plan: &Plan, backend: &dyn Backend) -> Result<Option<Self>> {
        let (Some(rule), Some(norm)) = (plan.gradients.rule(), plan.norm_stage()) else {
            return Ok(None);
        };
        let mut kernels = Vec::new();
        // Several ranks form sums and control block together, on the host.
        let alone = plan.topology.world == 1;
        for read in norm.reads.iter().filter(|_| alone) {
            kernels.extend(batches::reader_of(plan, read.storage)?);
        }
        let chunks = if alone { norm.chunks() as usize } else { 0 };
        let tensors = plan.params.len();
        let mut state = Self {
            kernels,
            rule,
            scalars: rule.scalars(),
            partials: backend.allocate(chunks * size_of::<SquareSum>())?,
            tensors: backend.allocate(tensors * size_of::<TensorPartials>())?,
            sums: backend.allocate(tensors * size_of::<SquareSum>())?,
            control: backend.allocate(size_of::<ControlBlock>())?,
            block: GradientRule::first_block(rule.loss_scale),
            scale_of_sums: Some(rule.loss_scale.scale()),
            placed: false,
        };
        state.block.write(backend, state.control.as_mut())?;
        Ok(Some(state))
    }

    /// Writes the control block from the sums of chunks, the stage's own or, of several ranks on
    /// devices, those of all; says nothing to the host.
    pub(crate) fn conclude(
        &mut self,
        backend: &dyn Backend,
        of_ranks: Option<(&dyn Buffer, &dyn Buffer)>,
    ) -> Result<LaunchReport> {
        let own = (self.partials.as_ref(), self.tensors.as_ref());
        let (partials, tensors) = of_ranks.unwrap_or(own);
        Ok(backend.conclude(Conclude {
            rule: &self.rule,
            scalars: &self.scalars,
            partials,
            tensors,
            sums: self.sums.as_mut(),
            control: self.control.as_mut(),
        })?)
    }

    /// The read of a storage's gradients, whose first partial sum has this number.
    pub(crate) fn reduce<'a>(
        &'a mut self,
        (index, storage): (usize, &'a StorageState),
        batches: &'a [Batch],
        first_partial: u64,
    ) -> Reduce<'a> {
        Reduce {
            kernel: self.kernels[index].as_ref(),
            batches,
            offsets: storage.spec.layout.offsets(),
            members: &storage.spec.members,
            list: storage.lists.iter().find(|list| list.role() == Role::Grad),
            partials: self.partials.as_mut(),
            first_partial,
        }
    }

    /// Writes where each tensor's partial sums lie, if the schedule has changed.
    pub(crate) fn place(
        &mut self,
        plan: &Plan,
        reads: &[Vec<Batch>],
        backend: &dyn Backend,
    ) -> Result<()> {
        if self.placed {
            return Ok(());
        }
        let mut table = vec![TensorPartials::default(); plan.params.len()];
        let mut next = 0;
        for (storage, batches) in reads.iter().enumerate() {
            let chunk_elements = u64::from(self.kernels[storage].chunk_elements());
            for record in batches.iter().flat_map(|batch| &batch.records) {
                let member = plan.storages[storage].members[record.tensor as usize];
                let place = &mut table[member as usize];
                // A tensor that goes on in the next launch goes on with the next partial sum.
                if place.count == 0 {
                    place.first = next;
                }
                let chunks = record.numel.div_ceil(chunk_elements);
                place.count += chunks;
                next += chunks;
            }
        }
        backend.write(self.tensors.as_mut(), 0, bytemuck::cast_slice(&table))?;
        self.placed = true;
        Ok(())
    }

    /// The power of two that the norm of all gradients was divided by, from the sums of tensors in
    /// plan order.
    pub(crate) fn scale_of(&self, sums: &[SquareSum]) -> f64 {
        let all = tree_sum(sums.len(), |tensor| sums[tensor]);
        let scale = (all.sum.sqrt() / self.block.grad_norm).log2().round().exp2();
        if scale.is_finite() && scale > 0.0 { scale } else { self.block.loss_scale }
    }

    pub(crate) fn loss_scale(&self) -> LossScale {
        let ControlBlock { loss_scale, good_steps, bad_steps, .. } = self.block;
        let start = self.rule.loss_scale;
        start.restored(loss_scale, good_steps, bad_steps).unwrap_or(start)
    }

    /// Goes on from a loss scale of a checkpoint.
    pub(crate) fn restore(
        &mut self,
        backend: &dyn Backend,
        loss_scale: LossScale,
        skipped: u64,
    ) -> Result<()> {
        self.block = ControlBlock { skipped, ..GradientRule::first_block(loss_scale) };
        Ok(self.block.write(backend, self.control.as_mut())?)
    }

    /// Reads back what the last `steps` steps decided; waits for a device.
    pub(crate) fn settle(&mut self, backend: &dyn Backend, steps: u64) -> Result<()> {
        // With steps between, the scale before the last one was never on the host.
        self.scale_of_sums = (steps == 1).then_some(self.block.loss_scale);
        self.block = ControlBlock::read(backend, self.control.as_ref())?;
        Ok(())
    }
}

/// Runs the stage: one read of the gradients, then the control block.
pub(crate) fn run(
    plan: &Plan,
    state: &mut State,
    executor: &mut Executor<'_>,
) -> Result<LaunchReport> {
    let Some(norm) = &mut state.norm else {
        return Ok(LaunchReport::default());
    };
    norm.place(plan, &state.schedule.norm, executor.backend())?;
    let mut report = LaunchReport::default();
    let mut first_partial = 0;
    for (index, batches) in state.schedule.norm.iter().enumerate() {
        let storage = &state.storages[index];
        if batches.is_empty() {
            continue;
        }
        let reduce = norm.reduce((index, storage), batches, first_partial);
        let done = match state.tables.reads.get(index).and_then(Option::as_ref) {
            Some(table) => executor.backend().reduce_table(reduce, table.as_ref())?,
            None => executor.reduce(reduce)?,
        };
        report.launches += done.launches;
        first_partial += batches.iter().map(|b| u64::from(b.chunks)).sum::<u64>();
    }
    report.launches += norm.conclude(executor.backend(), None)?.launches;
    Ok(report)
}
