//! The cost of a step of many ranks, before it has been run: its calls, read off the stages, and a
//! prediction of its time.

use fusestep_collective::{Costs, Link, Operation};
use serde::Serialize;

use crate::plan::calls;
use crate::plan::calls::{CallPurpose, PlannedCall};
use crate::plan::segments::{keeps_segments, kept_bytes, len_bytes};
use crate::plan::value::Plan;

/// The call that reduces a bucket and updates it.
const FUSED: &str = Operation::ReduceUpdate.name();

/// Figures that a step is predicted from.
///
/// ```text
/// call of B bytes    α + B / β           of its kind: all-reduce, reduce-scatter or all-gather;
///                                        one that updates as well moves its bytes as the last two
///                                        do, or, where memory's speed is known, in the update
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
    pub streams: usize,
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
            streams: 0,
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
    pub(crate) fn half(&self, known: Option<Link>) -> Link {
        known.unwrap_or(Link {
            beta_bytes_per_second: 2.0 * self.link.beta_bytes_per_second,
            ..self.link
        })
    }

    /// Seconds of a call that also updates, without what is the update's.
    fn fused(&self, call: &PlannedCall) -> f64 {
        let link = self.half(self.gather);
        let bytes = match self.memory_bytes_per_second {
            Some(_) => 0.0,
            None => call.len_bytes as f64,
        };
        link.alpha_seconds + bytes / link.beta_bytes_per_second
    }

    /// The assumption about calls, as a sentence.
    pub(crate) fn text(&self) -> String {
        format!(
            "an all-reduce taken to cost {:.1} us and {:.1} GB/s",
            self.link.alpha_seconds * 1e6,
            self.link.beta_bytes_per_second / 1e9
        )
    }

    /// Seconds in which this many bytes are read and written.
    pub(crate) fn local(&self, len_bytes: u64) -> f64 {
        let seconds = |rate| len_bytes as f64 / rate;
        self.memory_bytes_per_second.map_or(0.0, seconds)
    }
}

/// A call between ranks, or a backward pass, on a step's clock.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Event {
    /// The kind of the event.
    pub kind: EventKind,
    /// Index of the event: the micro-step of a backward pass, or the bucket of a call.
    pub index: usize,
    /// Bytes of each rank's buffer.
    pub len_bytes: u64,
    /// Seconds from the first backward pass's start.
    pub start: f64,
    /// Seconds from the first backward pass's start to its end.
    pub end: f64,
}

/// The kind of an event: a backward pass, or a call by its purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// The framework computes gradients, and they are put into buckets.
    Backward,
    /// A bucket of gradients is reduced.
    Reduce,
    /// This rank updates its part of the parameters.
    Update,
    /// Parameters are gathered from their shards.
    Gather,
}

pub(crate) fn timeline(plan: &Plan, model: &CostModel) -> Vec<Event> {
    let calls = calls::planned(plan);
    let is_reduce = |call: &&PlannedCall| {
        let reduces_whole = call.operation == "all-reduce" && call.bucket.is_some();
        let reduces = reduces_whole || call.operation.starts_with("reduce-scatter");
        call.what == CallPurpose::Data && reduces
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
            let pass = BackwardPass { start, length };
            link_free = reduce_events(model, pass, link_free, &reduces, &mut events);
            now = end.max(link_free);
        }
    }
    let mut follow = |kind, index, len_bytes, length| {
        events.push(Event { kind, index, len_bytes, start: now, end: now + length });
        now += length;
    };
    for call in calls.iter().filter(|call| call.operation == FUSED) {
        let bucket = call.bucket.unwrap_or(0);
        follow(EventKind::Reduce, bucket, call.len_bytes, model.fused(call));
    }
    if model.memory_bytes_per_second.is_some() {
        let len_bytes = plan.traffic_bytes();
        follow(EventKind::Update, 0, len_bytes, model.local(len_bytes));
    }
    let others = calls.iter().filter(|call| {
        call.what == CallPurpose::Data && call.operation != FUSED && !is_reduce(call)
    });
    for call in others {
        let link =
            if call.operation == "all-reduce" { model.link } else { model.half(model.gather) };
        let length = link.alpha_seconds + call.len_bytes as f64 / link.beta_bytes_per_second;
        let length = length * call.times as f64 / call.every as f64;
        follow(EventKind::Gather, call.bucket.unwrap_or(0), call.len_bytes, length);
    }
    events
}

/// Time to make memory for segments that is given back once they are reduced.
fn fresh_seconds(plan: &Plan, model: &CostModel) -> f64 {
    if keeps_segments(plan) {
        return 0.0;
    }
    let segments = plan.segments.iter();
    let sizes = segments.map(|segment| len_bytes(plan, segment) as u64);
    let (all, largest) = sizes.fold((0, 0u64), |(all, most), one| (all + one, most.max(one)));
    // One that is being filled, and one for each stream.
    let most = (model.streams as u64 + 1).saturating_mul(largest);
    let fresh = all.min(most).saturating_sub(kept_bytes(plan));
    model.fresh_bytes_per_second.map_or(0.0, |rate| fresh as f64 / rate)
}

/// Seconds from the first backward pass's start to a pass, and seconds that the pass takes.
struct BackwardPass {
    start: f64,
    length: f64,
}

/// Adds the calls of one backward pass; returns when the last is through.
fn reduce_events(
    model: &CostModel,
    pass: BackwardPass,
    mut link_free: f64,
    reduces: &[&PlannedCall],
    events: &mut Vec<Event>,
) -> f64 {
    let total: u64 = reduces.iter().map(|call| call.len_bytes).sum();
    let mut ready = 0;
    for call in reduces {
        ready += call.len_bytes;
        let link =
            if call.operation == "all-reduce" { model.link } else { model.half(model.scatter) };
        let part = match model.streams {
            0 => 1.0,
            _ => ready as f64 / total.max(1) as f64,
        };
        let full = pass.start + pass.length * part;
        // With two streams one call's latency passes behind the other's bytes; bytes share the
        // link.
        let begin = match model.streams {
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
