//! Sums that ranks tell each other: norms of gradients, of whole tensors and of updates, with the
//! bits of one rank that has everything.
//!
//! The fixed tree adds leaves of 1,024 elements, counted from a tensor's start. Parts of ranks end
//! with leaves wherever sums are taken, so every leaf is summed by one rank. Ranks add up vectors
//! of all leaves in which each has filled in its own: adding 0 to a sum of squares changes no bit.
//! Then all fold leaves into chunks, chunks into tensors and tensors into a total alike.

use std::ops::Range;

use fusestep_amp::norm_kernel;
use fusestep_collective::{Operation, ReduceOp};
use fusestep_elementwise::{NORM_LANES, fold};
use fusestep_launch::{
    Backend, Batch, CHUNK_LEAVES, ControlBlock, ControlRule, LEAF_ELEMENTS, LeafSquares, MAX_SUMS,
    MultiTensorReduction, SquareSum, TensorPartials,
};
use fusestep_tensor::{DType, Role};

use crate::comms::Comms;
use crate::group::Classes;
use crate::{Optimize, Plan, PlanError, State};

/// The memory of sums that ranks tell each other.
#[derive(Default)]
pub(crate) struct Exchange {
    /// For each parameter its first leaf among all; and one past the last.
    first_leaf: Vec<usize>,
    /// The kernel of each read of stage `norm`.
    readers: Vec<Box<dyn MultiTensorReduction>>,
    /// What this rank sums for stage `trust`: for each update its own part.
    trust: Vec<(Optimize, Vec<Batch>)>,
    /// For each parameter the sum over what the last update changed, and the total over all ranks.
    pub(crate) update_sums: Option<(Vec<f64>, f64)>,
}

impl std::fmt::Debug for Exchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exchange")
            .field("leaves", &self.first_leaf.last())
            .finish_non_exhaustive()
    }
}

/// Leaves of so many elements.
fn leaves_of(numel: u64) -> usize {
    numel.div_ceil(LEAF_ELEMENTS) as usize
}

/// Leaves of all records, in order: index of the parameter's leaf, one by one.
fn leaves_in<'a>(
    batches: &'a [Batch],
    members: &'a [u32],
    first_leaf: &'a [usize],
) -> impl Iterator<Item = Range<usize>> + 'a {
    let records = batches.iter().flat_map(|batch| &batch.records);
    records.map(|record| {
        let param = members[record.tensor as usize] as usize;
        let first = first_leaf[param] + (record.first_element / LEAF_ELEMENTS) as usize;
        first..first + leaves_of(record.numel)
    })
}

impl Exchange {
    /// The memory for a plan; empty for one rank.
    pub(crate) fn of(plan: &Plan) -> Result<Self, PlanError> {
        if plan.topology.world == 1 {
            return Ok(Self::default());
        }
        let leaves = plan.params.iter().map(|param| leaves_of(param.numel()));
        let ends = leaves.scan(0, |next, leaves| {
            *next += leaves;
            Some(*next)
        });
        let mut readers = Vec::new();
        for read in plan.norm_stage().iter().flat_map(|norm| &norm.reads) {
            readers.push(norm_kernel(plan.storages[read.storage].grad_dtype())?);
        }
        let mut exchange = Self {
            first_leaf: std::iter::once(0).chain(ends).collect(),
            readers,
            trust: Vec::new(),
            update_sums: None,
        };
        exchange.refresh(plan, |_| true, &plan.classes)?;
        Ok(exchange)
    }

    /// Makes the batches of sums anew, for the tensors that take part.
    pub(crate) fn refresh(
        &mut self,
        plan: &Plan,
        takes_part: impl Fn(usize) -> bool,
        classes: &Classes,
    ) -> Result<(), PlanError> {
        self.trust.clear();
        if !plan
            .stages
            .iter()
            .any(|stage| matches!(stage, crate::Stage::Trust))
        {
            return Ok(());
        }
        let rank = plan.shard_place().rank;
        for stage in plan.optimize_stages() {
            let Some(bucket) = stage.bucket else {
                continue;
            };
            // Other groups of parameters may have rules without such sums.
            let member = plan.storages[stage.storage].members[0];
            if plan.kernel_of(member)?.normed().is_none() {
                continue;
            }
            let own = Optimize {
                elements: plan.buckets[bucket].part(rank),
                ..stage.clone()
            };
            let batches = plan.batches(&own, &takes_part, classes)?;
            self.trust.push((own, batches));
        }
        Ok(())
    }

    fn leaves(&self) -> usize {
        self.first_leaf.last().copied().unwrap_or(0)
    }

    /// The sum over a parameter: its leaves folded into chunks, those in order.
    fn chunks(&self, param: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let (first, end) = (self.first_leaf[param], self.first_leaf[param + 1]);
        (first..end)
            .step_by(CHUNK_LEAVES)
            .map(move |at| at..end.min(at + CHUNK_LEAVES))
    }
}

/// The sum over a chunk from those over its leaves.
fn chunk(leaves: &[f64]) -> f64 {
    let mut lanes = [0.0; NORM_LANES];
    lanes[..leaves.len()].copy_from_slice(leaves);
    fold(lanes)
}

impl Plan {
    /// Stage `norm` of several ranks: decides on the step from the gradients of all. Whether it is
    /// skipped.
    pub(crate) fn decide(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
    ) -> Result<bool, PlanError> {
        let (squares, other_slices) = self.gradient_squares(state, backend, comms)?;
        let Some(norm) = &mut state.norm else {
            return Ok(false);
        };
        let mut partials = Vec::new();
        let mut tensors = Vec::with_capacity(self.params.len());
        for param in 0..self.params.len() {
            let first = partials.len() as u64;
            for leaves in state.exchange.chunks(param) {
                let sums: Vec<f64> = squares[leaves.clone()].iter().map(|s| s.sum).collect();
                partials.push(SquareSum {
                    sum: chunk(&sums),
                    non_finite: squares[leaves].iter().map(|s| s.non_finite).sum(),
                });
            }
            tensors.push(TensorPartials {
                first,
                count: partials.len() as u64 - first,
            });
        }
        // Slices of other ranks count once each, behind all parameters, in the order of ranks.
        for slice in other_slices {
            tensors.push(TensorPartials {
                first: partials.len() as u64,
                count: 1,
            });
            partials.push(slice);
        }
        let mut sums = vec![SquareSum::default(); tensors.len()];
        let mut block = ControlBlock::read(backend, norm.control.as_ref())?;
        norm.rule
            .run_host(&partials, &tensors, &mut sums, &mut block);
        block.write(backend, norm.control.as_mut())?;
        let own = &sums[..self.params.len()];
        backend.write(norm.sums.as_mut(), 0, bytemuck::cast_slice(own))?;
        Ok(block.found != 0)
    }

    /// The sum of squares of every leaf of all parameters, and one for each slice of another rank;
    /// gradients that are not finite on any rank are known to all.
    fn gradient_squares(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
    ) -> Result<(Vec<SquareSum>, Vec<SquareSum>), PlanError> {
        let mut squares = self.own_squares(state, backend)?;
        if !self.reduces() {
            // Every rank has gradients of its own; only that some are not finite is everybody's
            // business.
            let own: u64 = squares.iter().map(|square| square.non_finite).sum();
            let mut all = [own as f64];
            sum_over(comms, &mut all, Scope::World)?;
            let others = SquareSum {
                sum: 0.0,
                non_finite: all[0] as u64 - own,
            };
            return Ok((squares, vec![others; usize::from(others.non_finite > 0)]));
        }
        let slices = self.share_slices(state, comms, &squares)?;
        let mut told: Vec<f64> = Vec::with_capacity(2 * squares.len());
        let replicated = |leaf: usize| !self.is_distributed(&state.exchange, leaf);
        let shared = |leaf: usize, value: f64| if replicated(leaf) { value } else { 0.0 };
        told.extend(
            squares
                .iter()
                .enumerate()
                .map(|(leaf, s)| shared(leaf, s.sum)),
        );
        let counts = squares.iter().enumerate();
        told.extend(counts.map(|(leaf, s)| shared(leaf, s.non_finite as f64)));
        sum_over(comms, &mut told, Scope::ShardGroup)?;
        let (sums, counts) = told.split_at(squares.len());
        for (leaf, square) in squares.iter_mut().enumerate() {
            if replicated(leaf) {
                *square = SquareSum {
                    sum: sums[leaf],
                    non_finite: counts[leaf] as u64,
                };
            }
        }
        Ok((self.slices_of_first(state, squares, &slices), slices.others))
    }

    /// The sums of squares of the leaves that this rank reads; 0 for all others.
    fn own_squares(
        &self,
        state: &mut State,
        backend: &dyn Backend,
    ) -> Result<Vec<SquareSum>, PlanError> {
        let mut squares = vec![SquareSum::default(); state.exchange.leaves()];
        let reads = self.norm_stage().map_or(&[][..], |norm| &norm.reads);
        for (index, read) in reads.iter().enumerate() {
            let own = self.with_gradients(state, read.bucket, |state| {
                let batches = &state.schedule.norm[index];
                let storage = &state.storages[read.storage];
                let list = storage.list(Role::Grad);
                let Some(list) = list else {
                    return Ok(Vec::new());
                };
                let segment = read.bucket.map_or(0, |bucket| self.segment_start(bucket));
                let leaves = LeafSquares {
                    kernel: state.exchange.readers[index].as_ref(),
                    batches,
                    offsets: storage.spec.layout.offsets(),
                    list: &storage.lists[list],
                    first: storage.spec.first_of(list, &read.elements, segment),
                };
                let mut sums = vec![SquareSum::default(); leaves.places().count()];
                backend.leaf_squares(leaves, &mut sums)?;
                Ok(sums)
            })?;
            let members = &self.storages[read.storage].members;
            let places = leaves_in(
                &state.schedule.norm[index],
                members,
                &state.exchange.first_leaf,
            );
            for (place, sum) in places.flatten().zip(own) {
                squares[place] = sum;
            }
        }
        Ok(squares)
    }

    /// The element of its storage that a bucket's segment begins with.
    pub(crate) fn segment_start(&self, bucket: usize) -> u64 {
        self.segments[self.buckets[bucket].segment].elements.start
    }

    fn is_distributed(&self, exchange: &Exchange, leaf: usize) -> bool {
        let param = exchange.first_leaf.partition_point(|&first| first <= leaf) - 1;
        self.storages[self.places[param].0].distributed
    }

    /// Tells all ranks the sums over this rank's slices of distributed parameters.
    fn share_slices(
        &self,
        state: &State,
        comms: &mut Comms<'_>,
        squares: &[SquareSum],
    ) -> Result<Slices, PlanError> {
        let distributed = |param: &usize| self.storages[self.places[*param].0].distributed;
        let params: Vec<usize> = (0..self.params.len()).filter(distributed).collect();
        if params.is_empty() {
            return Ok(Slices::default());
        }
        let (rank, world) = (self.topology.rank, self.topology.world);
        let mut all = vec![0.0; 2 * world * params.len()];
        for (at, &param) in params.iter().enumerate() {
            let mut sum = SquareSum::default();
            for leaves in state.exchange.chunks(param) {
                let sums: Vec<f64> = squares[leaves.clone()].iter().map(|s| s.sum).collect();
                sum = sum.then(SquareSum {
                    sum: chunk(&sums),
                    non_finite: squares[leaves].iter().map(|s| s.non_finite).sum(),
                });
            }
            let place = 2 * (rank * params.len() + at);
            all[place] = sum.sum;
            all[place + 1] = sum.non_finite as f64;
        }
        sum_over(comms, &mut all, Scope::World)?;
        let sums: Vec<SquareSum> = all
            .chunks_exact(2)
            .map(|pair| SquareSum {
                sum: pair[0],
                non_finite: pair[1] as u64,
            })
            .collect();
        let (first, others) = sums.split_at(params.len());
        Ok(Slices {
            first: params.iter().copied().zip(first.iter().copied()).collect(),
            others: others.to_vec(),
        })
    }

    /// Puts rank 0's slices where its parameters are, so that all ranks form the same total.
    fn slices_of_first(
        &self,
        state: &State,
        mut squares: Vec<SquareSum>,
        slices: &Slices,
    ) -> Vec<SquareSum> {
        for &(param, sum) in &slices.first {
            let (first, end) = (
                state.exchange.first_leaf[param],
                state.exchange.first_leaf[param + 1],
            );
            squares[first..end].fill(SquareSum::default());
            if first < end {
                squares[first] = sum;
            }
        }
        squares
    }

    /// Stage `trust`: the sums over whole tensors that a layer-wise rule needs.
    pub(crate) fn sum_tensors(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
    ) -> Result<(), PlanError> {
        let mut told = vec![0.0; state.exchange.leaves() * MAX_SUMS];
        for index in 0..state.exchange.trust.len() {
            let (stage, batches) = state.exchange.trust[index].clone();
            if batches.is_empty() {
                continue;
            }
            let own = self.with_gradients(state, stage.bucket, |state| {
                let records = batches.iter().flat_map(|batch| &batch.records);
                let count = records.map(|record| leaves_of(record.numel)).sum();
                let mut sums = vec![[0.0; MAX_SUMS]; count];
                if let Some(launch) = state.launch_with(self, &stage, &batches) {
                    backend.leaf_sums(&launch, &mut sums)?;
                }
                Ok(sums)
            })?;
            let members = &self.storages[stage.storage].members;
            let places = leaves_in(&batches, members, &state.exchange.first_leaf);
            for (place, sums) in places.flatten().zip(own) {
                told[place * MAX_SUMS..(place + 1) * MAX_SUMS].copy_from_slice(&sums);
            }
        }
        sum_over(comms, &mut told, Scope::ShardGroup)?;
        let exchange = &state.exchange;
        for storage in &mut state.storages {
            let Some(sums) = &mut storage.tensor_sums else {
                continue;
            };
            for (sums, &member) in sums.iter_mut().zip(&storage.spec.members) {
                *sums = [0.0; MAX_SUMS];
                for leaves in exchange.chunks(member as usize) {
                    for (which, sum) in sums.iter_mut().enumerate() {
                        let own = leaves.clone().map(|leaf| told[leaf * MAX_SUMS + which]);
                        *sum += chunk(&own.collect::<Vec<f64>>());
                    }
                }
            }
        }
        Ok(())
    }

    /// Tells all ranks how far each parameter moved.
    pub(crate) fn share_update_sums(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        skipped: bool,
    ) -> Result<(), PlanError> {
        if !self.update_norms {
            return Ok(());
        }
        let params = self.params.len();
        let mut told = state.chunk_sums_of_update(backend, skipped)?;
        let own = told.clone();
        let distributed = |param: usize| self.storages[self.places[param].0].distributed;
        let shared = self.zero != crate::ZeroStage::None && self.reduces();
        if shared {
            for (param, chunks) in told.iter_mut().enumerate() {
                if distributed(param) {
                    chunks.fill(0.0);
                }
            }
            let mut flat: Vec<f64> = told.iter().flatten().copied().collect();
            sum_over(comms, &mut flat, Scope::ShardGroup)?;
            let mut rest = flat.as_slice();
            for chunks in &mut told {
                let (own, after) = rest.split_at(chunks.len());
                chunks.copy_from_slice(own);
                rest = after;
            }
        }
        let sum = |chunks: &[f64]| chunks.iter().fold(0.0, |sum, chunk| sum + chunk);
        let mut sums = Vec::with_capacity(params);
        for param in 0..params {
            let of = if distributed(param) {
                &own[param]
            } else {
                &told[param]
            };
            sums.push(sum(of));
        }
        let total = self.total_over_slices(comms, &sums, distributed)?;
        state.exchange.update_sums = Some((sums, total));
        Ok(())
    }

    /// The sum over all parameters, each rank's slices of distributed ones counted once: those of
    /// rank 0 in their places, the others behind.
    fn total_over_slices(
        &self,
        comms: &mut Comms<'_>,
        sums: &[f64],
        distributed: impl Fn(usize) -> bool,
    ) -> Result<f64, PlanError> {
        let params: Vec<usize> = (0..sums.len())
            .filter(|&param| distributed(param))
            .collect();
        let (rank, world) = (self.topology.rank, self.topology.world);
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
        let others = all.get(params.len()..).unwrap_or_default();
        let in_order = of_first.iter().chain(others);
        Ok(in_order.fold(0.0, |sum, own| sum + own))
    }
}

/// Sums over slices of distributed parameters.
#[derive(Default)]
struct Slices {
    /// Parameters and rank 0's sums.
    first: Vec<(usize, SquareSum)>,
    /// Those of the other ranks, in order.
    others: Vec<SquareSum>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    World,
    ShardGroup,
}

/// Adds up a vector over ranks, each of which has filled in what is its own.
fn sum_over(comms: &mut Comms<'_>, values: &mut [f64], scope: Scope) -> Result<(), PlanError> {
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
