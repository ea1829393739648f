//! The calls of a step of many ranks, read off the stages before they are made.

use fusestep_collective::{Operation, ReduceOp};
use fusestep_launch::MAX_SUMS;
use fusestep_tensor::Role;
use serde::Serialize;

use crate::arena::full_tensors;
use crate::comms::bytes_sent;
use crate::rules_alike::TOLD_BYTES;
use crate::stage::Reduced;
use crate::{Plan, Stage, ZeroStage, leaves};

/// A call of a step, before it is made.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedCall {
    /// What it is for.
    pub what: CallPurpose,
    /// The operation, as messages name it.
    pub operation: &'static str,
    /// The bucket, where it is of one.
    pub bucket: Option<usize>,
    /// Bytes of each rank's buffer.
    pub len_bytes: u64,
    /// Bytes that each rank sends, by ring algorithms.
    pub bytes_sent: u64,
    /// How often it is made in a step.
    pub times: u64,
    /// In every so many-th step only.
    pub every: u64,
}

/// What a call is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CallPurpose {
    /// Gradients, parameters or state move.
    Data,
    /// Ranks tell each other which gradients there are, norms, whether to skip.
    Control,
}

/// [`Plan::calls`].
pub(crate) fn planned(plan: &Plan) -> Vec<PlannedCall> {
    let mut calls = Calls {
        all: Vec::new(),
        world: plan.topology.world as u64,
        group: plan.shard_group as u64,
    };
    if plan.topology.world == 1 {
        return calls.all;
    }
    let windows = if plan.reduces_each() { u64::from(plan.micro_steps()) } else { 1 };
    if plan.reduces() {
        calls_about_gradients(plan, &mut calls);
    }
    if plan.zero == ZeroStage::Three && plan.reduces() {
        layer_gathers(plan, &mut calls);
    }
    for stage in &plan.stages {
        match stage {
            Stage::Reduce(reduce) => reduce_calls(plan, &mut calls, reduce, windows),
            Stage::ReduceUpdate(update) => {
                let numel = update.bucket.map_or(0, |bucket| plan.buckets[bucket].numel());
                let spec = &plan.storages[update.storage];
                let replicas = plan.replicated(spec).into_iter();
                let replicas = replicas.map(|list| spec.lists[list].dtype.len_bytes());
                let width = spec.grad_dtype().len_bytes() + replicas.sum::<usize>();
                let len_bytes = numel * width as u64;
                let world = calls.world;
                calls.data(Operation::ReduceUpdate, update.bucket, (len_bytes, world), 1);
            }
            Stage::Norm(_) => norm_calls(plan, &mut calls),
            Stage::Trust => {
                leaf_calls(plan, &mut calls, 8 * MAX_SUMS as u64);
            }
            Stage::Gather(gather) => gather_calls(plan, &mut calls, gather),
            Stage::Average(rule) => {
                let first = calls.all.len();
                average_calls(plan, &mut calls, rule.averaged);
                if rule.interval == crate::Interval::Adaptive {
                    // The mean loss that the next interval follows.
                    let mean = Operation::AllReduce(ReduceOp::Average);
                    calls.control(mean, 8, calls.world);
                }
                for call in &mut calls.all[first..] {
                    call.every = rule.every.get();
                }
            }
            Stage::Accumulate(_) | Stage::Optimize(_) => {}
        }
    }
    update_norm_calls(plan, &mut calls);
    calls.all
}

/// The calls by which ranks tell each other which gradients there are, by what rules they update
/// and, behind those, how they have weighed micro-steps.
fn calls_about_gradients(plan: &Plan, calls: &mut Calls) {
    let largest = Operation::AllReduce(ReduceOp::Max);
    let params = plan.params.len() as u64;
    if !plan.in_backward {
        return calls.control(largest, params + 2 * TOLD_BYTES, calls.world);
    }
    let mut told = 0;
    for segment in &plan.segments {
        let tensors = full_tensors(plan, segment) as u64;
        if tensors > 0 {
            calls.control(largest, tensors + TOLD_BYTES, calls.world);
        }
        told += tensors;
    }
    if told < params {
        calls.control(largest, params - told + TOLD_BYTES, calls.world);
    }
}

/// The calls by which ranks hear how far parameters moved.
fn update_norm_calls(plan: &Plan, calls: &mut Calls) {
    if plan.update_norms && plan.zero != ZeroStage::None {
        let chunk = u64::from(fusestep_launch::CHUNK_ELEMENTS);
        let chunks = plan.params.iter().map(|param| param.numel().div_ceil(chunk));
        let len_bytes = 8 * chunks.sum::<u64>();
        calls.control(Operation::AllReduce(ReduceOp::Sum), len_bytes, calls.group);
    }
    if plan.update_norms && slices_of_ranks(plan) > 0 {
        let len_bytes = 8 * slices_of_ranks(plan) * calls.world;
        calls.control(Operation::AllReduce(ReduceOp::Sum), len_bytes, calls.world);
    }
}

/// Parameters of which each rank has a slice of its own.
fn slices_of_ranks(plan: &Plan) -> u64 {
    let slices = plan.storages.iter().filter(|spec| spec.distributed);
    slices.map(|spec| spec.members.len() as u64).sum()
}

/// The calls by which ranks tell each other `leaf_bytes` of every leaf.
fn leaf_calls(plan: &Plan, calls: &mut Calls, leaf_bytes: u64) {
    let (shared, slices) = leaves::leaf_counts(plan);
    if shared > 0 {
        let sum = Operation::AllReduce(ReduceOp::Sum);
        calls.control(sum, leaf_bytes * shared, calls.group);
    }
    if slices > 0 {
        let len_bytes = leaf_bytes * slices * calls.world;
        calls.control(Operation::AllGather, len_bytes, calls.world);
    }
}

fn reduce_calls(plan: &Plan, calls: &mut Calls, reduce: &crate::Reduce, windows: u64) {
    let bucket = &plan.buckets[reduce.bucket];
    let width = plan.storages[bucket.storage].grad_dtype().len_bytes() as u64;
    let (len_bytes, index) = (bucket.numel() * width, Some(reduce.bucket));
    let (operation, own) = match reduce.result {
        Reduced::Whole => (Operation::AllReduce(ReduceOp::Average), len_bytes),
        Reduced::Part => {
            let part = bucket.part(plan.shard_place().rank);
            let own = (part.end - part.start) * width;
            (Operation::ReduceScatter(ReduceOp::Average), own)
        }
    };
    let group = calls.group;
    calls.data(operation, index, (len_bytes, group), windows);
    if calls.group < calls.world {
        let groups = calls.world / calls.group;
        let across = Operation::AllReduce(ReduceOp::Average);
        calls.data(across, index, (own, groups), windows);
    }
}

fn norm_calls(plan: &Plan, calls: &mut Calls) {
    let sum = Operation::AllReduce(ReduceOp::Sum);
    if !plan.reduces() {
        return calls.control(sum, 8, calls.world);
    }
    leaf_calls(plan, calls, 16);
}

fn gather_calls(plan: &Plan, calls: &mut Calls, gather: &crate::Gather) {
    let bucket = &plan.buckets[gather.bucket];
    let group = calls.group;
    let width = plan.storages[bucket.storage].param_dtype().len_bytes() as u64;
    let index = Some(gather.bucket);
    for call in &gather.broadcasts {
        let len_bytes = (call.elements.end - call.elements.start) * width;
        let operation = Operation::Broadcast { root: call.owner };
        calls.data(operation, index, (len_bytes, group), 1);
    }
    if gather.broadcasts.is_empty() {
        let len_bytes = bucket.numel() * width;
        calls.data(Operation::AllGather, index, (len_bytes, group), 1);
    }
}

fn average_calls(plan: &Plan, calls: &mut Calls, averaged: crate::Averaged) {
    let world = calls.world;
    for spec in plan.storages.iter().filter(|spec| !spec.distributed) {
        let values = if spec.list(Role::Master).is_some() || spec.list(Role::Remainder).is_some() {
            4
        } else {
            spec.param_dtype().len_bytes()
        };
        let state = spec.lists.iter().filter(|list| {
            let kept = matches!(list.role, Role::Master | Role::Remainder);
            averaged == crate::Averaged::ParamsAndState && list.role.is_state() && !kept
        });
        let widths = state.map(|list| list.dtype.len_bytes());
        for width in std::iter::once(values).chain(widths) {
            let len_bytes = spec.layout.total_numel() * width as u64;
            let operation = Operation::AllReduce(ReduceOp::Average);
            calls.data(operation, None, (len_bytes, world), 1);
        }
    }
}

/// The gathers of a program that asks for a layer's parameters before its forward and before
/// its backward pass, in every micro-step.
fn layer_gathers(plan: &Plan, calls: &mut Calls) {
    let layer = |name: &str| name.rsplit_once('.').map_or(name, |(layer, _)| layer).to_owned();
    let mut asked: std::collections::BTreeMap<(String, usize), u64> = Default::default();
    for (index, segment) in plan.segments.iter().enumerate() {
        let spec = &plan.storages[segment.storage];
        let width = spec.param_dtype().len_bytes() as u64;
        for tensor in segment.tensors.clone() {
            let param = &plan.params[spec.members[tensor as usize] as usize];
            if param.numel() == 0 {
                continue;
            }
            for bucket in segment.buckets.clone() {
                let range = spec.layout.range(tensor as usize);
                let inside = plan.buckets[bucket].overlaps(&range);
                let numel: usize = inside.iter().sum();
                let key = (
                    layer(&param.name),
                    if segment.buckets.len() > 1 {
                        bucket
                    } else {
                        plan.segments[index].buckets.start
                    },
                );
                *asked.entry(key).or_default() += numel as u64 * width;
            }
        }
    }
    let (group, passes) = (calls.group, 2 * u64::from(plan.micro_steps()));
    for ((_, bucket), len_bytes) in asked {
        let call = (len_bytes, group);
        calls.data(Operation::AllGather, Some(bucket), call, passes);
    }
}

/// Calls as they are listed.
struct Calls {
    all: Vec<PlannedCall>,
    world: u64,
    group: u64,
}

impl Calls {
    fn data(
        &mut self,
        operation: Operation,
        bucket: Option<usize>,
        (len_bytes, ranks): (u64, u64),
        times: u64,
    ) {
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
        self.all.push(PlannedCall {
            what: CallPurpose::Control,
            operation: operation.name(),
            bucket: None,
            len_bytes,
            bytes_sent: bytes_sent(operation, len_bytes, ranks),
            times: 1,
            every: 1,
        });
    }
}
