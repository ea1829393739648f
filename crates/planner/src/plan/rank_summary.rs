//! Numbers of a step of many ranks: calls, bytes of the worst and the mean rank, time.

use std::collections::BTreeMap;

use fusestep_coalesce::FlatLayout;
use fusestep_collective::Operation;
use fusestep_tensor::{counted, grouped};
use serde::Serialize;

use crate::plan::calls;
use crate::plan::calls::{CallPurpose, PlannedCall};
use crate::plan::cost::{CostModel, timeline};
use crate::plan::segments::kept_bytes;
use crate::plan::settings::ZeroStage;
use crate::plan::storage::StorageSpec;
use crate::plan::text::bytes;
use crate::plan::value::Plan;

/// Bytes of one rank, or of all in the mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct RankBytes {
    /// Optimizer state, padding included.
    pub state_bytes: u64,
    /// Everything that is kept between steps.
    pub memory_bytes: u64,
    /// Bytes that it sends in a step, by ring algorithms.
    pub bytes_sent: u64,
}

/// The numbers of a step of several ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankSummary {
    /// The number of ranks.
    pub world: usize,
    /// ZeRO stage.
    pub zero: u8,
    /// Calls between ranks of one step that move gradients, parameters or state; those of every
    /// k-th step count 1 / k, rounded up.
    pub collectives: u64,
    /// Gathers of a layer's parameters among them, before its forward and before its backward pass
    /// (stage 3). The caller makes them: one who asks [`crate::Run::gather`] for several layers at
    /// once, or keeps them from forward to backward, makes fewer.
    pub layer_gathers: u64,
    /// Calls of a plan without passes, one for each tensor.
    pub naive_collectives: u64,
    /// Small calls of a step: which gradients there are, norms, whether to skip.
    pub control_calls: u64,
    /// Bytes that each rank sends in one step, by ring algorithms.
    pub bytes_on_wire: u64,
    /// Bytes of optimizer state on this rank, padding included.
    pub state_bytes_per_rank: u64,
    /// Bytes of everything that this rank keeps between steps.
    pub memory_bytes_per_rank: u64,
    /// The rank that keeps most.
    pub worst_rank: RankBytes,
    /// The mean over ranks.
    pub mean_rank: RankBytes,
    /// Buckets of gradients.
    pub buckets: usize,
    /// Micro-steps of an update.
    pub micro_steps: u32,
    /// How fast calls were taken to be, as a sentence.
    pub link: String,
    /// Time of calls that no backward pass hides, in nanoseconds.
    pub exposed_ns: f64,
    /// Time of this rank's update, in nanoseconds; 0 if the model does not know how fast memory
    /// is.
    pub local_ns: f64,
    /// Time of the backward passes, of what they do not hide and of this rank's own work, in
    /// nanoseconds.
    pub predicted_step_ns: f64,
    /// The cap of buckets at which latency and the wait for the last bucket cost least together; 0
    /// where nothing is reduced.
    pub proposed_bucket_cap_bytes: u64,
}

impl std::fmt::Display for RankSummary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "{}, zero stage {}: {} a step (naive: {}) and {}, {} sent, {}",
            counted(self.world as u64, "rank"),
            self.zero,
            counted(self.collectives, "call"),
            grouped(self.naive_collectives),
            counted(self.control_calls, "small call"),
            bytes(self.bytes_on_wire),
            counted(self.buckets as u64, "bucket"),
        )?;
        if self.layer_gathers > 0 {
            writeln!(
                f,
                "  of these, {} of a layer's parameters before its forward and its backward pass; a \
                 program that gathers all layers at once and keeps them, as train does, makes fewer",
                counted(self.layer_gathers, "gather")
            )?;
        }
        for (what, of) in [("worst rank", &self.worst_rank), ("mean rank", &self.mean_rank)] {
            let (state, all) = (bytes(of.state_bytes), bytes(of.memory_bytes));
            writeln!(f, "  {what}: {state} of optimizer state, {all} in all")?;
        }
        if self.world == 1 && self.predicted_step_ns == 0.0 {
            return Ok(());
        }
        write!(
            f,
            "  predicted: {:.2} ms, of which {:.2} ms are calls that nothing hides",
            self.predicted_step_ns / 1e6,
            self.exposed_ns / 1e6,
        )?;
        if self.local_ns > 0.0 {
            write!(f, " and {:.2} ms this rank's update", self.local_ns / 1e6)?;
        } else {
            write!(f, ", without this rank's update, as the speed of memory is not known")?;
        }
        writeln!(f, "; {}", self.link)?;
        if self.proposed_bucket_cap_bytes == 0 {
            return Ok(());
        }
        writeln!(
            f,
            "  buckets of {} would cost least latency and waiting together",
            bytes(self.proposed_bucket_cap_bytes)
        )
    }
}

pub(crate) fn rank_summary(plan: &Plan, model: impl Into<CostModel>) -> RankSummary {
    let model = model.into();
    let calls = calls::planned(plan);
    let count = |what| {
        let of = calls.iter().filter(move |call| call.what == what);
        of.map(|call| call.times.div_ceil(call.every)).sum::<u64>()
    };
    let sent = calls.iter().map(|call| call.bytes_sent.saturating_mul(call.times) / call.every);
    let sent = sent.fold(0, u64::saturating_add);
    let of_rank = |rank| rank_bytes(plan, rank, sent);
    // Ranks that share out nothing, and have neither slices nor lanes of their own, keep the same.
    let has_own = !plan.slices.is_empty() || plan.lanes.is_some();
    let different = match (has_own, is_shared(plan)) {
        (true, _) => plan.topology.world,
        (false, true) => plan.shard_group,
        (false, false) => 1,
    };
    let ranks: Vec<RankBytes> = (0..different).map(of_rank).collect();
    let mean = |of: fn(&RankBytes) -> u64| {
        ranks.iter().map(|rank| u128::from(of(rank))).sum::<u128>() / ranks.len() as u128
    };
    let worst = ranks.iter().max_by_key(|rank| rank.memory_bytes);
    let events = timeline(plan, &model);
    let end = events.last().map_or(0.0, |event| event.end);
    let local = model.local(plan.traffic_bytes());
    let hidden = f64::from(plan.micro_steps()) * model.backward_seconds + local;
    RankSummary {
        world: plan.topology.world,
        zero: plan.zero.number(),
        collectives: count(CallPurpose::Data),
        layer_gathers: layer_gathers(plan, &calls),
        naive_collectives: naive_collectives(plan),
        control_calls: count(CallPurpose::Control),
        bytes_on_wire: sent,
        state_bytes_per_rank: plan.state_bytes(),
        memory_bytes_per_rank: plan.memory_bytes(),
        worst_rank: worst.copied().unwrap_or_default(),
        mean_rank: RankBytes {
            state_bytes: mean(|rank| rank.state_bytes) as u64,
            memory_bytes: mean(|rank| rank.memory_bytes) as u64,
            bytes_sent: mean(|rank| rank.bytes_sent) as u64,
        },
        buckets: plan.buckets.len(),
        micro_steps: plan.micro_steps(),
        link: model.text(),
        exposed_ns: (end - hidden).max(0.0) * 1e9,
        local_ns: local * 1e9,
        predicted_step_ns: end * 1e9,
        proposed_bucket_cap_bytes: proposed_cap(plan, &model),
    }
}

/// Whether ranks have parts of what is kept.
fn is_shared(plan: &Plan) -> bool {
    plan.zero != ZeroStage::None && plan.reduces()
}

/// Elements of every storage that are a rank's own. Buckets are gone through once for all storages:
/// a naive plan has as many of them as tensors.
fn own_elements(plan: &Plan, rank: usize) -> Vec<u64> {
    let shared = is_shared(plan);
    let whole = plan.storages.iter().map(|spec| match (spec.distributed, shared) {
        (true, _) => slices_numel(plan, rank, spec),
        (false, true) => 0,
        (false, false) => spec.layout.total_numel(),
    });
    let mut own: Vec<u64> = whole.collect();
    if shared {
        // What is distributed lies in no bucket.
        for bucket in &plan.buckets {
            let part = bucket.part(rank % plan.shard_group);
            own[bucket.storage] += part.end - part.start;
        }
    }
    own
}

/// Elements of a rank's slices in one storage, padding included.
fn slices_numel(plan: &Plan, rank: usize, spec: &StorageSpec) -> u64 {
    let members = spec.members.iter();
    let numels = members.map(|&member| plan.shape_on(rank, member as usize).numel());
    let layout = FlatLayout::new(numels, spec.layout.options());
    layout.map_or(spec.layout.total_numel(), |layout| layout.total_numel())
}

/// Bytes that a rank keeps and sends.
pub(crate) fn rank_bytes(plan: &Plan, rank: usize, bytes_sent: u64) -> RankBytes {
    let mut found =
        RankBytes { bytes_sent, memory_bytes: kept_bytes(plan), ..RankBytes::default() };
    let sums = plan.accumulation().filter(|_| plan.lanes.is_none());
    let slots = plan.lane_slots(rank) as u64;
    for (spec, own) in plan.storages.iter().zip(own_elements(plan, rank)) {
        found.memory_bytes += sums.map_or(0, |rule| rule.sum_bytes(spec, own));
        // The first sum of lanes lies where the gradient does.
        let width = spec.grad_dtype().len_bytes() as u64;
        found.memory_bytes += slots.saturating_sub(1) * spec.layout.total_numel() * width;
        for (list, extent) in spec.lists.iter().zip(&spec.extents) {
            let is_own = spec.distributed || *extent == crate::Extent::Shard;
            let numel = if is_own { own } else { spec.layout.total_numel() };
            let len_bytes = list.stride().bytes(numel);
            found.memory_bytes += len_bytes;
            if list.role.is_state() {
                found.state_bytes += len_bytes;
            }
        }
    }
    found
}

/// Gathers of layers at stage 3, where a step has no other all-gathers of data.
fn layer_gathers(plan: &Plan, calls: &[PlannedCall]) -> u64 {
    if plan.zero != ZeroStage::Three {
        return 0;
    }
    let of_data = calls.iter().filter(|call| call.what == CallPurpose::Data);
    let gathers = of_data.filter(|call| call.operation == Operation::AllGather.name());
    gathers.map(|call| call.times).sum()
}

/// Calls of a plan without passes that moves the same.
fn naive_collectives(plan: &Plan) -> u64 {
    if !plan.reduces() {
        return 0;
    }
    let gathers = match plan.zero {
        ZeroStage::None => 0,
        ZeroStage::One | ZeroStage::Two => 1,
        // Before the forward pass of each micro-step, and before its backward pass.
        ZeroStage::Three => 2 * u64::from(plan.micro_steps()),
    };
    let width_of = |spec: &StorageSpec| spec.grad_dtype().len_bytes();
    // Gradients of one width are reduced by the same calls, however long a bucket is. A naive plan
    // has as many buckets as tensors, so each width is looked at once.
    let mut reductions = BTreeMap::<usize, u64>::new();
    for (index, bucket) in plan.buckets.iter().enumerate() {
        let width = width_of(&plan.storages[bucket.storage]);
        reductions.entry(width).or_insert_with(|| calls::reductions(plan, index));
    }
    let storages = plan.storages.iter().filter(|spec| !spec.distributed);
    let calls = storages.map(|spec| {
        let is_full = |tensor: &usize| spec.layout.numel(*tensor) > 0;
        let tensors = (0..spec.layout.tensors()).filter(is_full).count() as u64;
        tensors * (reductions.get(&width_of(spec)).copied().unwrap_or(0) + gathers)
    });
    calls.sum()
}

/// `n` buckets of `S` bytes in all cost `n·α` in latency and leave `S / (n·β)` behind the
/// backward pass: least together at buckets of `√(S·α·β)` bytes.
fn proposed_cap(plan: &Plan, model: &CostModel) -> u64 {
    let link = if plan.zero >= ZeroStage::One { model.half(model.scatter) } else { model.link };
    let bytes = plan.buckets.iter().map(|bucket| {
        let width = plan.storages[bucket.storage].grad_dtype().len_bytes() as u64;
        bucket.numel() * width
    });
    let total: u64 = bytes.sum();
    let cap = total as f64 * link.alpha_seconds * link.beta_bytes_per_second;
    (cap.sqrt() as u64).clamp(4.min(total), total)
}
