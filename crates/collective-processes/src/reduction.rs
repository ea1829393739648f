//! The collectives that reduce. Each rank reduces its part of all ranks' elements where they lie,
//! in rank order, and then what is left of other parts.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use fusestep_coalesce::MemoryOwner;
use fusestep_collective::{
    Begun, Blocks, Buffers, Call, CollectiveError, Column, OnShared, RankMemory, Receivers,
    ReduceOp, ReduceUpdate, Sharing,
};
use smallvec::SmallVec;

use crate::card::Cards;
use crate::engine::{Processes, STAGE_BYTES};
use crate::heap::Arena;
use crate::segment::Segment;
use crate::task::Task;

/// Pieces end with cache lines, so that no element is cut in two.
const LINE_BYTES: usize = 64;

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
        match plan.receivers {
            Receivers::Owner => self.scatter(begun, &plan, input, output),
            Receivers::All | Receivers::Rank(_) => self.reduce(begun, &plan, input, output),
        }
    }

    /// Holds one round where all ranks' memory is shared, else one for each stretch.
    fn reduce(
        &mut self,
        begun: &mut Begun<'_>,
        plan: &Sharing<'_>,
        input: Option<&[u8]>,
        output: &mut [u8],
    ) -> Result<(), CollectiveError> {
        let whole = plan.whole_bytes();
        let gets = plan.receivers.of_part(0, self.group.world_size()).contains(&self.group.rank);
        let mut task = Task::new(begun, &self.group);
        let mut stage = self.bring(&mut task, input, output, Brought { whole, gets })?;
        let mut done = 0;
        let mut outcome = Ok(());
        while outcome.is_ok() {
            let stretch = done..(done + STAGE_BYTES).min(whole);
            if let Some(stage) = &mut stage {
                let bytes = &input.unwrap_or(output)[stretch.clone()];
                stage.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
            }
            let asked = Asked { plan, task: &task, before: done };
            let met = self.reduce_round(begun, asked, &mut stage, |round| {
                let range = if round.is_staged() { stretch.clone() } else { 0..whole };
                let end = range.end;
                Round { range, ..round }.reduce();
                end
            });
            outcome = met.map(|end| {
                if let (Some(stage), true) = (&stage, gets) {
                    output[done..end].copy_from_slice(&stage.bytes()[..end - done]);
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

    /// Holds one round where all ranks' memory is shared, else one for each piece of the blocks. A
    /// rank copies only what others reduce: its own block it reads and writes where that lies.
    fn scatter(
        &mut self,
        begun: &mut Begun<'_>,
        plan: &Sharing<'_>,
        input: Option<&[u8]>,
        output: &mut [u8],
    ) -> Result<(), CollectiveError> {
        let brought = Brought { whole: plan.whole_bytes(), gets: true };
        let mut task = Task::new(begun, &self.group);
        let mut stage = self.bring(&mut task, input, output, brought)?;
        let pieces = Pieces { plan, ranks: self.group.world_size() };
        let mut outcome = Ok(());
        for index in 0..pieces.count() {
            if let Some(stage) = &mut stage {
                pieces.show(self.group.rank, index, input.unwrap_or(output), stage.bytes_mut());
            }
            let asked = Asked { plan, task: &task, before: index };
            let met = self.reduce_round(begun, asked, &mut stage, |round| {
                let is_staged = round.is_staged();
                if is_staged {
                    let own = Own { input, output: &mut *output };
                    round.reduce_piece(&pieces, index, own);
                } else {
                    round.reduce();
                }
                is_staged
            });
            let goes_on = matches!(met, Ok(true));
            outcome = met.map(drop);
            if !goes_on {
                break;
            }
            task.deadline = Instant::now() + task.timeout;
        }
        if stage.is_some() {
            self.stage = stage;
        }
        outcome
    }

    /// Writes down where others find this rank's elements and its result. Returns the stage if they
    /// do not see both where they lie.
    fn bring(
        &mut self,
        task: &mut Task,
        input: Option<&[u8]>,
        output: &[u8],
        brought: Brought,
    ) -> Result<Option<Arena>, CollectiveError> {
        let segment = &self.group.session.segment;
        let from = segment.offset_of(input.unwrap_or(output));
        let to = if brought.gets && input.is_some() && !output.is_empty() {
            segment.offset_of(output)
        } else {
            from
        };
        let card = &mut task.card;
        card.is_in_place = input.is_none();
        if let (Some(from), Some(to)) = (from, to) {
            (card.input, card.output) = (from, to);
            return Ok(None);
        }
        if brought.whole == 0 {
            return Ok(None);
        }
        let stage = self.stage()?;
        (card.is_staged, card.is_in_place) = (true, true);
        (card.input, card.output) = (stage.offset(), stage.offset());
        Ok(Some(stage))
    }

    /// Holds one round, in which `work` reduces what all ranks have brought.
    fn reduce_round<R>(
        &mut self,
        begun: &mut Begun<'_>,
        asked: Asked<'_>,
        stage: &mut Option<Arena>,
        work: impl FnOnce(Round<'_>) -> R,
    ) -> Result<R, CollectiveError> {
        let Asked { plan, task, before } = asked;
        let Self { group, place, .. } = self;
        let (rank, ranks, whole) = (group.rank, place.ranks.clone(), plan.whole_bytes());
        let met = group.round(place, task, plan.claim_bytes, |cards| {
            if before == 0 {
                task.agree(begun, cards, &ranks)?;
            }
            let segment = &group.session.segment;
            Ok(work(Round { segment, cards, plan, rank, range: 0..whole }))
        });
        met.unwrap_or_else(|broken| {
            let is_exposed = stage.is_none() && whole > 0;
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

/// Elements that a rank brings to a reduction.
#[derive(Clone, Copy)]
struct Brought {
    /// Bytes of the elements of a rank.
    whole: usize,
    /// Whether the rank gets a result.
    gets: bool,
}

/// Purpose of a round of a reduction.
struct Asked<'a> {
    plan: &'a Sharing<'a>,
    task: &'a Task,
    /// Bytes or pieces of rounds before; ranks compare the call in the first round.
    before: usize,
}

/// The pieces in which ranks show each other blocks that lie outside of the segment. A rank's stage
/// has a slot for the piece of every other rank.
struct Pieces<'a> {
    plan: &'a Sharing<'a>,
    ranks: usize,
}

impl Pieces<'_> {
    /// Bytes of a slot, in whole cache lines.
    fn slot_bytes(&self) -> usize {
        STAGE_BYTES / LINE_BYTES / (self.ranks - 1).max(1) * LINE_BYTES
    }

    /// The number of pieces of the longest block; at least one, so that ranks meet.
    fn count(&self) -> usize {
        let lens = (0..self.ranks).map(|rank| self.plan.block(rank).len());
        lens.max().unwrap_or(0).div_ceil(self.slot_bytes()).max(1)
    }

    /// The bytes of a piece, counted from the beginning of the block.
    fn claim(&self, index: usize) -> Range<usize> {
        index * self.slot_bytes()..(index + 1) * self.slot_bytes()
    }

    /// The bytes of the piece of a rank's block, counted from the beginning of the whole.
    fn of(&self, owner: usize, index: usize) -> Range<usize> {
        let (block, claim) = (self.plan.block(owner), self.claim(index));
        block.start + claim.start.min(block.len())..block.start + claim.end.min(block.len())
    }

    /// The place on a rank's stage where the pieces of another rank lie.
    fn slot(&self, shown_by: usize, owner: usize) -> usize {
        (owner + self.ranks - shown_by - 1) % self.ranks * self.slot_bytes()
    }

    /// Copies the pieces of other ranks to the stage.
    fn show(&self, rank: usize, index: usize, whole: &[u8], stage: &mut [u8]) {
        for owner in (0..self.ranks).filter(|&owner| owner != rank) {
            let bytes = &whole[self.of(owner, index)];
            stage[self.slot(rank, owner)..][..bytes.len()].copy_from_slice(bytes);
        }
    }
}

/// A rank's own elements, and the place of its result: its block, or the whole if that is where its
/// elements lie.
struct Own<'a> {
    input: Option<&'a [u8]>,
    output: &'a mut [u8],
}

/// An open round, in which `range` of the whole is reduced.
struct Round<'a> {
    segment: &'a Segment,
    cards: Cards<'a>,
    plan: &'a Sharing<'a>,
    rank: usize,
    range: Range<usize>,
}

impl<'a> Round<'a> {
    /// Whether any rank's memory lies outside of the segment.
    fn is_staged(&self) -> bool {
        (0..self.cards.parties()).any(|party| self.cards.is_staged(party))
    }

    /// Reduces a piece of this rank's block, which no other rank does.
    fn reduce_piece(&self, pieces: &Pieces<'_>, index: usize, own: Own<'_>) {
        let (plan, rank) = (self.plan, self.rank);
        let block = plan.block(rank);
        let Own { input, output } = own;
        plan.reduce_claim(rank, &block, pieces.claim(index), |bytes| {
            let mut own = Some(match input {
                None => Column { shared: None, writable: &mut output[bytes.clone()] },
                Some(input) => Column {
                    shared: Some(&input[bytes.clone()]),
                    writable: &mut output[bytes.start - block.start..bytes.end - block.start],
                },
            });
            let shown = |party| Column {
                shared: Some(self.shown(party, pieces, &bytes)),
                writable: &mut [],
            };
            let parties = 0..self.cards.parties();
            parties
                .map(|party| own.take_if(|_| party == rank).unwrap_or_else(|| shown(party)))
                .collect()
        });
    }

    /// Bytes of this rank's block, a piece of it, as another rank has brought them.
    fn shown(&self, party: usize, pieces: &Pieces<'_>, bytes: &Range<usize>) -> &'a [u8] {
        let is_staged = self.cards.is_staged(party);
        let place = if is_staged { pieces.slot(party, self.rank) } else { bytes.start };
        let from = self.segment.address(self.cards.input(party) + place as u64, bytes.len());
        // SAFETY: inside of the mapping; a rank's memory is shared from its coming to the departure
        // of all who live (`round`). Nobody writes a slot of a stage meanwhile, nor a block of
        // another rank's memory than its own.
        unsafe { std::slice::from_raw_parts(from, bytes.len()) }
    }

    /// Reduces this rank's part, then what is left of the other ranks' parts.
    fn reduce(&self) {
        let (plan, rank, ranks) = (self.plan, self.rank, self.cards.parties());
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
