//! Sums that ranks tell each other: norms of gradients, of whole tensors and of updates, with the
//! bits of one rank that has everything.
//!
//! The fixed tree adds leaves of 1,024 elements, counted from a tensor's start. Parts of ranks end
//! with leaves wherever sums are taken, so every leaf is summed by one rank. Ranks add up vectors
//! of all leaves in which each has filled in its own: adding 0 to a sum of squares changes no bit.
//! Then all fold leaves into chunks, chunks into tensors and tensors into a total alike. Slices of
//! distributed parameters are gathered leaf by leaf and folded as the tensor that they make up.

use std::borrow::Cow;
use std::ops::Range;

use fusestep_amp::norm_kernel;
use fusestep_collective::{Operation, ReduceOp};
use fusestep_launch::{
    Backend, Batch, CHUNK_LEAVES, ControlBlock, ControlRule, LeafSquares, MAX_SUMS,
    MultiTensorReduction, SquareSum, TensorPartials, tree_sum,
};
use fusestep_tensor::{DType, Role};

use crate::comms::Comms;
use crate::device_norm::DeviceNorm;
use crate::device_trust::DeviceTrust;
use crate::group::ParameterGroups;
use crate::leaves::{chunk, chunk_squares, leaves_in, leaves_of, place_leaves};
use crate::step::RankStep;
use crate::{GradientRead, Optimize, Plan, Result, Stage, State, batches, launches, reduce};

/// The memory of sums that ranks tell each other.
#[derive(Default)]
pub(crate) struct Exchange {
    /// The leaves of each parameter among all of this rank; those of distributed ones come last.
    pub(crate) leaves: Vec<Range<usize>>,
    /// How many of them are of parameters that ranks share.
    shared: usize,
    /// The kernel of each read of stage `norm`.
    readers: Vec<Box<dyn MultiTensorReduction>>,
    /// What this rank sums for stage `trust`: for each update its own part.
    pub(crate) trust: Vec<(Optimize, Vec<Batch>)>,
    /// The memory of stage `norm` where that runs on devices.
    pub(crate) norm_on_device: Option<DeviceNorm>,
    /// That of stage `trust`.
    pub(crate) trust_on_device: Option<DeviceTrust>,
    /// For each parameter the sum over what the last update changed, and the total over all ranks.
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
        let mut exchange = Self { leaves, shared, readers, ..Self::default() };
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

    /// How many leaves this rank knows of.
    pub(crate) fn count(&self) -> usize {
        let ends = self.leaves.iter().map(|leaves| leaves.end);
        ends.max().unwrap_or(0)
    }

    /// The values of a parameter's leaves over all ranks that have parts of it, `width` for each:
    /// out of this rank's vector, or out of the slices of all.
    fn of_param<'a>(
        &self,
        param: usize,
        width: usize,
        (own, slices): (&'a [f64], &'a Slices),
    ) -> Cow<'a, [f64]> {
        let leaves = &self.leaves[param];
        let (start, end) = (leaves.start * width, leaves.end * width);
        if leaves.start < self.shared || slices.values.is_empty() {
            return Cow::Borrowed(&own[start..end]);
        }
        // Those of every rank, in rank order, make up the tensor.
        let before = self.shared * width;
        let ranks = slices.values.chunks_exact(slices.of_rank);
        Cow::Owned(ranks.flat_map(|rank| &rank[start - before..end - before]).copied().collect())
    }
}

/// Stage `norm` of several ranks on the host: decides on the step from the gradients of all.
/// Whether it is skipped.
pub(crate) fn decide(step: &mut RankStep<'_, '_>) -> Result<bool> {
    let mut squares = own_squares(step.plan, step.state, step.backend)?;
    let mut elsewhere = 0;
    let slices = if step.plan.reduces() {
        share(step.plan, &step.state.exchange, step.comms, &mut squares, 2)?
    } else {
        // Every rank has gradients of its own; only that some are not finite is everybody's
        // business.
        let own: f64 = squares.iter().skip(1).step_by(2).sum();
        let mut all = [own];
        sum_over(step.comms, &mut all, Scope::World)?;
        elsewhere = (all[0] - own) as u64;
        Slices::default()
    };
    let Some(norm) = &mut step.state.norm else {
        return Ok(false);
    };
    let mut partials = Vec::new();
    let mut tensors = Vec::with_capacity(step.plan.params.len());
    for param in 0..step.plan.params.len() {
        let first = partials.len() as u64;
        let leaves = step.state.exchange.of_param(param, 2, (&squares, &slices));
        partials.extend(chunk_squares(&leaves));
        tensors.push(TensorPartials { first, count: partials.len() as u64 - first });
    }
    if elsewhere > 0 {
        tensors.push(TensorPartials { first: partials.len() as u64, count: 1 });
        partials.push(SquareSum { sum: 0.0, non_finite: elsewhere });
    }
    let mut sums = vec![SquareSum::default(); tensors.len()];
    let mut block = ControlBlock::read(step.backend, norm.control.as_ref())?;
    norm.rule.run_host(&partials, &tensors, &mut sums, &mut block);
    block.write(step.backend, norm.control.as_mut())?;
    let own = &sums[..step.plan.params.len()];
    step.backend.write(norm.sums.as_mut(), 0, bytemuck::cast_slice(own))?;
    Ok(block.found != 0)
}

/// Adds up over ranks what each has filled in of the leaves they share, `width` values for
/// each, and brings the slices of all ranks together.
fn share(
    plan: &Plan,
    exchange: &Exchange,
    comms: &mut Comms<'_>,
    told: &mut [f64],
    width: usize,
) -> Result<Slices> {
    let (shared, own) = told.split_at_mut(exchange.shared * width);
    sum_over(comms, shared, Scope::ShardGroup)?;
    if own.is_empty() {
        return Ok(Slices::default());
    }
    let mut values = vec![0.0; plan.topology.world * own.len()];
    let at = plan.topology.rank * own.len();
    values[at..at + own.len()].copy_from_slice(own);
    let bytes = bytemuck::cast_slice_mut(&mut values);
    comms.in_place(Operation::AllGather, DType::F64, None, bytes)?;
    Ok(Slices { values, of_rank: own.len() })
}

/// The sums of squares of the leaves that this rank reads, each with the number of its elements
/// that are not finite; 0 for all others.
fn own_squares(plan: &Plan, state: &mut State, backend: &dyn Backend) -> Result<Vec<f64>> {
    let mut squares = vec![0.0; 2 * state.exchange.count()];
    let reads = plan.norm_stage().map_or(&[][..], |norm| &norm.reads);
    for (index, read) in reads.iter().enumerate() {
        let own = reduce::with_gradients(plan, state, read.bucket, |state| {
            let batches = &state.schedule.norm[index];
            let Some(leaves) = leaf_squares(plan, state, (index, read), batches) else {
                return Ok(Vec::new());
            };
            let mut sums = vec![SquareSum::default(); leaves.places().count()];
            backend.leaf_squares(leaves, &mut sums)?;
            Ok(sums)
        })?;
        let members = &plan.storages[read.storage].members;
        let places = leaves_in(&state.schedule.norm[index], members, &state.exchange.leaves);
        for (place, sum) in places.flatten().zip(own) {
            squares[2 * place] = sum.sum;
            squares[2 * place + 1] = sum.non_finite as f64;
        }
    }
    Ok(squares)
}

/// What a read of stage `norm` sums up in these batches; `None` where the caller lends gradients.
pub(crate) fn leaf_squares<'a>(
    plan: &Plan,
    state: &'a State,
    (index, read): (usize, &GradientRead),
    batches: &'a [Batch],
) -> Option<LeafSquares<'a>> {
    let storage = &state.storages[read.storage];
    let list = storage.spec.list(Role::Grad)?;
    let segment = plan.segment_start(read.bucket);
    Some(LeafSquares {
        kernel: state.exchange.readers[index].as_ref(),
        batches,
        offsets: storage.spec.layout.offsets(),
        list: &storage.lists[list],
        first: storage.spec.first_of(list, &read.elements, segment),
    })
}

/// Stage `trust` on the host: the sums over whole tensors that a layer-wise rule needs.
pub(crate) fn sum_tensors(step: &mut RankStep<'_, '_>) -> Result<()> {
    let mut told = vec![0.0; step.state.exchange.count() * MAX_SUMS];
    for index in 0..step.state.exchange.trust.len() {
        let (stage, batches) = step.state.exchange.trust[index].clone();
        if batches.is_empty() {
            continue;
        }
        let own = reduce::with_gradients(step.plan, step.state, stage.bucket, |state| {
            let records = batches.iter().flat_map(|batch| &batch.records);
            let count = records.map(|record| leaves_of(record.numel)).sum();
            let mut sums = vec![[0.0; MAX_SUMS]; count];
            if let Some(launch) = launches::with_batches(step.plan, state, &stage, &batches) {
                step.backend.leaf_sums(&launch, &mut sums)?;
            }
            Ok(sums)
        })?;
        let members = &step.plan.storages[stage.storage].members;
        let places = leaves_in(&batches, members, &step.state.exchange.leaves);
        for (place, sums) in places.flatten().zip(own) {
            told[place * MAX_SUMS..(place + 1) * MAX_SUMS].copy_from_slice(&sums);
        }
    }
    let slices = share(step.plan, &step.state.exchange, step.comms, &mut told, MAX_SUMS)?;
    let exchange = &step.state.exchange;
    for storage in &mut step.state.storages {
        let Some(sums) = &mut storage.tensor_sums else {
            continue;
        };
        for (sums, &member) in sums.iter_mut().zip(&storage.spec.members) {
            let leaves = exchange.of_param(member as usize, MAX_SUMS, (&told, &slices));
            let chunks: Vec<&[f64]> = leaves.chunks(CHUNK_LEAVES * MAX_SUMS).collect();
            *sums = tree_sum(chunks.len(), |at| {
                std::array::from_fn(|sum| {
                    let own = chunks[at].iter().copied().skip(sum).step_by(MAX_SUMS);
                    chunk(&own.collect::<Vec<f64>>())
                })
            });
        }
    }
    Ok(())
}

/// Values of the leaves of all ranks' slices of distributed parameters.
#[derive(Default)]
struct Slices {
    /// Those of one rank behind those of the rank before.
    values: Vec<f64>,
    /// How many each rank has.
    of_rank: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    World,
    ShardGroup,
}

/// Adds up a vector over ranks, each of which has filled in what is its own.
pub(crate) fn sum_over(comms: &mut Comms<'_>, values: &mut [f64], scope: Scope) -> Result<()> {
    if values.is_empty() {
        return Ok(());
    }
    let operation = Operation::AllReduce(ReduceOp::Sum);
    let bytes = bytemuck::cast_slice_mut(values);
    match scope {
        Scope::World => comms.in_place(operation, DType::F64, None, bytes)?,
        Scope::ShardGroup => comms.in_group(operation, DType::F64, None, bytes)?,
    }
    Ok(())
}
