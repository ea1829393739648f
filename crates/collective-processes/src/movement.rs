//! The collectives that move elements as they are: each rank takes what it needs from where it
//! lies.

use std::ops::Range;

use fusestep_coalesce::MemoryOwner;
use fusestep_collective::{Blocks, Buffers, Call, CollectiveError, Operation};
use fusestep_simd::{Level, copy_bytes};
use smallvec::SmallVec;

use crate::card::Cards;
use crate::communicator::{ProcessCommunicator, STAGE_BYTES};
use crate::round::Place;
use crate::segment::Segment;
use crate::task::Task;

/// What a rank shows to the others.
enum Input<'a> {
    Nothing,
    OutOfPlace(&'a [u8]),
    /// A part of the buffer that its results go to.
    Within(Range<usize>),
}

/// Bytes that a rank takes.
struct Pull {
    /// Whom it takes them from.
    from: usize,
    /// Where they lie in what is shown there.
    range: Range<usize>,
    /// Where they go in the buffer of results.
    to: usize,
}

/// This rank's part of a movement.
struct Movement<'a> {
    input: Input<'a>,
    output: &'a mut [u8],
    pulls: SmallVec<[Pull; 16]>,
}

impl Movement<'_> {
    fn input(&self) -> &[u8] {
        match &self.input {
            Input::Nothing => &[],
            Input::OutOfPlace(bytes) => bytes,
            Input::Within(range) => &self.output[range.clone()],
        }
    }

    /// Takes everything that lies open, or comes with this stretch. Says how many stretches there
    /// are.
    fn pull(&mut self, segment: &Segment, cards: Cards<'_>, own: usize, stretch: usize) -> usize {
        for pull in &self.pulls {
            let into = &mut self.output[pull.to..][..pull.range.len()];
            if pull.from == own {
                if let (Input::OutOfPlace(bytes), 0) = (&self.input, stretch) {
                    into.copy_from_slice(&bytes[pull.range.clone()]);
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
                copy_bytes(Level::detect(), &mut into[from..to], bytes);
            }
        }
        let staged = (0..cards.parties()).filter(|&party| cards.is_staged(party));
        let longest = staged
            .map(|party| cards.input_len(party))
            .max()
            .unwrap_or(0);
        longest.div_ceil(STAGE_BYTES as u64).max(1) as usize
    }
}

impl ProcessCommunicator {
    /// A call that moves elements between all ranks.
    pub(crate) fn movement(
        &mut self,
        task: &mut Task,
        call: Call<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        // In place the others read what this rank overwrites, so they get a copy.
        let copy;
        let buffers = match call.buffers {
            Buffers::InPlace(buffer) if call.operation == Operation::AllToAll => {
                copy = buffer.to_vec();
                Buffers::OutOfPlace {
                    send: &copy,
                    receive: buffer,
                }
            }
            buffers => buffers,
        };
        let bytes = |rank: usize| blocks.of_bytes(rank, call.dtype.len_bytes());
        let movement = plan(call.operation, buffers, self.group.rank, &blocks, bytes);
        let mut place = std::mem::replace(&mut self.place, nowhere());
        let outcome = self.move_all(task, movement, &mut place);
        self.place = place;
        outcome
    }

    /// A send or a receive; participant 0 is the sender's.
    pub(crate) fn pass_on(
        &mut self,
        task: &mut Task,
        buffers: Buffers<'_>,
        place: &mut Place,
    ) -> Result<(), CollectiveError> {
        let is_sender = place.party == 0;
        let (input, output) = match buffers {
            Buffers::InPlace(buffer) if is_sender => (Input::Within(0..buffer.len()), buffer),
            Buffers::OutOfPlace { send, .. } if is_sender => (Input::OutOfPlace(send), &mut [][..]),
            Buffers::InPlace(receive) | Buffers::OutOfPlace { receive, .. } => {
                (Input::Nothing, receive)
            }
        };
        let mut pulls = SmallVec::new();
        if !is_sender {
            let range = 0..output.len();
            pulls.push(Pull {
                from: 0,
                range,
                to: 0,
            });
        }
        let movement = Movement {
            input,
            output,
            pulls,
        };
        self.move_all(task, movement, place)
    }

    /// Holds as many rounds as there are stretches.
    fn move_all(
        &mut self,
        task: &mut Task,
        mut movement: Movement<'_>,
        place: &mut Place,
    ) -> Result<(), CollectiveError> {
        let own = movement.input();
        let len = own.len();
        let offset = self.group.session.segment.offset_of(own);
        let mut stage = match offset {
            None if len > 0 => Some(self.stage()?),
            _ => None,
        };
        task.card.is_staged = stage.is_some();
        task.card.input = stage
            .as_ref()
            .map_or(offset.unwrap_or(0), |stage| stage.offset());
        task.card.input_len = len as u64;
        let (mut stretch, mut stretches) = (0, 1);
        let mut outcome = Ok(());
        while stretch < stretches && outcome.is_ok() {
            if let Some(stage) = &mut stage {
                let start = (stretch * STAGE_BYTES).min(len);
                let end = (start + STAGE_BYTES).min(len);
                let bytes = &movement.input()[start..end];
                stage.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
            }
            let Self {
                group, recorder, ..
            } = self;
            let (party, ranks) = (place.party, place.ranks.clone());
            let late = task.late(group);
            let met = group.round(place, &task.coming(0), late, |cards| {
                if stretch == 0 {
                    let compared = cards.compare(&task.card.print);
                    compared.map_err(|error| error.with_ranks(&ranks))?;
                    task.note(recorder, cards, &ranks);
                }
                Ok(movement.pull(&group.session.segment, cards, party, stretch))
            });
            let met = met.unwrap_or_else(|broken| {
                let is_exposed = stage.is_none() && len > 0;
                Err(self.settle(broken, &mut stage, is_exposed))
            });
            outcome = met.map(|found| stretches = found);
            stretch += 1;
            task.deadline = std::time::Instant::now() + task.timeout;
        }
        if stage.is_some() {
            self.keep(stage);
        }
        outcome
    }
}

/// Stands for the table of all ranks while a call uses it.
fn nowhere() -> Place {
    Place {
        table: 0,
        ranks: Vec::new(),
        party: 0,
        round: 0,
        is_pair: false,
    }
}

/// What `rank` shows and takes in a call of all ranks.
fn plan<'a>(
    operation: Operation,
    buffers: Buffers<'a>,
    rank: usize,
    blocks: &Blocks<'_>,
    bytes: impl Fn(usize) -> Range<usize>,
) -> Movement<'a> {
    let (ranks, own) = (blocks.world_size, bytes(rank));
    let all = 0..bytes(ranks - 1).end;
    let is_root = operation.root() == Some(rank);
    // What is shown in place, and whether anything is.
    let (within, shows) = match operation {
        Operation::Broadcast { .. } | Operation::Scatter { .. } => (all.clone(), is_root),
        Operation::AllGather | Operation::Gather { .. } => (own.clone(), true),
        Operation::AllToAll => (all.clone(), true),
        _ => (0..0, false),
    };
    let is_in_place = matches!(buffers, Buffers::InPlace(_));
    let (input, output) = match buffers {
        Buffers::InPlace(buffer) if shows => (Input::Within(within), buffer),
        Buffers::OutOfPlace { send, receive } if shows => (Input::OutOfPlace(send), receive),
        Buffers::InPlace(output)
        | Buffers::OutOfPlace {
            receive: output, ..
        } => (Input::Nothing, output),
    };
    let mut pulls = SmallVec::new();
    let mut pull = |from: usize, range: Range<usize>, to: usize| {
        // In place, what is a rank's own is in its place already.
        if from != rank || !is_in_place {
            pulls.push(Pull { from, range, to });
        }
    };
    match operation {
        Operation::Broadcast { root } => pull(root, all, 0),
        Operation::Scatter { root } => {
            let to = if is_in_place { own.start } else { 0 };
            pull(root, own, to);
        }
        Operation::AllGather => {
            (0..ranks).for_each(|from| pull(from, 0..bytes(from).len(), bytes(from).start));
        }
        Operation::Gather { .. } if is_root => {
            (0..ranks).for_each(|from| pull(from, 0..bytes(from).len(), bytes(from).start));
        }
        Operation::AllToAll => {
            (0..ranks).for_each(|from| pull(from, own.clone(), bytes(from).start));
        }
        _ => {}
    }
    Movement {
        input,
        output,
        pulls,
    }
}
