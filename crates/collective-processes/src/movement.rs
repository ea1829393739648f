//! The collectives that move elements as they are: each rank takes the bytes that it needs from
//! where they lie.

use fusestep_coalesce::MemoryOwner;
use fusestep_collective::{
    Begun, Blocks, Buffers, Call, CollectiveError, Movement, Operation, Share,
};
use fusestep_simd::{Level, copy_bytes};

use crate::card::Cards;
use crate::engine::{Processes, STAGE_BYTES};
use crate::place::Place;
use crate::segment::Segment;
use crate::task::Task;

/// Takes all bytes that lie in the segment, or come with this stretch. Returns the number of
/// stretches.
fn pull(
    share: &mut Share<'_>,
    segment: &Segment,
    cards: Cards<'_>,
    own: usize,
    stretch: usize,
) -> usize {
    for pull in &mut share.pulls {
        if pull.from == own {
            if stretch == 0 {
                pull.into.copy_from_slice(&share.shown[pull.range.clone()]);
            }
            continue;
        }
        let shown = if cards.is_staged(pull.from) {
            stretch * STAGE_BYTES..(stretch + 1) * STAGE_BYTES
        } else if stretch == 0 {
            0..usize::MAX
        } else {
            continue;
        };
        let start = pull.range.start.max(shown.start);
        let end = pull.range.end.min(shown.end);
        if start < end {
            let offset = cards.input(pull.from) + (start - shown.start) as u64;
            let address = segment.address(offset, end - start);
            // SAFETY: inside of the mapping (`address`), and it is what that rank has brought
            // to this round: nobody writes it before all who live have departed (`round`).
            let bytes = unsafe { std::slice::from_raw_parts(address, end - start) };
            let (from, to) = (start - pull.range.start, end - pull.range.start);
            copy_bytes(Level::detect(), &mut pull.into[from..to], bytes);
        }
    }
    let staged = (0..cards.parties()).filter(|&party| cards.is_staged(party));
    let longest = staged.map(|party| cards.input_len(party)).max().unwrap_or(0);
    longest.div_ceil(STAGE_BYTES as u64).max(1) as usize
}

impl Processes {
    /// Makes a call that moves elements between all ranks.
    pub(crate) fn movement(
        &mut self,
        begun: &mut Begun<'_>,
        call: Call<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        let movement = Movement {
            operation: call.operation,
            blocks: &blocks.all_bytes(call.dtype.len_bytes()),
        };
        let share = movement.share(self.group.rank, call.buffers);
        let mut place = std::mem::replace(&mut self.place, nowhere());
        let mut task = Task::new(begun, &self.group);
        let outcome = self.move_all(begun, &mut task, share, &mut place);
        self.place = place;
        outcome
    }

    /// Makes a send or a receive; participant 0 is the sender's.
    pub(crate) fn pass_on(
        &mut self,
        begun: &mut Begun<'_>,
        task: &mut Task,
        buffers: Buffers<'_>,
        place: &mut Place,
    ) -> Result<(), CollectiveError> {
        let whole = 0..match &buffers {
            Buffers::InPlace(buffer) => buffer.len(),
            Buffers::OutOfPlace { send, .. } if place.party == 0 => send.len(),
            Buffers::OutOfPlace { receive, .. } => receive.len(),
        };
        let movement = Movement {
            operation: [Operation::Send { to: 1 }, Operation::Receive { from: 0 }][place.party],
            blocks: std::slice::from_ref(&whole),
        };
        let share = movement.share(place.party, buffers);
        self.move_all(begun, task, share, place)
    }

    /// Holds as many rounds as there are stretches.
    fn move_all(
        &mut self,
        begun: &mut Begun<'_>,
        task: &mut Task,
        mut share: Share<'_>,
        place: &mut Place,
    ) -> Result<(), CollectiveError> {
        let len = share.shown.len();
        let offset = self.group.session.segment.offset_of(&share.shown);
        let mut stage = match offset {
            None if len > 0 => Some(self.stage()?),
            _ => None,
        };
        task.card.is_staged = stage.is_some();
        task.card.input = stage.as_ref().map_or(offset.unwrap_or(0), |stage| stage.offset());
        task.card.input_len = len as u64;
        let (mut stretch, mut stretches) = (0, 1);
        let mut outcome = Ok(());
        while stretch < stretches && outcome.is_ok() {
            if let Some(stage) = &mut stage {
                let start = (stretch * STAGE_BYTES).min(len);
                let end = (start + STAGE_BYTES).min(len);
                let bytes = &share.shown[start..end];
                stage.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
            }
            let group = &self.group;
            let (party, ranks) = (place.party, place.ranks.clone());
            let met = group.round(place, task, 0, |cards| {
                if stretch == 0 {
                    task.agree(begun, cards, &ranks)?;
                }
                Ok(pull(&mut share, &group.session.segment, cards, party, stretch))
            });
            let met = met.unwrap_or_else(|broken| {
                let is_exposed = stage.is_none() && len > 0;
                Err(self.settle(begun, broken, &mut stage, is_exposed))
            });
            outcome = met.map(|found| stretches = found);
            stretch += 1;
            task.deadline = std::time::Instant::now() + task.timeout;
        }
        if stage.is_some() {
            self.stage = stage;
        }
        outcome
    }
}

/// A place that stands for the table of all ranks while a call uses that table.
fn nowhere() -> Place {
    Place { table: 0, ranks: Vec::new(), party: 0, round: 0, is_pair: false }
}
