//! Calls of a step of many ranks, derived from the stages before any call is made.

use fusestep_collective::{Operation, ReduceOp, ReduceUpdate};
use fusestep_launch::MAX_SUMS;
use fusestep_tensor::{DType, Role};
use serde::Serialize;

use crate::plan::leaves;
use crate::plan::leaves::chunks_of;
use crate::plan::segments::full_tensors;
use crate::plan::settings::ZeroStage;
use crate::plan::stage::{Reduced, Stage};
use crate::plan::topology::Reach;
use crate::plan::value::Plan;

/// A call of a step, before it is made.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedCall {
    /// The purpose of the call.
    pub what: CallPurpose,
    /// The operation, as messages name it.
    pub operation: &'static str,
    /// The bucket, if the call is of one.
    pub bucket: Option<usize>,
    /// Bytes of each rank's buffer.
    pub len_bytes: u64,
    /// Bytes that each rank sends, by ring algorithms.
    pub bytes_sent: u64,
    /// Number of times that the call is made in a step.
    pub times: u64,
    /// Interval in steps: the call is made in one step of so many.
    pub every: u64,
}

/// The purpose of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CallPurpose {
    /// Gradients, parameters or state move.
    Data,
    /// Ranks exchange which gradients were given, norms, and whether to skip the step.
    Control,
}

/// Operations of control calls: sum, mean and maximum over ranks.
const SUM: Operation = Operation::AllReduce(ReduceOp::Sum);
const MEAN: Operation = Operation::AllReduce(ReduceOp::Average);
const LARGEST: Operation = Operation::AllReduce(ReduceOp::Max);

/// Implementation of [`Plan::calls`].
pub(crate) fn planned(plan: &Plan) -> Vec<PlannedCall> {
    let world = plan.topology.world as u64;
    let mut calls = Calls::of(plan);
    if world == 1 {
        return calls.all;
    }
    if plan.reduces() {
        calls.about_gradients();
    }
    if plan.zero == ZeroStage::Three && plan.reduces() {
        calls.layer_gathers();
    }
    for stage in &plan.stages {
        match stage {
            Stage::Reduce(reduce) => calls.reduce(reduce),
            Stage::ReduceUpdate(update) => {
                let elements = update.bucket.map(|bucket| plan.buckets[bucket].elements.clone());
                let elements = elements.unwrap_or_default();
                let spec = &plan.storages[update.storage];
                let replicas = plan.replicated(spec).into_iter();
                let between = |list: usize| spec.lists[list].stride().between(elements.clone());
                let replicas = replicas.map(between).sum::<usize>() as u64;
                let grads = spec.grad_dtype().len_bytes() * plan.sums_of_lanes().max(1);
                let grads = (elements.end - elements.start) * grads as u64;
                let shared = Shared { len_bytes: grads + replicas, ranks: world };
                calls.data(Operation::ReduceUpdate, update.bucket, shared, 1);
            }
            Stage::Norm(_) if plan.reduces() => calls.leaves(16),
            Stage::Norm(_) => calls.control(SUM, 8, world),
            Stage::Trust => calls.leaves(8 * MAX_SUMS as u64),
            Stage::Gather(gather) => calls.gather(gather),
            Stage::Average(rule) => {
                let first = calls.all.len();
                calls.average(rule.averaged);
                if rule.interval == crate::Interval::Adaptive {
                    // The mean loss that the next interval follows.
                    calls.control(MEAN, 8, world);
                }
                for call in &mut calls.all[first..] {
                    call.every = rule.every.get();
                }
            }
            Stage::Accumulate(_) | Stage::Optimize(_) => {}
        }
    }
    calls.update_norms();
    calls.all
}

/// Calls by which a bucket is reduced where that is a stage of its own.
pub(crate) fn reductions(plan: &Plan, bucket: usize) -> u64 {
    let result = match plan.zero {
        ZeroStage::None => Reduced::Whole,
        ZeroStage::One | ZeroStage::Two | ZeroStage::Three => Reduced::Part,
    };
    let mut calls = Calls::of(plan);
    calls.reduce(&crate::Reduce { bucket, result });
    calls.all.iter().map(|call| call.times).sum()
}

/// Bytes of each rank's buffer in a call, and the number of ranks that make the call.
struct Shared {
    len_bytes: u64,
    ranks: u64,
}

struct Calls<'a> {
    all: Vec<PlannedCall>,
    plan: &'a Plan,
    world: u64,
    group: u64,
    /// Number of times that gradients are reduced in a step.
    windows: u64,
}

impl<'a> Calls<'a> {
    /// No calls of a plan so far.
    fn of(plan: &'a Plan) -> Self {
        Self {
            all: Vec::new(),
            plan,
            world: plan.topology.world as u64,
            group: plan.shard_group as u64,
            windows: if plan.reduces_each() { u64::from(plan.micro_steps()) } else { 1 },
        }
    }
}

impl Calls<'_> {
    /// Adds the calls in which ranks exchange which gradients were given, hashes of their rules
    /// and, behind these, the weights of micro-steps.
    fn about_gradients(&mut self) {
        let plan = self.plan;
        let params = plan.params.len() as u64;
        // The number of micro-batches, and whether they have weights.
        let of_lanes = if plan.lanes.is_some() { 1 + WORD_BYTES } else { 0 };
        if !plan.in_backward {
            return self.control(LARGEST, params + 2 * WORD_BYTES + of_lanes, self.world);
        }
        let mut told = 0;
        for segment in &plan.segments {
            let tensors = full_tensors(plan, segment) as u64;
            if tensors > 0 {
                self.control(LARGEST, tensors + WORD_BYTES + of_lanes, self.world);
            }
            told += tensors;
        }
        if told < params {
            self.control(LARGEST, params - told + WORD_BYTES + of_lanes, self.world);
        }
    }

    /// Adds the calls in which ranks exchange how far parameters moved.
    fn update_norms(&mut self) {
        if !self.plan.update_norms {
            return;
        }
        if self.plan.zero != ZeroStage::None {
            let params = self.plan.params.iter().enumerate();
            let shared = params.filter(|(param, _)| !self.plan.is_distributed(*param));
            let chunks = shared.map(|(_, desc)| chunks_of(desc.numel()) as u64);
            let chunks: u64 = chunks.sum();
            if chunks > 0 {
                self.control(SUM, 8 * chunks, self.group);
            }
        }
        // Parameters of which each rank has a slice of its own.
        let slices = self.plan.storages.iter().filter(|spec| spec.distributed);
        let slices: u64 = slices.map(|spec| spec.members.len() as u64).sum();
        if slices > 0 {
            self.control(SUM, 8 * slices * self.world, self.world);
        }
    }

    /// Adds the calls in which ranks exchange `leaf_bytes` of every leaf.
    fn leaves(&mut self, leaf_bytes: u64) {
        let (shared, slices) = leaves::leaf_counts(self.plan);
        if shared > 0 {
            self.control(SUM, leaf_bytes * shared, self.group);
        }
        if slices > 0 {
            self.control(Operation::AllGather, leaf_bytes * slices, self.world);
        }
    }

    fn reduce(&mut self, reduce: &crate::Reduce) {
        let plan = self.plan;
        let bucket = &plan.buckets[reduce.bucket];
        let width = plan.storages[bucket.storage].grad_dtype().len_bytes() as u64;
        let (len_bytes, index) = (bucket.numel() * width, Some(reduce.bucket));
        if plan.exchanges_lanes() {
            return self.exchange_lanes(reduce, width);
        }
        if plan.wire.is_some() && width == 4 {
            for root in 0..self.world as usize {
                let shared = Shared { len_bytes: len_bytes / 2, ranks: self.world };
                self.data(Operation::Scatter { root }, index, shared, self.windows);
            }
            if reduce.result == Reduced::Whole {
                let shared = Shared { len_bytes, ranks: self.world };
                self.data(Operation::AllGather, index, shared, self.windows);
            }
            return;
        }
        let (operation, own) = match reduce.result {
            Reduced::Whole => (MEAN, len_bytes),
            Reduced::Part => {
                let part = bucket.part(plan.shard_place().rank);
                let own = (part.end - part.start) * width;
                (Operation::ReduceScatter(ReduceOp::Average), own)
            }
        };
        if plan.lanes.is_some() && self.group < self.world {
            // Sums that no number of ranks changes are formed over all of them.
            return self.data(MEAN, index, Shared { len_bytes, ranks: self.world }, 1);
        }
        let in_group = Shared { len_bytes, ranks: self.group };
        self.data(operation, index, in_group, self.windows);
        if self.group < self.world {
            let across = Shared { len_bytes: own, ranks: self.world / self.group };
            self.data(MEAN, index, across, self.windows);
        }
    }

    /// Adds the calls that exchange sums of lanes: one on the memory of all ranks, or one for each
    /// sum, and one that brings the results to all.
    fn exchange_lanes(&mut self, reduce: &crate::Reduce, width: u64) {
        let plan = self.plan;
        let Some(lanes) = plan.lanes else {
            return;
        };
        let (numel, index) = (plan.buckets[reduce.bucket].numel(), Some(reduce.bucket));
        let sums = lanes.contributions(self.world as usize);
        let slots = plan.sums_of_lanes();
        let in_world = |lists: usize| Shared {
            len_bytes: lists as u64 * numel * width,
            ranks: plan.topology.world as u64,
        };
        if plan.topology.reach == Reach::SharedMemory && slots <= ReduceUpdate::MAX_REPLICAS {
            return self.data(Operation::ReduceUpdate, index, in_world(slots), 1);
        }
        for sum in sums {
            self.data(Operation::Scatter { root: sum.rank }, index, in_world(1), 1);
        }
        if reduce.result == Reduced::Whole || plan.shard_group < plan.topology.world {
            self.data(Operation::AllGather, index, in_world(1), 1);
        }
    }

    fn gather(&mut self, gather: &crate::Gather) {
        let bucket = &self.plan.buckets[gather.bucket];
        let width = self.plan.storages[bucket.storage].param_dtype().len_bytes() as u64;
        let index = Some(gather.bucket);
        for call in &gather.broadcasts {
            let len_bytes = (call.elements.end - call.elements.start) * width;
            let operation = Operation::Broadcast { root: call.owner };
            self.data(operation, index, Shared { len_bytes, ranks: self.group }, 1);
        }
        if gather.broadcasts.is_empty() {
            let whole = Shared { len_bytes: bucket.numel() * width, ranks: self.group };
            self.data(Operation::AllGather, index, whole, 1);
        }
    }

    fn average(&mut self, averaged: crate::Averaged) {
        for spec in self.plan.storages.iter().filter(|spec| !spec.distributed) {
            let kept = |role| matches!(role, Role::Master | Role::Remainder);
            let values = if spec.lists.iter().any(|list| kept(list.role)) {
                4
            } else {
                spec.param_dtype().len_bytes()
            };
            let state = spec.lists.iter().filter(|list| {
                let with_state = averaged == crate::Averaged::ParamsAndState;
                let is_units = list.role.unit_of().is_some();
                with_state && list.role.is_state() && !kept(list.role) && !is_units
            });
            // Of codes what they read as.
            let widths = state.map(|list| match list.dtype {
                DType::U8 => DType::F32.len_bytes(),
                other => other.len_bytes(),
            });
            for width in std::iter::once(values).chain(widths) {
                let len_bytes = spec.layout.total_numel() * width as u64;
                self.data(MEAN, None, Shared { len_bytes, ranks: self.world }, 1);
            }
        }
    }

    /// The gathers of a program that asks for a layer's parameters before its forward and before
    /// its backward pass, in every micro-step.
    fn layer_gathers(&mut self) {
        let plan = self.plan;
        let layer = |name: &str| name.rsplit_once('.').map_or(name, |(layer, _)| layer).to_owned();
        let mut asked: std::collections::BTreeMap<(String, usize), u64> = Default::default();
        for segment in &plan.segments {
            let spec = &plan.storages[segment.storage];
            let width = spec.param_dtype().len_bytes() as u64;
            for tensor in segment.tensors.clone() {
                let param = &plan.params[spec.members[tensor as usize] as usize];
                if param.numel() == 0 {
                    continue;
                }
                for bucket in segment.buckets.clone() {
                    let range = spec.layout.range(tensor as usize);
                    let numel: usize = plan.buckets[bucket].overlaps(&range).iter().sum();
                    *asked.entry((layer(&param.name), bucket)).or_default() += numel as u64 * width;
                }
            }
        }
        let passes = 2 * u64::from(plan.micro_steps());
        for ((_, bucket), len_bytes) in asked {
            let part = Shared { len_bytes, ranks: self.group };
            self.data(Operation::AllGather, Some(bucket), part, passes);
        }
    }

    fn data(&mut self, operation: Operation, bucket: Option<usize>, shared: Shared, times: u64) {
        let Shared { len_bytes, ranks } = shared;
        self.all.push(PlannedCall {
            what: CallPurpose::Data,
            operation: operation.name(),
            bucket,
            len_bytes,
            bytes_sent: bytes_sent(operation, len_bytes, ranks),
            times,
            every: 1,
        });
    }

    fn control(&mut self, operation: Operation, len_bytes: u64, ranks: u64) {
        self.data(operation, None, Shared { len_bytes, ranks }, 1);
        if let Some(call) = self.all.last_mut() {
            call.what = CallPurpose::Control;
        }
    }
}

/// Bytes that a rank sends for a call on buffers of so many bytes, by ring algorithms.
pub(crate) fn bytes_sent(operation: Operation, len_bytes: u64, ranks: u64) -> u64 {
    let part = len_bytes / ranks * (ranks - 1) + len_bytes % ranks * (ranks - 1) / ranks;
    match operation {
        Operation::AllReduce(_) => 2 * part,
        // Only the root sends, which is every rank in turn where ranks tell each other parts.
        Operation::Scatter { .. } => part / ranks,
        _ => part,
    }
}

/// Bytes by which ranks compare a value: the value and its complement.
pub(crate) const WORD_BYTES: u64 = 16;
