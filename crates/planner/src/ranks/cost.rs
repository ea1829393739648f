//! What a step of many ranks costs, before it has been run.

use std::fmt::Write;

use fusestep_collective::Link;
use serde::Serialize;

use super::{Held, RankPlan};
use crate::display::{bytes, grouped};
use crate::html::escape;
use crate::html_page;
use crate::passes::Zero;

/// Width and height of the timeline's drawing, and of a row.
const WIDTH: f64 = 1_000.0;
const ROW: f64 = 22.0;

/// What a step is predicted from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// Latency and bandwidth of an all-reduce; a reduce-scatter or an all-gather moves half of the bytes.
    pub link: Link,
    /// Length of one backward pass; gradients become ready evenly, element by element.
    pub backward_seconds: f64,
    /// Rings, on which calls run beside the backward pass; 0 for calls after it.
    pub rings: usize,
}

impl From<Link> for CostModel {
    fn from(link: Link) -> Self {
        Self {
            link,
            backward_seconds: 0.0,
            rings: 0,
        }
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
    /// The framework computes gradients.
    Backward,
    /// A bucket of gradients is reduced.
    Reduce,
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
    /// Time of the backward passes and of what they do not hide, in nanoseconds. The update itself is not in it.
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
            let (start, end) = (now, now + model.backward_seconds);
            events.push(Event {
                kind: EventKind::Backward,
                index: pass as usize,
                len_bytes: 0,
                start,
                end,
            });
            now = end;
            if self.reduces() && pass + windows >= passes {
                link_free = self.reduce_events(model, start, link_free, &mut events);
                now = end.max(link_free);
            }
        }
        for (index, len_bytes) in self.gather_bytes() {
            let length = model.length(len_bytes, 0.5);
            events.push(Event {
                kind: EventKind::Gather,
                index,
                len_bytes,
                start: now,
                end: now + length,
            });
            now += length;
        }
        events
    }

    /// Adds the calls of one backward pass that begins at `start`; returns when the last is through.
    fn reduce_events(
        &self,
        model: &CostModel,
        start: f64,
        mut link_free: f64,
        events: &mut Vec<Event>,
    ) -> f64 {
        let buckets = &self.buckets[..self.reduced];
        let total: u64 = buckets.iter().map(|bucket| bucket.numel).sum();
        let share = self.reduce_share();
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
            let full = start + model.backward_seconds * part;
            let len_bytes = bucket.numel * self.flats[bucket.flat].grad_dtype.len_bytes() as u64;
            let across = if groups > 1 { share_across } else { 0.0 };
            let transfer = (share + across) * len_bytes as f64 / model.link.beta_bytes_per_second;
            // With two rings one call's latency passes behind the other's bytes; bytes share the link.
            let begin = match model.rings {
                0 | 1 => full.max(link_free) + model.link.alpha_seconds,
                _ => (full + model.link.alpha_seconds).max(link_free),
            };
            link_free = begin + transfer;
            events.push(Event {
                kind: EventKind::Reduce,
                index,
                len_bytes,
                start: begin - model.link.alpha_seconds,
                end: link_free,
            });
        }
        link_free
    }

    /// The part of an all-reduce's bytes that a bucket's call moves.
    fn reduce_share(&self) -> f64 {
        if self.zero() >= Zero::Zero2 { 0.5 } else { 1.0 }
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
        let hidden = f64::from(self.micro_steps()) * model.backward_seconds;
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
            predicted_step_ns: end * 1e9,
            proposed_bucket_cap_bytes: self.proposed_cap(model.link),
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
        let cap =
            total as f64 * link.alpha_seconds * link.beta_bytes_per_second / self.reduce_share();
        (cap.sqrt() as u64).clamp(4.min(total), total)
    }

    /// Bytes of everything that [`super::RankState`] keeps for this rank between steps.
    pub fn memory_bytes(&self) -> u64 {
        let local: u64 = self
            .local
            .storages
            .iter()
            .map(|storage| storage.len_bytes())
            .sum();
        let lines = self.flats.iter().zip(&self.pieces).map(|(flat, pieces)| {
            let numel: u64 = pieces.iter().map(|piece| piece.numel).sum();
            let width = flat.grad_dtype.len_bytes() as u64;
            let sums = if self.reduces_each() { width.max(4) } else { 0 };
            let replica = match self.zero() {
                Zero::Zero0 | Zero::Zero3 => 0,
                Zero::Zero1 | Zero::Zero2 => flat.total() * flat.dtype.len_bytes() as u64,
            };
            numel * (width + sums) + replica
        });
        let merges = self.micro_steps() > 1 && !self.reduces_each();
        let narrow = self.buckets.iter().map(|bucket| {
            let narrow = self.flats[bucket.flat].grad_dtype.len_bytes() == 2;
            if merges && narrow {
                4 * bucket.numel
            } else {
                0
            }
        });
        let kept = self.buckets.iter().enumerate();
        let kept = kept.filter(|&(index, _)| self.keeps(index));
        let kept = kept.map(|(_, bucket)| self.len_bytes_of(bucket) as u64);
        local + lines.sum::<u64>() + kept.sum::<u64>() + narrow.sum::<u64>()
    }

    /// A page: the timeline drawn to scale, what passes did, and this rank's own launches.
    pub fn to_html(&self, model: &CostModel) -> String {
        let topology = self.topology();
        let title = format!("Step of rank {} of {}", topology.rank, topology.world);
        let mut page = String::new();
        let summary = self.summary(*model);
        let _ = writeln!(page, "<pre>{}</pre>", escape(&summary.to_string()));
        page.push_str("<h2>Timeline</h2>\n<p class=\"muted\">Backward passes, calls that reduce buckets, calls that gather \
             parameters, as the cost model predicts them. Hover for numbers.</p>\n");
        draw(&mut page, &self.timeline(model));
        page.push_str("<h2>Passes of ranks</h2>\n<ul>\n");
        for note in self.explain() {
            let _ = writeln!(page, "<li>{}</li>", escape(&note.to_string()));
        }
        page.push_str("</ul>\n");
        page.push_str(&self.local.to_html_fragment());
        html_page(&title, &page)
    }
}

impl CostModel {
    fn length(&self, len_bytes: u64, share: f64) -> f64 {
        self.link.alpha_seconds + share * len_bytes as f64 / self.link.beta_bytes_per_second
    }
}

fn draw(page: &mut String, events: &[Event]) {
    let end = events.iter().map(|event| event.end).fold(0.0, f64::max);
    let scale = WIDTH / end.max(f64::MIN_POSITIVE);
    let _ = write!(
        page,
        "<svg viewBox=\"0 0 {WIDTH} {}\" role=\"img\">",
        3.0 * ROW
    );
    for event in events {
        let (row, color) = match event.kind {
            EventKind::Backward => (0.0, "#7a8ca3"),
            EventKind::Reduce => (1.0, "#4878a8"),
            EventKind::Gather => (2.0, "#a8784a"),
        };
        let name = match event.kind {
            EventKind::Backward => "backward pass",
            EventKind::Reduce => "bucket",
            EventKind::Gather => "gather of line",
        };
        let _ = write!(
            page,
            "<rect x=\"{:.2}\" y=\"{:.1}\" width=\"{:.2}\" height=\"{:.1}\" fill=\"{color}\"><title>{name} {}: {} bytes, {:.3} to {:.3} ms</title></rect>",
            event.start * scale,
            row * ROW + 1.0,
            ((event.end - event.start) * scale - 0.3).max(0.2),
            ROW - 2.0,
            event.index,
            grouped(event.len_bytes),
            event.start * 1e3,
            event.end * 1e3,
        );
    }
    page.push_str("</svg>\n");
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
            "predicted: {:.3} ms, of it {:.3} ms not hidden behind backward passes; buckets of {} would cost least",
            self.predicted_step_ns / 1e6,
            self.exposed_ns / 1e6,
            bytes(self.proposed_bucket_cap_bytes),
        )
    }
}
