//! The collectives that reduce: each rank reduces its part of all ranks' elements, in rank order,
//! where they lie, and then what others have left of theirs.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Instant;

use fusestep_coalesce::MemoryOwner;
use fusestep_collective::{
    Blocks, Buffers, Call, CollectiveError, Column, Columns, RankMemory, Receivers, ReduceOp,
    ReduceUpdate,
};
use fusestep_simd::Level;
use fusestep_tensor::DType;
use smallvec::SmallVec;

use crate::card::Cards;
use crate::communicator::{ProcessCommunicator, STAGE_BYTES, copied};
use crate::heap::Arena;
use crate::segment::Segment;
use crate::task::Task;

/// Parts of a reduction end at multiples of this, a cache line, so that ranks share few lines.
const LINE_BYTES: usize = 64;

/// What all ranks know of a reduction.
struct Plan<'a> {
    blocks: Blocks<'a>,
    dtype: DType,
    op: ReduceOp,
    receivers: Receivers,
    whole_bytes: usize,
    level: Level,
    claim_bytes: usize,
}

impl ProcessCommunicator {
    /// All-reduce, reduce and reduce-scatter.
    pub(crate) fn reduction(
        &mut self,
        task: &mut Task,
        call: Call<'_>,
        blocks: Blocks<'_>,
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        let plan = Plan {
            blocks,
            dtype: call.dtype,
            op,
            receivers: Receivers::of_operation(call.operation),
            whole_bytes: blocks.numel * call.dtype.len_bytes(),
            level: self.options.level,
            claim_bytes: claim_bytes(self.options.claim_bytes),
        };
        let (input, output): (Option<&[u8]>, &mut [u8]) = match call.buffers {
            Buffers::InPlace(buffer) => (None, buffer),
            Buffers::OutOfPlace { send, receive } => (Some(send), receive),
        };
        self.reduce(task, &plan, input, output)
    }

    /// Holds one round where all ranks' memory is shared, else one for each stretch.
    fn reduce(
        &mut self,
        task: &mut Task,
        plan: &Plan<'_>,
        input: Option<&[u8]>,
        output: &mut [u8],
    ) -> Result<(), CollectiveError> {
        let (rank, whole) = (self.group.rank, plan.whole_bytes);
        let gets = !matches!(plan.receivers, Receivers::Rank(root) if root != rank);
        let segment = &self.group.session.segment;
        let from = segment.offset_of(input.unwrap_or(output));
        let to = if gets && input.is_some() && !output.is_empty() {
            segment.offset_of(output)
        } else {
            from
        };
        let mut stage = match (from, to) {
            (Some(from), Some(to)) => {
                (task.card.input, task.card.output) = (from, to);
                None
            }
            _ if whole == 0 => None,
            _ => Some(self.stage()?),
        };
        task.card.is_in_place = input.is_none() || stage.is_some();
        if let Some(stage) = &stage {
            task.card.is_staged = true;
            (task.card.input, task.card.output) = (stage.offset(), stage.offset());
        }
        let mut done = 0;
        let mut outcome = Ok(());
        while outcome.is_ok() {
            let stretch = done..(done + STAGE_BYTES).min(whole);
            if let Some(stage) = &mut stage {
                let bytes = &input.unwrap_or(output)[stretch.clone()];
                stage.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
            }
            let met = self.reduce_round(task, plan, stretch, &mut stage);
            outcome = met.map(|end| {
                if let (Some(stage), true) = (&stage, gets) {
                    let own = (rank, input.is_none());
                    take_result(plan, own, done..end, stage.bytes(), output);
                }
                done = end;
            });
            if done >= whole {
                break;
            }
            task.deadline = Instant::now() + task.timeout;
        }
        if stage.is_some() {
            self.keep(stage);
        }
        outcome
    }

    /// One round; returns where what is reduced now ends.
    fn reduce_round(
        &mut self,
        task: &Task,
        plan: &Plan<'_>,
        stretch: Range<usize>,
        stage: &mut Option<crate::heap::Arena>,
    ) -> Result<usize, CollectiveError> {
        let Self {
            group,
            place,
            recorder,
            ..
        } = self;
        let (rank, ranks) = (group.rank, place.ranks.clone());
        let coming = task.coming(plan.claim_bytes);
        let late = task.late(group);
        let met = group.round(place, &coming, late, |cards| {
            if stretch.start == 0 {
                cards.compare(&task.card.print)?;
                task.note(recorder, cards, &ranks);
            }
            let is_staged = (0..cards.parties()).any(|party| cards.is_staged(party));
            let range = if is_staged {
                stretch.clone()
            } else {
                0..plan.whole_bytes
            };
            let end = range.end;
            let round = Round {
                segment: &group.session.segment,
                cards,
                plan,
                range,
            };
            round.reduce(rank);
            Ok(end)
        });
        met.unwrap_or_else(|broken| {
            let is_exposed = stage.is_none() && plan.whole_bytes > 0;
            Err(self.settle(broken, stage, is_exposed))
        })
    }

    /// Where others see these bytes: in the segment, or in a copy there.
    fn shown(&self, bytes: &[u8]) -> Result<(u64, Option<Arena>), CollectiveError> {
        if let Some(offset) = self.group.session.segment.offset_of(bytes) {
            return Ok((offset, None));
        }
        let arena = copied(self.arena(bytes.len())?, bytes);
        Ok((arena.offset(), Some(arena)))
    }

    /// This rank's block of everyone's gradients and replicas.
    pub(crate) fn update_everywhere(
        &mut self,
        mut task: Task,
        mut call: ReduceUpdate<'_>,
        blocks: Blocks<'_>,
        work: &mut dyn FnMut(RankMemory<'_>),
    ) -> Result<(), CollectiveError> {
        let segment = std::sync::Arc::clone(&self.group.session.segment);
        let (grads, grad_copy) = self.shown(call.grads)?;
        task.card.input = grads;
        let mut copies: SmallVec<[_; ReduceUpdate::MAX_REPLICAS]> = SmallVec::new();
        for (place, replica) in task.card.replicas.iter_mut().zip(call.replicas.iter()) {
            let (offset, copy) = self.shown(replica.bytes)?;
            *place = offset;
            copies.push(copy);
        }
        let rank = self.group.rank;
        let block = |dtype: DType| blocks.of_bytes(rank, dtype.len_bytes());
        let grad_block = block(call.grad_dtype);
        let Self {
            group,
            place,
            recorder,
            ..
        } = self;
        let ranks = place.ranks.clone();
        let late = task.late(group);
        let met = group.round(place, &task.coming(0), late, |cards| {
            cards.compare(&task.card.print)?;
            task.note(recorder, cards, &ranks);
            let grads = (0..cards.parties()).map(|party| {
                let offset = cards.input(party) + grad_block.start as u64;
                let address = segment.address(offset, grad_block.len());
                // SAFETY: inside of the mapping; gradients that a rank has brought are written by
                // nobody before all who live have departed (`round`).
                unsafe { std::slice::from_raw_parts(address, grad_block.len()) }
            });
            let replicas = call.replicas.iter().enumerate().map(|(index, replica)| {
                let block = block(replica.dtype);
                let ranks = (0..cards.parties()).map(|party| {
                    let offset = cards.replica(party, index) + block.start as u64;
                    let address = segment.address(offset, block.len());
                    // SAFETY: inside of the mapping; block `rank` of what any rank has brought is
                    // this rank's alone until all who live have departed (`round`), and replicas
                    // are different memory, since each was brought by a `&mut`
                    // of it.
                    unsafe { std::slice::from_raw_parts_mut(address, block.len()) }
                });
                ranks.collect()
            });
            work(RankMemory {
                rank,
                grads: grads.collect(),
                replicas: replicas.collect(),
            });
            Ok(())
        });
        let outcome = met.unwrap_or_else(|broken| Err(self.settle(broken, &mut None, true)));
        outcome.map(|()| {
            drop(grad_copy);
            for (replica, copy) in call.replicas.iter_mut().zip(copies) {
                if let Some(copy) = copy {
                    replica.bytes.copy_from_slice(copy.bytes());
                }
            }
        })
    }
}

/// Takes what was reduced of `range` out of the stage of `own.0`, whose buffers are in place or
/// not.
fn take_result(
    plan: &Plan<'_>,
    own: (usize, bool),
    range: Range<usize>,
    stage: &[u8],
    output: &mut [u8],
) {
    let (rank, is_in_place) = own;
    let (taken, first) = match plan.receivers {
        Receivers::Owner => {
            let block = plan.blocks.of_bytes(rank, plan.dtype.len_bytes());
            let first = if is_in_place { 0 } else { block.start };
            (common(&block, &range), first)
        }
        _ => (range.clone(), 0),
    };
    if taken.is_empty() {
        return;
    }
    let place = taken.start - first..taken.end - first;
    let from = &stage[taken.start - range.start..taken.end - range.start];
    output[place].copy_from_slice(from);
}

/// What two ranges have in common; empty and within the first if that is nothing.
fn common(x: &Range<usize>, y: &Range<usize>) -> Range<usize> {
    let start = x.start.max(y.start).min(x.end);
    start..x.end.min(y.end).max(start)
}

/// A length of claims that ends with a cache line.
fn claim_bytes(asked: usize) -> usize {
    let longest = usize::MAX / 4 / LINE_BYTES * LINE_BYTES;
    asked.clamp(1, longest).next_multiple_of(LINE_BYTES)
}

/// A round that is open: `range` of the whole is reduced in it.
struct Round<'a> {
    segment: &'a Segment,
    cards: Cards<'a>,
    plan: &'a Plan<'a>,
    range: Range<usize>,
}

impl<'a> Round<'a> {
    /// Reduces this rank's part, then what is left of the others'.
    fn reduce(&self, rank: usize) {
        let (ranks, claim) = (self.cards.parties(), self.plan.claim_bytes);
        self.reduce_claim(rank, 0..claim);
        if self.range.len() <= claim {
            return;
        }
        for owner in (rank..ranks).chain(0..rank) {
            // A part that is no longer was claimed for its owner from the start.
            let mut more = self.part(owner).len() > claim;
            while more {
                let claimed = &self.cards.participants[owner].claimed.0;
                // Arrivals and departures order what is done with the bytes.
                let start = claimed.fetch_add(claim as u64, Ordering::Relaxed) as usize;
                more = self.reduce_claim(owner, start..start.saturating_add(claim));
            }
        }
    }

    /// The bytes that rank `owner` is to reduce.
    fn part(&self, owner: usize) -> Range<usize> {
        if self.plan.receivers == Receivers::Owner {
            let block = self
                .plan
                .blocks
                .of_bytes(owner, self.plan.dtype.len_bytes());
            return common(&block, &self.range);
        }
        let lines = Blocks {
            numel: self.range.len().div_ceil(LINE_BYTES),
            world_size: self.cards.parties(),
            counts: None,
        };
        let own = lines.of_bytes(owner, LINE_BYTES);
        let limit = |at: usize| self.range.start + at.min(self.range.len());
        limit(own.start)..limit(own.end)
    }

    /// Reduces what was claimed of a part; says whether there may be more of it.
    fn reduce_claim(&self, owner: usize, claim: Range<usize>) -> bool {
        let part = self.part(owner);
        let (start, end) = (claim.start.min(part.len()), claim.end.min(part.len()));
        if start == end {
            return false;
        }
        let bytes = part.start + start..part.start + end;
        let ranks = self.cards.parties();
        let receivers = self.plan.receivers.of_part(owner, ranks);
        let columns =
            (0..ranks).map(|party| self.column(party, &bytes, receivers.contains(&party)));
        let mut columns: SmallVec<[Column<'_>; 16]> = columns.collect();
        let mut columns = Columns {
            columns: &mut columns,
            receivers,
            share_bytes: part.len(),
        };
        let Plan {
            level, dtype, op, ..
        } = *self.plan;
        columns.reduce(level, dtype, op, bytes.len());
        end < part.len()
    }

    /// What one rank has of these bytes, which were claimed.
    fn column(&self, party: usize, bytes: &Range<usize>, gets: bool) -> Column<'a> {
        let (cards, len) = (self.cards, bytes.len());
        // Offsets count from where the whole would begin.
        let first = if cards.is_staged(party) {
            self.range.start
        } else {
            0
        };
        let from = cards
            .input(party)
            .wrapping_add((bytes.start.wrapping_sub(first)) as u64);
        let from = self.segment.address(from, len);
        if cards.is_in_place(party) {
            return Column {
                shared: None,
                // SAFETY: inside of the mapping; a rank's memory is shared from its coming to the
                // departure of all who live (`round`). These bytes of it are this rank's alone:
                // parts are disjoint, and claims of one part come from one counter
                // that only rises and begins behind what was reserved, which its
                // owner uses once.
                writable: unsafe { std::slice::from_raw_parts_mut(from, len) },
            };
        }
        // SAFETY: as above; what a rank has brought to be read is written by nobody.
        let shared = unsafe { std::slice::from_raw_parts(from, len) };
        let mut writable: &mut [u8] = &mut [];
        if gets {
            let first = if self.plan.receivers == Receivers::Owner {
                let element = self.plan.dtype.len_bytes();
                self.plan.blocks.of_bytes(party, element).start
            } else {
                0
            };
            let to = cards.output(party) + (bytes.start - first) as u64;
            let to = self.segment.address(to, len);
            // SAFETY: as for what is in place.
            writable = unsafe { std::slice::from_raw_parts_mut(to, len) };
        }
        Column {
            shared: Some(shared),
            writable,
        }
    }
}
