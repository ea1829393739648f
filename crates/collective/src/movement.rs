//! Operations that move elements as they are: the bytes that each rank takes from each other rank.

use std::borrow::Cow;
use std::ops::Range;

use crate::{Buffers, OfRanks, Operation};

/// A call that moves elements as they are, for engines to carry out.
#[derive(Clone, Copy, Debug)]
pub struct Movement<'a> {
    /// The operation; no rank takes anything in an operation that reduces.
    pub operation: Operation,
    /// The bytes of each rank's block, counted from the beginning of the whole, in ascending order.
    pub blocks: &'a [Range<usize>],
}

/// Bytes that a rank takes from another, or from another place of its own memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Take {
    /// The rank that shows the bytes.
    pub from: usize,
    /// The bytes, counted from the beginning of the memory that this rank shows.
    pub range: Range<usize>,
    /// Place of the first of these bytes on the taking rank, in bytes of the whole.
    pub target: usize,
}

/// One rank's part of a movement in host memory.
#[derive(Debug)]
pub struct Share<'a> {
    /// Memory that other ranks may take bytes of.
    pub shown: Cow<'a, [u8]>,
    /// The bytes that this rank takes, in the order of their places in its memory.
    pub pulls: OfRanks<Pull<'a>>,
}

/// A [`Take`] in host memory.
#[derive(Debug)]
pub struct Pull<'a> {
    /// The rank that shows the bytes.
    pub from: usize,
    /// The bytes, counted from the beginning of the memory that this rank shows.
    pub range: Range<usize>,
    /// The place of the bytes in the taking rank's memory.
    pub into: &'a mut [u8],
}

impl Movement<'_> {
    /// The bytes that `rank` takes, in the order of their targets.
    pub fn takes(&self, rank: usize) -> impl Iterator<Item = Take> + use<'_> {
        let own = self.blocks.get(rank).cloned().unwrap_or_default();
        let from = match self.operation {
            Operation::Broadcast { root: from }
            | Operation::Scatter { root: from }
            | Operation::Receive { from } => from..from + 1,
            Operation::Gather { root } if root != rank => 0..0,
            Operation::AllGather | Operation::Gather { .. } | Operation::AllToAll => {
                0..self.blocks.len()
            }
            _ => 0..0,
        };
        from.map(move |from| {
            let (range, target) = match self.operation {
                Operation::Scatter { .. } => (own.clone(), own.start),
                Operation::AllToAll => (own.clone(), self.blocks[from].start),
                Operation::AllGather | Operation::Gather { .. } => {
                    (0..self.blocks[from].len(), self.blocks[from].start)
                }
                _ => (self.whole(), 0),
            };
            Take { from, range, target }
        })
    }

    /// The bytes that rank `to` takes of the memory that rank `from` shows, if any.
    pub fn given(&self, from: usize, to: usize) -> Option<Range<usize>> {
        if let Operation::Send { to: receiver } = self.operation {
            return (receiver == to).then(|| self.whole());
        }
        let mut takes = self.takes(to);
        takes.find(|take| take.from == from).map(|take| take.range)
    }

    /// The part of the whole that `rank` shows to the others.
    pub fn shown(&self, rank: usize) -> Range<usize> {
        match self.operation {
            Operation::Broadcast { root } | Operation::Scatter { root } if root != rank => 0..0,
            Operation::Broadcast { .. }
            | Operation::Scatter { .. }
            | Operation::AllToAll
            | Operation::Send { .. } => self.whole(),
            Operation::AllGather | Operation::Gather { .. } => self.blocks[rank].clone(),
            _ => 0..0,
        }
    }

    fn whole(&self) -> Range<usize> {
        0..self.blocks.last().map_or(0, |last| last.end)
    }

    /// The memory that `rank` shows, and the places in its buffers where it takes bytes. The
    /// buffers are as long as the call needs. In place, a rank's own block is in its place already.
    ///
    /// # Cost
    /// An all-to-all in place copies the buffer, since other ranks read bytes that this rank
    /// overwrites.
    pub fn share<'m>(&self, rank: usize, buffers: Buffers<'m>) -> Share<'m> {
        let shown = self.shown(rank);
        let is_in_place = matches!(buffers, Buffers::InPlace(_));
        let keeps_own = is_in_place && self.operation != Operation::AllToAll;
        // Memory before and behind the memory that is shown.
        let (shown_bytes, mut before, mut behind) = match buffers {
            Buffers::InPlace(buffer) if !keeps_own => {
                let copy = Cow::Owned(buffer.to_vec());
                (copy, Rest::at(0, &mut []), Rest::at(0, buffer))
            }
            Buffers::InPlace(buffer) => {
                let (before, rest) = buffer.split_at_mut(shown.start);
                let (own, behind) = rest.split_at_mut(shown.len());
                let behind = Rest::at(shown.end, behind);
                (Cow::Borrowed(&*own), Rest::at(0, before), behind)
            }
            Buffers::OutOfPlace { send, receive } => {
                let send = if shown.is_empty() { &[] } else { send };
                let start = match self.operation {
                    Operation::Scatter { .. } => self.blocks[rank].start,
                    _ => 0,
                };
                let receive = Rest::at(start, receive);
                (Cow::Borrowed(send), Rest::at(0, &mut []), receive)
            }
        };
        let end_before = before.bytes.len();
        let takes = self.takes(rank);
        let takes = takes.filter(|take| !take.range.is_empty());
        let takes = takes.filter(|take| take.from != rank || !keeps_own);
        let pulls = takes.map(|take| {
            let rest = if take.target < end_before { &mut before } else { &mut behind };
            Pull {
                from: take.from,
                into: rest.cut(take.target, take.range.len()),
                range: take.range,
            }
        });
        Share { pulls: pulls.collect(), shown: shown_bytes }
    }
}

/// The rest of a buffer whose parts are handed out from its start on.
struct Rest<'a> {
    /// Place of the rest, in bytes of the whole.
    start: usize,
    bytes: &'a mut [u8],
}

impl<'a> Rest<'a> {
    fn at(start: usize, bytes: &'a mut [u8]) -> Self {
        Self { start, bytes }
    }

    /// The part of this length at `target`, which lies behind all parts that were handed out.
    fn cut(&mut self, target: usize, len: usize) -> &'a mut [u8] {
        let (_, rest) = std::mem::take(&mut self.bytes).split_at_mut(target - self.start);
        let (part, rest) = rest.split_at_mut(len);
        *self = Self::at(target + len, rest);
        part
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On buffers of four bytes in place, with blocks of one, none and three; what each rank has
    /// afterwards.
    #[test]
    fn what_is_taken_is_what_others_show() {
        let blocks = [0..1, 1..1, 1..4];
        let whole = |rank: usize| [10 * rank as u8; 4];
        for (operation, expected) in [
            (Operation::Broadcast { root: 2 }, [[20; 4], [20; 4], [20; 4]]),
            (Operation::AllGather, [[0, 20, 20, 20]; 3]),
            (Operation::Scatter { root: 0 }, [[0; 4], [10; 4], [20, 0, 0, 0]]),
            (Operation::Gather { root: 1 }, [[0; 4], [0, 20, 20, 20], [20; 4]]),
        ] {
            let movement = Movement { operation, blocks: &blocks };
            let mut buffers = [whole(0), whole(1), whole(2)];
            let mut shares = Vec::new();
            for (rank, buffer) in buffers.iter_mut().enumerate() {
                shares.push(movement.share(rank, Buffers::InPlace(buffer)));
            }
            let shown: Vec<Vec<u8>> = shares.iter().map(|share| share.shown.to_vec()).collect();
            for (rank, share) in shares.iter_mut().enumerate() {
                for pull in &mut share.pulls {
                    let given = movement.given(pull.from, rank);
                    assert_eq!(given.as_ref(), Some(&pull.range));
                    pull.into.copy_from_slice(&shown[pull.from][pull.range.clone()]);
                }
            }
            drop(shares);
            assert_eq!(buffers, expected, "{operation}");
        }
        let sent = Movement { operation: Operation::Send { to: 2 }, blocks: &blocks };
        assert_eq!([0, 1, 2].map(|to| sent.given(0, to)), [None, None, Some(0..4)]);
    }
}
