//! The collectives that reduce. Each rank reduces its part of all ranks' elements where they lie,
//! in rank order, and then what is left of other parts.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use fusestep_coalesce::MemoryOwner;
use fusestep_collective::{
    Begun, Blocks, Buffers, Call, CollectiveError, Column, OnShared, RankMemory, Receivers,
    ReduceOp, ReduceUpdate, Sharing, common,
};
use smallvec::SmallVec;

use crate::card::Cards;
use crate::engine::{Processes, STAGE_BYTES};
use crate::heap::Arena;
use crate::segment::Segment;
use crate::task::Task;

impl Processes {
    /// Makes an all-reduce, a reduce or a reduce-scatter.
    pub(crate) fn reduction(
        &mut self,
        begun: &mut Begun<'_>,
        call: Call<'_>,
        blocks: Blocks<'_>,
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        let plan = Sharing::new(&call, blocks, op, &self.options);
        let (input, output) = match call.buffers {
            Buffers::InPlace(buffer) => (None, buffer),
            Buffers::OutOfPlace { send, receive } => (Some(send), receive),
        };
        self.reduce(begun, &plan, input, output)
    }

    /// Holds one round where all ranks' memory is shared, else one for each stretch.
    fn reduce(
        &mut self,
        begun: &mut Begun<'_>,
        plan: &Sharing<'_>,
        input: Option<&[u8]>,
        output: &mut [u8],
    ) -> Result<(), CollectiveError> {
        let mut task = Task::new(begun, &self.group);
        let (rank, whole) = (self.group.rank, plan.whole_bytes());
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
            let met = self.reduce_round(begun, &task, plan, stretch, &mut stage);
            outcome = met.map(|end| {
                if let (Some(stage), true) = (&stage, gets) {
                    let own = plan.block(rank);
                    let first = if input.is_none() { 0 } else { own.start };
                    let result = match plan.receivers {
                        Receivers::Owner => Taken { range: common(&own, &(done..end)), first },
                        _ => Taken { range: done..end, first: 0 },
                    };
                    result.copy(stage.bytes(), done, output);
                }
                done = end;
            });
            if done >= whole {
                break;
            }
            task.deadline = Instant::now() + task.timeout;
        }
        if stage.is_some() {
            self.stage = stage;
        }
        outcome
    }

    /// Holds one round; returns the end of the range that it has reduced.
    fn reduce_round(
        &mut self,
        begun: &mut Begun<'_>,
        task: &Task,
        plan: &Sharing<'_>,
        stretch: Range<usize>,
        stage: &mut Option<Arena>,
    ) -> Result<usize, CollectiveError> {
        let Self { group, place, .. } = self;
        let (rank, ranks) = (group.rank, place.ranks.clone());
        let met = group.round(place, task, plan.claim_bytes, |cards| {
            if stretch.start == 0 {
                task.agree(begun, cards, &ranks)?;
            }
            let is_staged = (0..cards.parties()).any(|party| cards.is_staged(party));
            let range = if is_staged { stretch.clone() } else { 0..plan.whole_bytes() };
            let end = range.end;
            let round = Round { segment: &group.session.segment, cards, plan, range };
            round.reduce(rank);
            Ok(end)
        });
        met.unwrap_or_else(|broken| {
            let is_exposed = stage.is_none() && plan.whole_bytes() > 0;
            Err(self.settle(begun, broken, stage, is_exposed))
        })
    }

    /// Offset at which other ranks see these bytes, in the segment, with the copy if the bytes lie
    /// outside of it.
    fn shown(&self, bytes: &[u8]) -> Result<(u64, Option<Arena>), CollectiveError> {
        if let Some(offset) = self.group.session.segment.offset_of(bytes) {
            return Ok((offset, None));
        }
        let mut arena = self.arena(bytes.len())?;
        arena.bytes_mut().copy_from_slice(bytes);
        Ok((arena.offset(), Some(arena)))
    }
}

impl OnShared for Processes {
    fn reduce_update(
        &mut self,
        begun: &mut Begun<'_>,
        mut call: ReduceUpdate<'_>,
        blocks: Blocks<'_>,
        work: &mut dyn FnMut(RankMemory<'_>),
    ) -> Result<(), CollectiveError> {
        let mut task = Task::new(begun, &self.group);
        let segment = Arc::clone(&self.group.session.segment);
        let (grads, grad_copy) = self.shown(call.grads)?;
        task.card.input = grads;
        let mut copies: SmallVec<[_; ReduceUpdate::MAX_REPLICAS]> = SmallVec::new();
        for (place, replica) in task.card.replicas.iter_mut().zip(call.replicas.iter()) {
            let (offset, copy) = self.shown(replica.bytes)?;
            *place = offset;
            copies.push(copy);
        }
        let rank = self.group.rank;
        let grad_block = match call.grads {
            [] => 0..0,
            _ => blocks.of_bytes(rank, call.grad_dtype.len_bytes()),
        };
        let Self { group, place, .. } = self;
        let ranks = place.ranks.clone();
        let met = group.round(place, &task, 0, |cards| {
            task.agree(begun, cards, &ranks)?;
            let grads = (0..cards.parties()).map(|party| {
                let offset = cards.input(party) + grad_block.start as u64;
                let address = segment.address(offset, grad_block.len());
                // SAFETY: inside of the mapping; gradients that a rank has brought are written by
                // nobody before all who live have departed (`round`).
                unsafe { std::slice::from_raw_parts(address, grad_block.len()) }
            });
            let replicas = call.replicas.iter().enumerate().map(|(index, replica)| {
                let block = replica.block(blocks, rank);
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
            work(RankMemory { rank, grads: grads.collect(), replicas: replicas.collect() });
            Ok(())
        });
        let outcome = met.unwrap_or_else(|broken| Err(self.settle(begun, broken, &mut None, true)));
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

/// Bytes of a result that lie on the stage.
struct Taken {
    /// The bytes, counted from the beginning of the whole.
    range: Range<usize>,
    /// The place in the whole where this rank's output begins.
    first: usize,
}

impl Taken {
    /// Copies the bytes from the stage, whose first byte is byte `begins` of the whole.
    fn copy(&self, stage: &[u8], begins: usize, output: &mut [u8]) {
        let Self { range, first } = self;
        if !range.is_empty() {
            let from = &stage[range.start - begins..range.end - begins];
            output[range.start - first..range.end - first].copy_from_slice(from);
        }
    }
}

/// An open round, in which `range` of the whole is reduced.
struct Round<'a> {
    segment: &'a Segment,
    cards: Cards<'a>,
    plan: &'a Sharing<'a>,
    range: Range<usize>,
}

impl<'a> Round<'a> {
    /// Reduces this rank's part, then what is left of the other ranks' parts.
    fn reduce(&self, rank: usize) {
        let (plan, ranks) = (self.plan, self.cards.parties());
        let mut reserved = Some(0);
        plan.reduce(rank, &self.range, |owner, part| {
            let claimed = &self.cards.participants[owner].claimed.0;
            let bytes = plan.claim_bytes;
            // Arrivals and departures order what is done with the bytes.
            let next = || claimed.fetch_add(bytes as u64, Ordering::Relaxed) as usize;
            let start = reserved.take().unwrap_or_else(next);
            let claim = start..start.saturating_add(bytes);
            let receivers = plan.receivers.of_part(owner, ranks);
            plan.reduce_claim(owner, part, claim, |bytes| {
                (0..ranks)
                    .map(|party| self.column(party, &bytes, receivers.contains(&party)))
                    .collect()
            })
        });
    }

    /// The column of one rank for these claimed bytes.
    fn column(&self, party: usize, bytes: &Range<usize>, gets: bool) -> Column<'a> {
        let (cards, len) = (self.cards, bytes.len());
        // Offsets count from where the whole would begin.
        let first = if cards.is_staged(party) { self.range.start } else { 0 };
        let from = cards.input(party).wrapping_add((bytes.start.wrapping_sub(first)) as u64);
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
            let first = match self.plan.receivers {
                Receivers::Owner => self.plan.block(party).start,
                _ => 0,
            };
            let to = cards.output(party) + (bytes.start - first) as u64;
            let to = self.segment.address(to, len);
            // SAFETY: as for what is in place.
            writable = unsafe { std::slice::from_raw_parts_mut(to, len) };
        }
        Column { shared: Some(shared), writable }
    }
}
