//! The norm of gradients that lie in shards, with the bits of one that lie together.
//!
//! The fixed tree adds chunks of 65,536 elements, counted from a tensor's start. A chunk belongs to the rank that has its first
//! element; what other ranks have of it is gathered, then the sums of all chunks are, in order, and every rank concludes alike.

use std::ops::Range;

use fusestep_amp::{GradientRule, norm_kernel};
use fusestep_collective::Operation;
use fusestep_launch::{
    Backend, ControlBlock, ControlRule, MultiTensorReduction, SquareSum, TensorPartials,
};
use fusestep_simd::Level;
use fusestep_tensor::DType;

use super::comms::Comms;
use super::words::Words;
use super::{Flat, Held, RankPlan, RankState, Topology};
use crate::norm::NormState;
use crate::passes::Zero;
use crate::{PlanError, State};

/// The memory of the norm.
pub(crate) struct RankNorm {
    rule: GradientRule,
    lines: Vec<Line>,
    /// Sum of squares of every chunk, line after line.
    partials: Vec<SquareSum>,
    /// Where each parameter's are; behind them those of other ranks' slices.
    tensors: Vec<TensorPartials>,
    /// The parameter of each.
    members: Vec<u32>,
    sums: Vec<SquareSum>,
}

impl std::fmt::Debug for RankNorm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RankNorm")
            .field("rule", &self.rule)
            .field("partials", &self.partials.len())
            .finish_non_exhaustive()
    }
}

/// One dtype's part of it.
struct Line {
    kernel: Box<dyn MultiTensorReduction>,
    /// Elements of the line in each of this rank's chunks.
    own: Vec<Range<u64>>,
    /// Chunks of each rank, to be gathered; empty if every rank has all.
    counts: Vec<usize>,
    /// The line's chunks among all, and the first of this rank's among them.
    chunks: Range<usize>,
    at: usize,
    /// The elements of the line that this rank has.
    held: Range<u64>,
    /// Elements at the start of each rank's shard that belong to a chunk of a rank before it.
    heads: Vec<usize>,
    gathered: Words,
    /// A chunk that lies in several shards.
    straddling: Words,
}

impl RankNorm {
    /// The memory, and a control block for the local state; `None` if no pass asks for a norm.
    pub(crate) fn attach(
        plan: &RankPlan,
        local: &mut State,
        backend: &dyn Backend,
    ) -> Result<Option<Self>, PlanError> {
        let Some(rule) = plan.whole.gradients.rule() else {
            return Ok(None);
        };
        let mut tensors = vec![TensorPartials::default(); plan.params().len()];
        let mut lines = Vec::with_capacity(plan.flats.len());
        let mut members: Vec<u32> = (0..tensors.len() as u32).collect();
        let (mut first, topology) = (0, plan.topology());
        for flat in &plan.flats {
            let kernel = norm_kernel(flat.grad_dtype)?;
            let line = match (flat.held, plan.zero()) {
                (Held::Together, Zero::Zero0) => Line::whole(kernel, flat, first, &mut tensors),
                (Held::Together, _) => {
                    Line::sharded(kernel, flat, plan.shard_place().rank, first, &mut tensors)
                }
                (Held::Apart, _) => {
                    let own = Line::whole(kernel, flat, first, &mut tensors);
                    own.of_ranks(flat, topology, &mut tensors, &mut members)
                }
            };
            first = line.chunks.end;
            lines.push(line);
        }
        local.norm = Some(NormState::given(rule, backend)?);
        local.scaled = plan.whole.gradients.loss_scale.is_some();
        Ok(Some(Self {
            rule,
            lines,
            partials: vec![SquareSum::default(); first],
            sums: vec![SquareSum::default(); tensors.len()],
            tensors,
            members,
        }))
    }
}

impl Line {
    /// A line that this rank has all of.
    fn whole(
        kernel: Box<dyn MultiTensorReduction>,
        flat: &Flat,
        first: usize,
        tensors: &mut [TensorPartials],
    ) -> Self {
        let chunk_elements = u64::from(kernel.chunk_elements());
        let mut own = Vec::new();
        for (position, &member) in flat.members.iter().enumerate() {
            let (start, end) = (flat.starts[position], flat.starts[position + 1]);
            let count = (end - start).div_ceil(chunk_elements);
            tensors[member as usize] = TensorPartials {
                first: (first + own.len()) as u64,
                count,
            };
            own.extend((0..count).map(|chunk| {
                let from = start + chunk * chunk_elements;
                from..end.min(from + chunk_elements)
            }));
        }
        Self {
            kernel,
            counts: Vec::new(),
            chunks: first..first + own.len(),
            at: 0,
            held: 0..flat.total(),
            own,
            heads: vec![0; flat.bounds.len() - 1],
            gathered: Words::default(),
            straddling: Words::default(),
        }
    }

    /// The same of every rank: a slice of each.
    fn of_ranks(
        self,
        flat: &Flat,
        Topology { rank, world }: Topology,
        tensors: &mut Vec<TensorPartials>,
        members: &mut Vec<u32>,
    ) -> Self {
        let count = self.own.len();
        for other in 1..world {
            for &member in &flat.members {
                let own = tensors[member as usize];
                tensors.push(TensorPartials {
                    first: own.first + (other * count) as u64,
                    ..own
                });
                members.push(member);
            }
        }
        Self {
            counts: vec![count; world],
            chunks: self.chunks.start..self.chunks.start + world * count,
            at: rank * count,
            ..self
        }
    }

    /// A line of which this rank has a shard.
    fn sharded(
        kernel: Box<dyn MultiTensorReduction>,
        flat: &Flat,
        rank: usize,
        first: usize,
        tensors: &mut [TensorPartials],
    ) -> Self {
        let world = flat.bounds.len() - 1;
        let chunk_elements = u64::from(kernel.chunk_elements());
        let (mut counts, mut heads) = (vec![0; world], vec![0; world]);
        let (mut own, mut owner, mut next) = (Vec::new(), 0, first as u64);
        for (position, &member) in flat.members.iter().enumerate() {
            let (start, end) = (flat.starts[position], flat.starts[position + 1]);
            let count = (end - start).div_ceil(chunk_elements);
            tensors[member as usize] = TensorPartials { first: next, count };
            next += count;
            for chunk in 0..count {
                let from = start + chunk * chunk_elements;
                let chunk = from..end.min(from + chunk_elements);
                while flat.bounds[owner + 1] <= chunk.start {
                    owner += 1;
                }
                counts[owner] += 1;
                let mut other = owner + 1;
                while other < world && flat.bounds[other] < chunk.end {
                    let shard = flat.shard(other);
                    heads[other] = (shard.end.min(chunk.end) - shard.start) as usize;
                    other += 1;
                }
                if owner == rank {
                    own.push(chunk);
                }
            }
        }
        let width = flat.grad_dtype.len_bytes();
        let chunks: usize = counts.iter().sum();
        Self {
            own,
            chunks: first..first + chunks,
            at: counts[..rank].iter().sum(),
            held: flat.shard(rank),
            counts,
            gathered: Words::zeroed(heads.iter().sum::<usize>() * width),
            straddling: Words::zeroed(chunk_elements as usize * width),
            heads,
            kernel,
        }
    }

    /// Sums this rank's chunks into `partials` and gathers those of all ranks.
    fn sum(
        &mut self,
        flat: &Flat,
        shard: &Words,
        partials: &mut [SquareSum],
        comms: &mut Comms<'_>,
    ) -> Result<(), PlanError> {
        let rank = comms.group_rank();
        let width = flat.grad_dtype.len_bytes();
        let held = self.held.clone();
        let before: usize = self.heads[..rank].iter().sum();
        let head = self.heads[rank];
        if !self.gathered.bytes().is_empty() {
            let place = before * width..(before + head) * width;
            self.gathered.bytes_mut()[place].copy_from_slice(&shard.bytes()[..head * width]);
            let gathered = self.gathered.bytes_mut();
            let counts = Some(self.heads.as_slice());
            comms.in_group(Operation::AllGather, flat.grad_dtype, counts, gathered)?;
        }
        let level = Level::detect();
        let partials = &mut partials[self.chunks.clone()];
        for (partial, chunk) in partials[self.at..].iter_mut().zip(&self.own) {
            let start = (chunk.start - held.start) as usize * width;
            let end = (chunk.end.min(held.end) - held.start) as usize * width;
            let own = &shard.bytes()[start..end];
            let len_bytes = (chunk.end - chunk.start) as usize * width;
            if own.len() == len_bytes {
                *partial = self.kernel.run_host(level, own);
                continue;
            }
            // The heads of the next ranks follow each other up to the chunk's end.
            let rest = (before + head) * width;
            let rest = &self.gathered.bytes()[rest..rest + len_bytes - own.len()];
            let whole = &mut self.straddling.bytes_mut()[..len_bytes];
            whole[..own.len()].copy_from_slice(own);
            whole[own.len()..].copy_from_slice(rest);
            *partial = self.kernel.run_host(level, whole);
        }
        if self.counts.is_empty() {
            return Ok(());
        }
        let counts: Vec<usize> = self
            .counts
            .iter()
            .map(|n| n * size_of::<SquareSum>())
            .collect();
        let (counts, bytes) = (Some(counts.as_slice()), bytemuck::cast_slice_mut(partials));
        match flat.held {
            // Shards are those of a group, and every group has them all.
            Held::Together => comms.in_group(Operation::AllGather, DType::U8, counts, bytes)?,
            // No two ranks have the same slice, in whatever groups they are.
            Held::Apart => comms.in_place(Operation::AllGather, DType::U8, counts, bytes)?,
        }
        Ok(())
    }
}

impl RankPlan {
    /// Decides on the step from all gradients, if a pass asks for their norm and they lie in shards.
    pub(crate) fn decide(
        &self,
        state: &mut RankState,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        present: &[u8],
    ) -> Result<(), PlanError> {
        let (Some(norm), Some(local)) = (&mut state.norm, &mut state.local.norm) else {
            return Ok(());
        };
        for ((line, flat), shard) in norm.lines.iter_mut().zip(&self.flats).zip(&state.shards) {
            line.sum(flat, shard, &mut norm.partials, comms)?;
        }
        let present = norm.members.iter().map(|&member| present[member as usize]);
        let tensors = norm.tensors.iter().zip(present);
        let tensors: Vec<TensorPartials> = tensors
            .map(|(&tensor, present)| match present {
                0 => TensorPartials { count: 0, ..tensor },
                _ => tensor,
            })
            .collect();
        let mut block = ControlBlock::read(backend, local.control.as_ref())?;
        norm.rule
            .run_host(&norm.partials, &tensors, &mut norm.sums, &mut block);
        Ok(block.write(backend, local.control.as_mut())?)
    }
}
