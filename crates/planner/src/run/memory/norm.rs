//! Memory of stage `norm`: partial sums, the sums of tensors and the control block.

use fusestep_amp::{GradientRule, LossScale};
use fusestep_launch::{
    Backend, Batch, Buffer, Conclude, ControlBlock, ControlRule, LaunchReport,
    MultiTensorReduction, Reduce, SquareSum, TensorPartials, tree_sum,
};
use fusestep_tensor::Role;

use crate::error::Result;
use crate::plan::batches;
use crate::plan::value::Plan;
use crate::run::memory::storage::StorageState;

/// The memory of the stage: partial sums, the sums of tensors and the control block.
pub(crate) struct NormState {
    /// Kernel of each storage.
    kernels: Vec<Box<dyn MultiTensorReduction>>,
    pub(crate) rule: GradientRule,
    scalars: Vec<u8>,
    partials: Box<dyn Buffer>,
    tensors: Box<dyn Buffer>,
    /// Sums of each parameter's gradient; empty if others write the control block.
    pub(crate) sums: Box<dyn Buffer>,
    pub(crate) control: Box<dyn Buffer>,
    /// The content of `control`, as far as the host knows.
    pub(crate) block: ControlBlock,
    /// The loss scale of the gradients whose sums are in `sums`. `None` if it has to be derived
    /// from the sums.
    pub(crate) scale_of_sums: Option<f64>,
    /// Whether `tensors` fits the current schedule.
    pub(crate) placed: bool,
    /// The content of `tensors`; empty before the first.
    places: Vec<TensorPartials>,
    /// Sums over all gradients that the next step decides by, of which the plan's are a part.
    pub(crate) given: Option<Vec<SquareSum>>,
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
            places: Vec::new(),
            given: None,
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

    /// Writes the control block from the sums of these tensors, of which the plan's are a part. The
    /// block of the step before is the host's.
    pub(crate) fn conclude_over(&mut self, backend: &dyn Backend, all: &[SquareSum]) -> Result<()> {
        let total = tree_sum(all.len(), |tensor| all[tensor]);
        let block = self.rule.conclude(total, self.block);
        Ok(block.write(backend, self.control.as_mut())?)
    }

    /// The sums over each parameter's gradient, from the chunks that the stage has read.
    pub(crate) fn tensor_squares(&self, backend: &dyn Backend) -> Result<Vec<SquareSum>> {
        let count = self.partials.len_bytes() / size_of::<SquareSum>();
        let mut partials = vec![SquareSum::default(); count];
        backend.read(self.partials.as_ref(), 0, bytemuck::cast_slice_mut(&mut partials))?;
        let count = self.tensors.len_bytes() / size_of::<TensorPartials>();
        let mut places = vec![TensorPartials::default(); count];
        backend.read(self.tensors.as_ref(), 0, bytemuck::cast_slice_mut(&mut places))?;
        let sums = places.iter().map(|place| {
            tree_sum(place.count as usize, |chunk| partials[place.first as usize + chunk])
        });
        Ok(sums.collect())
    }

    /// The read with this index, of a storage's gradients, whose first partial sum has this number.
    pub(crate) fn reduce<'a>(
        &'a mut self,
        index: usize,
        storage: &'a StorageState,
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
        // A step that is recorded must not wait for a write, and needs none.
        if table != self.places {
            backend.write(self.tensors.as_mut(), 0, bytemuck::cast_slice(&table))?;
            self.places = table;
        }
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

    /// Sets the loss scale and the count of skipped steps from a checkpoint.
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

    /// Takes what the last step decided, as its control block says.
    pub(crate) fn take(&mut self, block: ControlBlock) {
        self.scale_of_sums = Some(self.block.loss_scale);
        self.block = block;
    }
}
