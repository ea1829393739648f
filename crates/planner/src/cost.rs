//! What a step of many ranks costs, before it has been run: its calls, read off the stages, and a
//! prediction of its time.

use fusestep_collective::{Costs, Link, Operation};
use fusestep_tensor::counted;
use serde::Serialize;

use crate::arena::{keeps_segments, kept_bytes};
use crate::display::bytes;
use crate::{CallPurpose, Plan, PlannedCall, ZeroStage, calls};

/// What a step is predicted from.
///
/// ```text
/// call of B bytes    α + B / β           of its kind: all-reduce, reduce-scatter or all-gather
/// backward pass      as given + N / F    N: bytes of segments that are allocated anew, where each
///                                        is reduced when it is full, F: `fresh_bytes_per_second`
/// update             U / M               U: [`Plan::traffic_bytes`], M: `memory_bytes_per_second`
/// step               passes, the calls they do not hide, update, gathers
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// Latency and bandwidth of an all-reduce.
    pub link: Link,
    /// Latency and bandwidth of a reduce-scatter; `None` for half of an all-reduce's bytes.
    pub scatter: Option<Link>,
    /// Latency and bandwidth of an all-gather; `None` for half of an all-reduce's bytes.
    pub gather: Option<Link>,
    /// Bytes that a rank reads and writes per second while the others do so too; `None` leaves
    /// such work out.
    pub memory_bytes_per_second: Option<f64>,
    /// Bytes of memory just allocated that a rank writes for the first time per second; `None`
    /// leaves that out.
    pub fresh_bytes_per_second: Option<f64>,
    /// Length of one backward pass; gradients become ready evenly, element by element.
    pub backward_seconds: f64,
    /// Communication streams, on which calls run beside the backward pass; 0 for calls after it.
    pub comm_streams: usize,
}

impl From<Link> for CostModel {
    fn from(link: Link) -> Self {
        Self {
            link,
            scatter: None,
            gather: None,
            memory_bytes_per_second: None,
            fresh_bytes_per_second: None,
            backward_seconds: 0.0,
            comm_streams: 0,
        }
    }
}

impl From<Costs> for CostModel {
    fn from(costs: Costs) -> Self {
        Self {
            scatter: Some(costs.reduce_scatter),
            gather: Some(costs.all_gather),
            memory_bytes_per_second: Some(costs.memory_bytes_per_second),
            fresh_bytes_per_second: Some(costs.fresh_bytes_per_second),
            ..Self::from(costs.all_reduce)
        }
    }
}

impl CostModel {
    /// A call that moves half of an all-reduce's bytes, unless it is known.
    fn half(&self, known: Option<Link>) -> Link {
        known.unwrap_or(Link {
            beta_bytes_per_second: 2.0 * self.link.beta_bytes_per_second,
            ..self.link
        })
    }

    /// What was assumed about calls.
    fn text(&self) -> String {
        format!(
            "an all-reduce taken to cost {:.1} us and {:.1} GB/s",
            self.link.alpha_seconds * 1e6,
            self.link.beta_bytes_per_second / 1e9
        )
    }

    /// Seconds in which this many bytes are read and written.
    fn local(&self, len_bytes: u64) -> f64 {
        let seconds = |rate| len_bytes as f64 / rate;
        self.memory_bytes_per_second.map_or(0.0, seconds)
    }
}

/// A call between ranks, or a backward pass, on a step's clock.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Event {
    /// What happens.
    pub kind: EventKind,
    /// Which: the micro-step of a backward pass, the bucket of a call.
    pub index: usize,
    /// Bytes of each rank's buffer.
    pub len_bytes: u64,
    /// Seconds from the first backward pass's start.
    pub start: f64,
    /// Seconds from the first backward pass's start to its end.
    pub end: f64,
}

/// What happens between two moments of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// The framework computes gradients, and they are put into buckets.
    Backward,
    /// A bucket of gradients is reduced.
    Reduce,
    /// This rank's part of the gradients goes to the update, which is made.
    Update,
    /// Parameters come out of their shards.
    Gather,
}

/// Bytes of one rank, or of all in the mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct RankBytes {
    /// Optimizer state, padding included.
    pub state_bytes: u64,
    /// Everything that is kept between steps.
    pub memory_bytes: u64,
    /// What it sends in a step, by ring algorithms.
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
    /// Of these, gathers of a layer's parameters, before its forward and before its backward pass
    /// (stage 3). They are the caller's: one who asks [`Plan::gather`] for several layers at
    /// once, or keeps them from forward to backward, makes fewer.
    pub layer_gathers: u64,
    /// Those calls with one for each tensor.
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

/// [`Plan::timeline`].
pub(crate) fn timeline(plan: &Plan, model: &CostModel) -> Vec<Event> {
    let calls = calls::planned(plan);
    let is_reduce = |call: &&PlannedCall| {
        call.what == CallPurpose::Data && call.operation.starts_with("reduce-scatter")
            || call.what == CallPurpose::Data
                && call.operation == "all-reduce"
                && call.bucket.is_some()
    };
    let reduces: Vec<&PlannedCall> = calls.iter().filter(is_reduce).collect();
    let passes = plan.micro_steps();
    let (mut events, mut now, mut link_free) = (Vec::new(), 0.0, 0.0f64);
    for pass in 0..passes {
        let length = model.backward_seconds + fresh_seconds(plan, model);
        let (start, end) = (now, now + length);
        events.push(Event {
            kind: EventKind::Backward,
            index: pass as usize,
            len_bytes: 0,
            start,
            end,
        });
        now = end;
        if plan.reduces_each() || pass + 1 == passes {
            link_free = reduce_events(model, (start, length), link_free, &reduces, &mut events);
            now = end.max(link_free);
        }
    }
    let mut follow = |kind, index, len_bytes, length| {
        events.push(Event {
            kind,
            index,
            len_bytes,
            start: now,
            end: now + length,
        });
        now += length;
    };
    if model.memory_bytes_per_second.is_some() {
        let len_bytes = plan.traffic_bytes();
        follow(EventKind::Update, 0, len_bytes, model.local(len_bytes));
    }
    let others = calls.iter().filter(|call| {
        call.what == CallPurpose::Data
            && call.operation != "reduce-update"
            && !reduces.iter().any(|reduce| std::ptr::eq(*reduce, *call))
    });
    for call in others {
        let link = if call.operation == "all-reduce" {
            model.link
        } else {
            model.half(model.gather)
        };
        let length = link.alpha_seconds + call.len_bytes as f64 / link.beta_bytes_per_second;
        let length = length * call.times as f64 / call.every as f64;
        follow(
            EventKind::Gather,
            call.bucket.unwrap_or(0),
            call.len_bytes,
            length,
        );
    }
    events
}

/// [`Plan::rank_summary`].
pub(crate) fn rank_summary(plan: &Plan, model: impl Into<CostModel>) -> RankSummary {
    let model = model.into();
    let calls = calls::planned(plan);
    let count = |what| {
        let of = calls.iter().filter(move |call| call.what == what);
        of.map(|call| call.times.div_ceil(call.every)).sum::<u64>()
    };
    let sent = calls
        .iter()
        .map(|call| call.bytes_sent.saturating_mul(call.times) / call.every);
    let sent = sent.fold(0, u64::saturating_add);
    let of_rank = |rank| rank_bytes(plan, rank, sent);
    let ranks: Vec<RankBytes> = (0..plan.shard_group).map(of_rank).collect();
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

/// Time to make memory for segments that is given back once they are reduced.
fn fresh_seconds(plan: &Plan, model: &CostModel) -> f64 {
    if keeps_segments(plan) {
        return 0.0;
    }
    let sizes = plan.segments.iter().map(|segment| {
        let width = plan.storages[segment.storage].grad_dtype().len_bytes() as u64;
        (segment.elements.end - segment.elements.start) * width
    });
    let (all, largest) = sizes.fold((0, 0u64), |(all, most), one| (all + one, most.max(one)));
    // One that is being filled, and one for each stream.
    let most = (model.comm_streams as u64 + 1).saturating_mul(largest);
    let fresh = all.min(most).saturating_sub(kept_bytes(plan));
    model
        .fresh_bytes_per_second
        .map_or(0.0, |rate| fresh as f64 / rate)
}

/// What a rank keeps and sends.
fn rank_bytes(plan: &Plan, rank: usize, bytes_sent: u64) -> RankBytes {
    let shared = plan.zero != ZeroStage::None && plan.reduces();
    let mut found = RankBytes {
        bytes_sent,
        memory_bytes: kept_bytes(plan),
        ..RankBytes::default()
    };
    for (index, spec) in plan.storages.iter().enumerate() {
        let own: u64 = if shared && !spec.distributed {
            let buckets = plan.buckets.iter().filter(|bucket| bucket.storage == index);
            let part = |bucket: &crate::Bucket| bucket.part(rank % plan.shard_group);
            buckets.map(part).map(|part| part.end - part.start).sum()
        } else {
            spec.layout.total_numel()
        };
        let sums = plan.accumulation();
        found.memory_bytes += sums.map_or(0, |rule| rule.sum_bytes(spec, own));
        for (list, extent) in spec.lists.iter().zip(&spec.extents) {
            let numel = if *extent == crate::Extent::Shard {
                own
            } else {
                spec.layout.total_numel()
            };
            let len_bytes = numel * list.dtype.len_bytes() as u64;
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
    let tensors = plan.storages.iter().filter(|spec| !spec.distributed);
    let full = tensors.map(|spec| {
        (0..spec.layout.tensors())
            .filter(|&tensor| spec.layout.numel(tensor) > 0)
            .count()
    });
    let tensors = full.sum::<usize>() as u64;
    let windows = if plan.reduces_each() {
        u64::from(plan.micro_steps())
    } else {
        1
    };
    let gathers = match plan.zero {
        ZeroStage::None => 0,
        ZeroStage::One | ZeroStage::Two => 1,
        ZeroStage::Three => 2,
    };
    tensors * (windows + gathers)
}

/// `n` buckets of `S` bytes in all cost `n·α` in latency and leave `S / (n·β)` behind the
/// backward pass: least together at buckets of `√(S·α·β)` bytes.
fn proposed_cap(plan: &Plan, model: &CostModel) -> u64 {
    let link = if plan.zero >= ZeroStage::One {
        model.half(model.scatter)
    } else {
        model.link
    };
    let bytes = plan.buckets.iter().map(|bucket| {
        let width = plan.storages[bucket.storage].grad_dtype().len_bytes() as u64;
        bucket.numel() * width
    });
    let total: u64 = bytes.sum();
    let cap = total as f64 * link.alpha_seconds * link.beta_bytes_per_second;
    (cap.sqrt() as u64).clamp(4.min(total), total)
}

/// Adds the calls of one backward pass that begins at `start` and takes `length`; returns when the
/// last is through.
fn reduce_events(
    model: &CostModel,
    (start, length): (f64, f64),
    mut link_free: f64,
    reduces: &[&PlannedCall],
    events: &mut Vec<Event>,
) -> f64 {
    let total: u64 = reduces.iter().map(|call| call.len_bytes).sum();
    let mut ready = 0;
    for call in reduces {
        ready += call.len_bytes;
        let link = if call.operation == "all-reduce" {
            model.link
        } else {
            model.half(model.scatter)
        };
        let part = match model.comm_streams {
            0 => 1.0,
            _ => ready as f64 / total.max(1) as f64,
        };
        let full = start + length * part;
        // With two streams one call's latency passes behind the other's bytes; bytes share the
        // link.
        let begin = match model.comm_streams {
            0 | 1 => full.max(link_free) + link.alpha_seconds,
            _ => (full + link.alpha_seconds).max(link_free),
        };
        link_free = begin + call.len_bytes as f64 / link.beta_bytes_per_second;
        events.push(Event {
            kind: EventKind::Reduce,
            index: call.bucket.unwrap_or(0),
            len_bytes: call.len_bytes,
            start: begin - link.alpha_seconds,
            end: link_free,
        });
    }
    link_free
}

impl std::fmt::Display for RankSummary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "{} ranks, zero stage {}: {} a step (naive: {}) and {}, {} sent, {}",
            self.world,
            self.zero,
            counted(self.collectives, "call"),
            self.naive_collectives,
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
        let line = |f: &mut std::fmt::Formatter<'_>, what: &str, of: &RankBytes| {
            writeln!(
                f,
                "  {what}: {} of optimizer state, {} in all",
                bytes(of.state_bytes),
                bytes(of.memory_bytes)
            )
        };
        line(f, "worst rank", &self.worst_rank)?;
        line(f, "mean rank", &self.mean_rank)?;
        write!(
            f,
            "  predicted: {:.2} ms, of which {:.2} ms are calls that nothing hides",
            self.predicted_step_ns / 1e6,
            self.exposed_ns / 1e6,
        )?;
        // Unknown, or nothing to do.
        if self.local_ns > 0.0 {
            write!(f, " and {:.2} ms this rank's update", self.local_ns / 1e6)?;
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
