//! Sums that ranks exchange, and the place of each leaf's sum.

use std::borrow::Cow;
use std::ops::Range;

use fusestep_amp::norm_kernel;
use fusestep_launch::{Backend, Batch, Buffer, MultiTensorReduction, SquareSum};

use crate::error::Result;
use crate::plan::batches;
use crate::plan::group::ParameterGroups;
use crate::plan::leaves::{SliceLeaves, chunks_of_leaves, place_leaves};
use crate::plan::stage::{Optimize, Stage};
use crate::plan::value::Plan;
use crate::run::memory::device_sums::{DeviceTrust, sums_may_stay_on_devices, table};

/// Memory of sums that ranks exchange.
#[derive(Default)]
pub(crate) struct Exchange {
    /// The leaves of each parameter among all of this rank; those of distributed ones come last.
    pub(crate) leaves: Vec<Range<usize>>,
    /// The count of leaves of parameters that ranks share.
    pub(crate) shared: usize,
    /// The leaves of all ranks' slices.
    pub(crate) slices: SliceLeaves,
    /// The kernel of each read of stage `norm`.
    pub(crate) readers: Vec<Box<dyn MultiTensorReduction>>,
    /// Parts of updates that this rank sums for stage `trust`.
    pub(crate) trust: Vec<(Optimize, Vec<Batch>)>,
    /// Memory of stage `norm`, if that stage runs on a device.
    pub(crate) norm_on_device: Option<DeviceNorm>,
    /// Memory of stage `trust`, if that stage runs on a device.
    pub(crate) trust_on_device: Option<DeviceTrust>,
    /// Sum of squares of the last update's change of each parameter, and the total over all ranks.
    pub(crate) update_sums: Option<(Vec<f64>, f64)>,
}

impl Exchange {
    /// The memory for a plan; empty for one rank.
    pub(crate) fn of(plan: &Plan) -> Result<Self> {
        if plan.topology.world == 1 {
            return Ok(Self::default());
        }
        let (leaves, shared) = place_leaves(plan);
        let mut readers = Vec::new();
        for read in plan.norm_stage().iter().flat_map(|norm| &norm.reads) {
            readers.push(norm_kernel(plan.storages[read.storage].grad_dtype())?);
        }
        let slices = SliceLeaves::of(plan);
        let mut exchange = Self { leaves, shared, slices, readers, ..Self::default() };
        exchange.refresh(plan, |_| true, &plan.groups)?;
        Ok(exchange)
    }

    /// Makes the batches of sums anew, for the tensors that take part.
    pub(crate) fn refresh(
        &mut self,
        plan: &Plan,
        takes_part: impl Fn(usize) -> bool,
        groups: &ParameterGroups,
    ) -> Result<()> {
        self.trust.clear();
        if let Some(trust) = &mut self.trust_on_device {
            trust.own = None;
        }
        if !plan.stages.contains(&Stage::Trust) {
            return Ok(());
        }
        let rank = plan.shard_place().rank;
        for stage in plan.optimize_stages() {
            let elements = match stage.bucket {
                Some(bucket) => plan.buckets[bucket].part(rank),
                None if plan.storages[stage.storage].distributed => stage.elements.clone(),
                None => continue,
            };
            // Other groups of parameters may have rules without such sums.
            let member = plan.storages[stage.storage].members[0];
            if plan.kernel_of(member)?.normed().is_none() {
                continue;
            }
            let own = Optimize { elements, ..stage.clone() };
            let batches = batches::of_update(plan, &own, &takes_part, groups)?;
            self.trust.push((own, batches));
        }
        Ok(())
    }

    /// The count of leaves that this rank knows of.
    pub(crate) fn count(&self) -> usize {
        let ends = self.leaves.iter().map(|leaves| leaves.end);
        ends.max().unwrap_or(0)
    }

    /// The values of a parameter's leaves over all ranks that have parts of it, `width` for each:
    /// out of this rank's vector, or out of the slices of all.
    pub(crate) fn of_param<'a>(
        &self,
        param: usize,
        width: usize,
        own: &'a [f64],
        slices: Option<&'a [f64]>,
    ) -> Cow<'a, [f64]> {
        let within = |leaves: &Range<usize>| leaves.start * width..leaves.end * width;
        match (self.slices.of_ranks.get(&param), slices) {
            // Those of every rank, in rank order, make up the tensor.
            (Some(of_ranks), Some(slices)) => {
                let of_ranks = of_ranks.iter().flat_map(|leaves| &slices[within(leaves)]);
                Cow::Owned(of_ranks.copied().collect())
            }
            _ => Cow::Borrowed(&own[within(&self.leaves[param])]),
        }
    }
}

/// Memory of stage `norm` on a device.
pub(crate) struct DeviceNorm {
    /// The sum of every leaf of all parameters.
    pub(crate) leaves: Box<dyn Buffer>,
    /// The leaves of every chunk.
    pub(crate) places: Box<dyn Buffer>,
    /// The sum of every chunk.
    pub(crate) partials: Box<dyn Buffer>,
    /// The chunks of every parameter.
    pub(crate) tensors: Box<dyn Buffer>,
}

impl DeviceNorm {
    /// The memory, if the plan may run the stage on the backend's device: made before any call is
    /// under way there, for which a driver may wait.
    pub(crate) fn of(
        plan: &Plan,
        exchange: &Exchange,
        backend: &dyn Backend,
    ) -> Result<Option<Self>> {
        let may = plan.norm_stage().is_some() && sums_may_stay_on_devices(plan);
        if backend.device().is_none() || !may {
            return Ok(None);
        }
        let (places, tensors) = chunks_of_leaves(&exchange.leaves);
        Ok(Some(Self {
            leaves: backend.allocate(exchange.count() * size_of::<SquareSum>())?,
            partials: backend.allocate(places.len() * size_of::<SquareSum>())?,
            places: table(backend, bytemuck::cast_slice(&places))?,
            tensors: table(backend, bytemuck::cast_slice(&tensors))?,
        }))
    }
}
