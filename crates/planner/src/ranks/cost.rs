//! What a step of many ranks costs, before it has been run.

use fusestep_collective::{Costs, Link};
use serde::Serialize;

use super::{Held, RankPlan};
use crate::display::bytes;
use crate::passes::Zero;

/// What a step is predicted from.
///
/// ```text
/// call of B bytes    α + B / β           of its kind: all-reduce, reduce-scatter or all-gather
/// backward pass      as given + C / M    C: bytes read and written to put gradients into buckets, M: `memory_bytes_per_second`
///                            + N / F    N: bytes of buckets that are allocated anew, F: `fresh_bytes_per_second`
/// update             U / M               U: the same for buckets into shards, shards to the update, the update, updated parameters
/// step               passes, the calls they do not hide, update, gathers
/// ```
///
/// `C`, `U` and `N` count what [`RankPlan::pass_bytes`], [`RankPlan::update_bytes`] and [`RankPlan::fresh_bytes`] say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// Latency and bandwidth of an all-reduce.
    pub link: Link,
    /// The same of a reduce-scatter; `None` for half of an all-reduce's bytes.
    pub scatter: Option<Link>,
    /// The same of an all-gather; `None` for half of an all-reduce's bytes.
    pub gather: Option<Link>,
    /// Bytes that a rank reads and writes per second while the others do so too; `None` leaves such work out.
    pub memory_bytes_per_second: Option<f64>,
    /// Bytes of memory just allocated that a rank writes for the first time per second; `None` leaves that out.
    pub fresh_bytes_per_second: Option<f64>,
    /// Length of one backward pass; gradients become ready evenly, element by element.
    pub backward_seconds: f64,
    /// Rings, on which calls run beside the backward pass; 0 for calls after it.
    pub rings: usize,
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
            rings: 0,
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
    /// Which: the micro-step of a backward pass, the bucket or the dtype's line of a call.
    pub index: usize,
    /// Bytes of each rank's buffer.
    pub len_bytes: u64,
    /// Seconds from the first backward pass's start.
    pub start: f64,
    /// The same for its end.
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

/// The numbers of a step of several ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankSummary {
    /// The number of ranks.
    pub world: usize,
    /// ZeRO stage.
    pub zero: u8,
    /// Calls between ranks of one step that move gradients or parameters.
    pub collectives: u64,
    /// The same with one call for each tensor.
    pub naive_collectives: u64,
    /// Bytes that each rank sends in one step, by ring algorithms.
    pub bytes_on_wire: u64,
    /// Messages that each rank sends in one step, by ring algorithms.
    pub messages: u64,
    /// Bytes of optimizer state on this rank, padding included.
    pub state_bytes_per_rank: u64,
    /// Bytes of everything that this rank keeps between steps: parameters, gradients, buckets, state.
    pub memory_bytes_per_rank: u64,
    /// Bytes of all buckets; where they are given back once reduced (from stage 2 on), a step takes up to this much more.
    pub bucket_bytes_per_rank: u64,
    /// Buckets of gradients.
    pub buckets: usize,
    /// Micro-steps of an update.
    pub micro_steps: u32,
    /// Time of calls that no backward pass hides, in nanoseconds.
    pub exposed_ns: f64,
    /// Time of this rank's own copies and of its update, in nanoseconds; 0 if the model does not know how fast memory is.
    pub local_ns: f64,
    /// Time of the backward passes, of what they do not hide and of this rank's own work, in nanoseconds.
    pub predicted_step_ns: f64,
    /// The cap of buckets at which latency and the wait for the last bucket cost least together.
    pub proposed_bucket_cap_bytes: u64,
}

impl RankPlan {
    /// The calls of a step on its clock, in the order they start.
    pub fn timeline(&self, model: &CostModel) -> Vec<Event> {
        let windows = if self.reduces_each() {
            self.micro_steps()
        } else {
            1
        };
        let passes = self.micro_steps();
        let (mut events, mut now, mut link_free) = (Vec::new(), 0.0, 0.0f64);
        for pass in 0..passes {
            let length = model.backward_seconds + self.pass_seconds(model, pass);
            let (start, end) = (now, now + length);
            events.push(Event {
                kind: EventKind::Backward,
                index: pass as usize,
                len_bytes: 0,
                start,
                end,
            });
            now = end;
            if self.reduces() && pass + windows >= passes {
                link_free = self.reduce_events(model, (start, length), link_free, &mut events);
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
            let len_bytes = self.update_bytes();
            follow(EventKind::Update, 0, len_bytes, model.local(len_bytes));
        }
        let gather = model.half(model.gather);
        for (index, len_bytes) in self.gather_bytes() {
            let length = gather.alpha_seconds + len_bytes as f64 / gather.beta_bytes_per_second;
            follow(EventKind::Gather, index, len_bytes, length);
        }
        events
    }

    /// Adds the calls of one backward pass that begins at `start` and takes `length`; returns when the last is through.
    fn reduce_events(
        &self,
        model: &CostModel,
        (start, length): (f64, f64),
        mut link_free: f64,
        events: &mut Vec<Event>,
    ) -> f64 {
        let buckets = &self.buckets[..self.reduced];
        let total: u64 = buckets.iter().map(|bucket| bucket.numel).sum();
        let link = self.reduce_link(model);
        let group = self.shard_place().world;
        let groups = self.topology().world / group;
        let share_across = match self.zero() >= Zero::Zero2 {
            true => 1.0 / group as f64,
            false => 1.0,
        };
        let mut ready = 0;
        for (index, bucket) in buckets.iter().enumerate() {
            ready += bucket.numel;
            let part = match model.rings {
                0 => 1.0,
                _ => ready as f64 / total.max(1) as f64,
            };
            let full = start + length * part;
            let len_bytes = bucket.numel * self.flats[bucket.flat].grad_dtype.len_bytes() as u64;
            let across = if groups > 1 { share_across } else { 0.0 };
            let transfer = len_bytes as f64 / link.beta_bytes_per_second
                + across * len_bytes as f64 / model.link.beta_bytes_per_second;
            // With two rings one call's latency passes behind the other's bytes; bytes share the link.
            let begin = match model.rings {
                0 | 1 => full.max(link_free) + link.alpha_seconds,
                _ => (full + link.alpha_seconds).max(link_free),
            };
            link_free = begin + transfer;
            events.push(Event {
                kind: EventKind::Reduce,
                index,
                len_bytes,
                start: begin - link.alpha_seconds,
                end: link_free,
            });
        }
        link_free
    }

    /// A rank's own work on the gradients of a backward pass.
    fn pass_seconds(&self, model: &CostModel, pass: u32) -> f64 {
        let fresh = |rate| self.fresh_bytes(pass, model.rings) as f64 / rate;
        let fresh = model.fresh_bytes_per_second.map_or(0.0, fresh);
        model.local(self.pass_bytes(pass)) + fresh
    }

    /// What a bucket's call costs.
    fn reduce_link(&self, model: &CostModel) -> Link {
        match self.zero() >= Zero::Zero2 {
            true => model.half(model.scatter),
            false => model.link,
        }
    }

    /// Line and bytes of every call that brings parameters out of shards.
    fn gather_bytes(&self) -> Vec<(usize, u64)> {
        let line = |index: usize, numel: u64| {
            let width = self.flats[index].dtype.len_bytes() as u64;
            (index, numel * width)
        };
        let together = |index: &usize| self.flats[*index].held == Held::Together;
        let lines = || (0..self.flats.len()).filter(together);
        let whole = || lines().map(|index| line(index, self.flats[index].total()));
        match self.zero() {
            _ if self.topology().world == 1 => Vec::new(),
            Zero::Zero0 => Vec::new(),
            Zero::Zero1 | Zero::Zero2 if !self.broadcasts.is_empty() => {
                let numel = |range: &std::ops::Range<u64>| range.end - range.start;
                let groups = self.broadcasts.iter();
                groups
                    .map(|group| line(group.flat, numel(&group.elements)))
                    .collect()
            }
            Zero::Zero1 | Zero::Zero2 => whole().collect(),
            // Before the forward pass, and again before the backward pass.
            Zero::Zero3 => whole().chain(whole()).collect(),
        }
    }

    /// The numbers of a step; `model` predicts its time.
    pub fn summary(&self, model: impl Into<CostModel>) -> RankSummary {
        let model = model.into();
        let world = self.topology().world as u64;
        let group = self.shard_place().world as u64;
        let windows = match (self.reduces(), self.reduces_each()) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => u64::from(self.micro_steps()),
        };
        let part = |bytes: u64| bytes * (group - 1) / group;
        let reduce_parts = if self.zero() >= Zero::Zero2 { 1 } else { 2 };
        let gradient_bytes = self.bucket_bytes(self.reduced);
        let gathered: u64 = self
            .gather_bytes()
            .iter()
            .map(|&(_, bytes)| part(bytes))
            .sum();
        let gathers = self.gather_bytes().len() as u64;
        let tensors = self.reduced_tensors() as u64;
        let gathers_of_tensor = match self.zero() {
            _ if world == 1 => 0,
            Zero::Zero0 => 0,
            Zero::Zero1 | Zero::Zero2 => 1,
            Zero::Zero3 => 2,
        };
        let buckets = self.reduced as u64;
        let groups = world / group;
        // Across groups each bucket, or this rank's part of it, is all-reduced once more.
        let calls_across = if groups > 1 { windows * buckets } else { 0 };
        let bytes_across = match self.zero() >= Zero::Zero2 {
            true => 2 * gradient_bytes / group * (groups - 1) / groups,
            false => 2 * gradient_bytes * (groups - 1) / groups,
        };
        let events = self.timeline(&model);
        let end = events.last().map_or(0.0, |event| event.end);
        let passes = (0..self.micro_steps()).map(|pass| self.pass_seconds(&model, pass));
        let local = passes.sum::<f64>() + model.local(self.update_bytes());
        let hidden = f64::from(self.micro_steps()) * model.backward_seconds + local;
        RankSummary {
            world: world as usize,
            zero: self.zero().number(),
            collectives: windows * buckets + calls_across + gathers,
            naive_collectives: tensors * (windows + gathers_of_tensor),
            bytes_on_wire: windows * (reduce_parts * part(gradient_bytes) + bytes_across)
                + gathered,
            messages: (group - 1) * (windows * reduce_parts * buckets + gathers)
                + 2 * (groups - 1) * calls_across,
            state_bytes_per_rank: self.state_bytes(),
            memory_bytes_per_rank: self.memory_bytes(),
            bucket_bytes_per_rank: self.bucket_bytes(self.buckets.len()),
            buckets: self.reduced,
            micro_steps: self.micro_steps(),
            exposed_ns: (end - hidden).max(0.0) * 1e9,
            local_ns: local * 1e9,
            predicted_step_ns: end * 1e9,
            proposed_bucket_cap_bytes: self.proposed_cap(self.reduce_link(&model)),
        }
    }

    /// Bytes of the first `count` buckets.
    fn bucket_bytes(&self, count: usize) -> u64 {
        let bytes = self.buckets[..count]
            .iter()
            .map(|bucket| bucket.numel * self.flats[bucket.flat].grad_dtype.len_bytes() as u64);
        bytes.sum()
    }

    /// `n` buckets of `S` bytes in all cost `n·α` in latency and leave `S / (n·β)` behind the backward pass: least together at buckets
    /// of `√(S·α·β)` bytes.
    fn proposed_cap(&self, link: Link) -> u64 {
        let total = self.bucket_bytes(self.reduced);
        let cap = total as f64 * link.alpha_seconds * link.beta_bytes_per_second;
        (cap.sqrt() as u64).clamp(4.min(total), total)
    }
}

impl std::fmt::Display for RankSummary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "rank 0 of {}, zero stage {}: {} calls (naive: {}) in {} buckets, {} sent in {} messages",
            self.world,
            self.zero,
            self.collectives,
            self.naive_collectives,
            self.buckets,
            bytes(self.bytes_on_wire),
            self.messages,
        )?;
        writeln!(
            f,
            "memory: {}, of it {} optimizer state",
            bytes(self.memory_bytes_per_rank),
            bytes(self.state_bytes_per_rank),
        )?;
        writeln!(
            f,
            "predicted: {:.3} ms, of it {:.3} ms not hidden behind backward passes{}; buckets of {} would cost least",
            self.predicted_step_ns / 1e6,
            self.exposed_ns / 1e6,
            match self.local_ns > 0.0 {
                true => format!(
                    " and {:.3} ms of this rank's own copies and update",
                    self.local_ns / 1e6
                ),
                false => String::new(),
            },
            bytes(self.proposed_bucket_cap_bytes),
        )
    }
}
