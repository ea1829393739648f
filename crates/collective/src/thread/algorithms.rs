//! The collectives, as what each rank brings and what it does with the others' memory.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use fusestep_simd::{Offer, Peers, Seat};
use fusestep_tensor::DType;

use super::ThreadCommunicator;
use super::group::{Group, Header, Placement};
use crate::rank_order::{Ranks, reduce_in_rank_order};
use crate::{Blocks, Buffers, Call, CollectiveError, Fingerprint, Membership, Operation};

/// Parts of a reduction end at multiples of this, a cache line, so that ranks share few lines.
const LINE_BYTES: usize = 64;

/// How lent memory is cut into a part for each rank.
#[derive(Clone, Copy)]
enum Cut<'a> {
    /// Into nothing: nothing is lent.
    None,
    /// Into equal numbers of cache lines.
    Lines,
    /// Into the ranks' blocks.
    Blocks(Blocks<'a>, usize),
}

/// What a rank brings to a round, with everything that belongs to it.
struct Round<'a> {
    header: Header,
    deadline: Instant,
    shared: &'a [u8],
    lent: &'a mut [u8],
    cut: Cut<'a>,
}

type Joined = (Arc<Group>, usize, Seat<Header, CollectiveError>);

impl ThreadCommunicator {
    /// Any call that all ranks of the group make.
    pub(super) fn collective(
        &mut self,
        call: Call<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        let fingerprint = Fingerprint::new(&call, blocks.numel, self.sequence, self.context);
        let placement = match call.buffers {
            Buffers::InPlace(_) => Placement::Lent,
            Buffers::Apart { .. } => Placement::Shared,
        };
        let (header, deadline) = self.header(fingerprint, placement);
        let round = Round {
            header,
            deadline,
            shared: &[],
            lent: &mut [],
            cut: Cut::None,
        };
        let bytes = |rank: usize| blocks.of_bytes(rank, call.dtype.len_bytes());
        match call.operation {
            Operation::AllReduce(_) | Operation::Reduce { .. } | Operation::ReduceScatter(_) => {
                self.reduction(round, call, blocks)
            }
            Operation::Broadcast { root } => self.broadcast(round, call.buffers, root),
            Operation::AllGather => self.all_gather(round, call.buffers, bytes),
            Operation::Scatter { root } => self.scatter(round, call.buffers, root, bytes),
            Operation::Gather { root } => {
                self.gather(round, call.buffers, root, (blocks, call.dtype))
            }
            Operation::AllToAll => self.all_to_all(round, call.buffers, bytes),
            Operation::Barrier
            | Operation::Split
            | Operation::Send { .. }
            | Operation::Receive { .. } => self.round(round, |_| ()),
        }
    }

    /// Meets the others, compares fingerprints, and does `work` if they agree.
    fn round<R>(
        &mut self,
        round: Round<'_>,
        work: impl FnOnce(&mut Peers<'_, Header>) -> R,
    ) -> Result<R, CollectiveError> {
        let world_size = self.ends.len();
        match round.cut {
            Cut::None => self.ends.fill(0),
            Cut::Lines => {
                for rank in 0..world_size {
                    self.ends[rank] = lines(round.lent.len(), rank, world_size).end;
                }
            }
            Cut::Blocks(blocks, element_bytes) => {
                for rank in 0..world_size {
                    self.ends[rank] = blocks.of_bytes(rank, element_bytes).end;
                }
            }
        }
        let fingerprint = round.header.fingerprint;
        let timeout = self.group.options().timeout;
        let offer = Offer {
            header: round.header,
            shared: round.shared,
            lent: round.lent,
            ends: &self.ends,
        };
        let late = |ranks: &[usize]| late(ranks.to_vec(), &fingerprint, timeout);
        let recorder = &mut self.recorder;
        self.seat.meet(offer, round.deadline, late, |peers| {
            Fingerprint::compare(world_size, |rank| &peers.header(rank).fingerprint)?;
            let arrived = |rank: usize| peers.header(rank).arrived_ns;
            if let Some(last) = (0..world_size).max_by_key(|&rank| arrived(rank)) {
                recorder.waited(last, arrived(last).saturating_sub(round.header.arrived_ns));
            }
            Ok(work(peers))
        })?
    }

    fn reduction(
        &mut self,
        round: Round<'_>,
        call: Call<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        let (rank, world_size, level) = (self.rank, self.ends.len(), self.group.options().level);
        let element_bytes = call.dtype.len_bytes();
        let Some(op) = call.operation.reduce_op() else {
            return Ok(());
        };
        let (cut, own) = match call.operation {
            Operation::ReduceScatter(_) => (
                Cut::Blocks(blocks, element_bytes),
                blocks.of_bytes(rank, element_bytes),
            ),
            _ => (
                Cut::Lines,
                lines(blocks.numel * element_bytes, rank, world_size),
            ),
        };
        let columns = |peers: &mut Peers<'_, Header>, into: Into<'_>| {
            let len_bytes = own.len();
            let mut columns = Columns {
                peers,
                own: own.clone(),
                into,
            };
            reduce_in_rank_order(level, call.dtype, op, len_bytes, &mut columns);
        };
        match (call.operation, call.buffers) {
            (Operation::Reduce { root, .. }, Buffers::Apart { send, receive }) => {
                let (lent, cut) = if rank == root {
                    (receive, cut)
                } else {
                    (&mut [][..], Cut::None)
                };
                let round = Round {
                    shared: send,
                    lent,
                    cut,
                    ..round
                };
                self.round(round, |peers| columns(peers, Into::Rank(root)))
            }
            (Operation::Reduce { root, .. }, Buffers::InPlace(lent)) => self
                .round(Round { lent, cut, ..round }, |peers| {
                    columns(peers, Into::Rank(root))
                }),
            (Operation::ReduceScatter(_), Buffers::Apart { send, receive }) => self.round(
                Round {
                    shared: send,
                    ..round
                },
                |peers| columns(peers, Into::Slice(receive)),
            ),
            (Operation::ReduceScatter(_), Buffers::InPlace(lent)) => self
                .round(Round { lent, cut, ..round }, |peers| {
                    columns(peers, Into::Rank(rank))
                }),
            (_, Buffers::Apart { send, receive }) => {
                let round = Round {
                    shared: send,
                    lent: receive,
                    cut,
                    ..round
                };
                self.round(round, |peers| columns(peers, Into::All))
            }
            (_, Buffers::InPlace(lent)) => self.round(Round { lent, cut, ..round }, |peers| {
                columns(peers, Into::All)
            }),
        }
    }

    fn broadcast(
        &mut self,
        round: Round<'_>,
        buffers: Buffers<'_>,
        root: usize,
    ) -> Result<(), CollectiveError> {
        match buffers {
            Buffers::InPlace(buffer) if root == self.rank => self.round(
                Round {
                    shared: buffer,
                    ..round
                },
                |_| (),
            ),
            Buffers::InPlace(receive) => {
                self.round(round, |peers| receive.copy_from_slice(peers.shared(root)))
            }
            Buffers::Apart { send, receive } => {
                let shared = if root == self.rank { send } else { &[] };
                self.round(Round { shared, ..round }, |peers| {
                    receive.copy_from_slice(peers.shared(root))
                })
            }
        }
    }

    fn all_gather(
        &mut self,
        round: Round<'_>,
        buffers: Buffers<'_>,
        bytes: impl Fn(usize) -> Range<usize>,
    ) -> Result<(), CollectiveError> {
        let (rank, world_size) = (self.rank, self.ends.len());
        let own = bytes(rank);
        match buffers {
            Buffers::Apart { send, receive } => self.round(
                Round {
                    shared: send,
                    ..round
                },
                |peers| {
                    for from in 0..world_size {
                        receive[bytes(from)].copy_from_slice(peers.shared(from));
                    }
                },
            ),
            Buffers::InPlace(buffer) => {
                let (before, rest) = buffer.split_at_mut(own.start);
                let (block, after) = rest.split_at_mut(own.len());
                self.round(
                    Round {
                        shared: block,
                        ..round
                    },
                    |peers| {
                        for from in 0..rank {
                            before[bytes(from)].copy_from_slice(peers.shared(from));
                        }
                        for from in rank + 1..world_size {
                            let to = bytes(from);
                            after[to.start - own.end..to.end - own.end]
                                .copy_from_slice(peers.shared(from));
                        }
                    },
                )
            }
        }
    }

    fn scatter(
        &mut self,
        round: Round<'_>,
        buffers: Buffers<'_>,
        root: usize,
        bytes: impl Fn(usize) -> Range<usize>,
    ) -> Result<(), CollectiveError> {
        let own = bytes(self.rank);
        match buffers {
            Buffers::InPlace(buffer) if root == self.rank => self.round(
                Round {
                    shared: buffer,
                    ..round
                },
                |_| (),
            ),
            Buffers::InPlace(buffer) => self.round(round, |peers| {
                buffer[own.clone()].copy_from_slice(&peers.shared(root)[own])
            }),
            Buffers::Apart { send, receive } => {
                let shared = if root == self.rank { send } else { &[] };
                self.round(Round { shared, ..round }, |peers| {
                    receive.copy_from_slice(&peers.shared(root)[own])
                })
            }
        }
    }

    fn gather(
        &mut self,
        round: Round<'_>,
        buffers: Buffers<'_>,
        root: usize,
        (blocks, dtype): (Blocks<'_>, DType),
    ) -> Result<(), CollectiveError> {
        let cut = Cut::Blocks(blocks, dtype.len_bytes());
        let own = blocks.of_bytes(self.rank, dtype.len_bytes());
        match buffers {
            // The root's own block is in its place already.
            Buffers::InPlace(lent) if root == self.rank => {
                self.round(Round { lent, cut, ..round }, |_| ())
            }
            Buffers::InPlace(buffer) => self.round(round, |peers| {
                peers.lent_mut(root).copy_from_slice(&buffer[own])
            }),
            Buffers::Apart { send, receive } => {
                let (lent, cut) = if root == self.rank {
                    (receive, cut)
                } else {
                    (&mut [][..], Cut::None)
                };
                self.round(Round { lent, cut, ..round }, |peers| {
                    peers.lent_mut(root).copy_from_slice(send)
                })
            }
        }
    }

    fn all_to_all(
        &mut self,
        round: Round<'_>,
        buffers: Buffers<'_>,
        bytes: impl Fn(usize) -> Range<usize>,
    ) -> Result<(), CollectiveError> {
        let own = bytes(self.rank);
        // In place the peers read what this rank overwrites, so they get a copy.
        let copy;
        let (shared, receive) = match buffers {
            Buffers::Apart { send, receive } => (send, receive),
            Buffers::InPlace(buffer) => {
                copy = buffer.to_vec();
                (&copy[..], buffer)
            }
        };
        let world_size = self.ends.len();
        self.round(Round { shared, ..round }, |peers| {
            for from in 0..world_size {
                receive[bytes(from)].copy_from_slice(&peers.shared(from)[own.clone()]);
            }
        })
    }

    /// A send or a receive, from `pair.0` to `pair.1`; party 0 of a pair's meet is the sender.
    pub(super) fn transfer(
        &mut self,
        call: Call<'_>,
        numel: usize,
        pair: (usize, usize),
    ) -> Result<(), CollectiveError> {
        let side = usize::from(self.rank == pair.1);
        let (mut seat, transfers) = match self.pairs.remove(&pair) {
            Some(known) => known,
            None => (self.group.pair_seat(pair, side)?, 0),
        };
        let mut fingerprint = Fingerprint::new(&call, numel, transfers + 1, self.context);
        let own_name = call.operation;
        let (header, deadline) = self.header(fingerprint, Placement::Shared);
        fingerprint.operation = Operation::Send { to: pair.1 };
        let (shared, receive): (&[u8], &mut [u8]) = match call.buffers {
            Buffers::InPlace(buffer) if side == 0 => (buffer, &mut []),
            Buffers::InPlace(buffer) => (&[], buffer),
            Buffers::Apart { send, .. } if side == 0 => (send, &mut []),
            Buffers::Apart { receive, .. } => (&[], receive),
        };
        let offer = Offer {
            header: Header {
                fingerprint,
                ..header
            },
            shared,
            lent: &mut [],
            ends: &[0, 0],
        };
        let named = Fingerprint {
            operation: own_name,
            ..fingerprint
        };
        let timeout = self.group.options().timeout;
        let late = |sides: &[usize]| {
            late(
                sides.iter().map(|&side| [pair.0, pair.1][side]).collect(),
                &named,
                timeout,
            )
        };
        let outcome = seat.meet(offer, deadline, late, |peers| {
            let compared = Fingerprint::compare(2, |side| &peers.header(side).fingerprint);
            compared.map_err(|error| error.with_ranks([pair.0, pair.1]))?;
            if side == 1 {
                receive.copy_from_slice(peers.shared(0));
            }
            Ok(())
        });
        self.pairs.insert(pair, (seat, transfers + 1));
        outcome?
    }

    /// Exchanges memberships and takes this rank's place in its subgroup.
    pub(super) fn join_subgroup(
        &mut self,
        membership: Option<Membership>,
    ) -> Result<Option<Joined>, CollectiveError> {
        let call = Call {
            operation: Operation::Split,
            dtype: DType::U8,
            counts: None,
            buffers: Buffers::InPlace(&mut []),
        };
        let fingerprint = Fingerprint::new(&call, 0, self.sequence, self.context);
        let (header, deadline) = self.header(fingerprint, Placement::Lent);
        let round = Round {
            header: Header {
                membership,
                ..header
            },
            deadline,
            shared: &[],
            lent: &mut [],
            cut: Cut::None,
        };
        let (group, rank, sequence) = (Arc::clone(&self.group), self.rank, self.sequence);
        self.round(round, |peers| {
            let own = membership?;
            let same = |other: &usize| {
                peers
                    .header(*other)
                    .membership
                    .is_some_and(|m| m.colour == own.colour)
            };
            let mut members: Vec<usize> = (0..peers.parties()).filter(same).collect();
            members.sort_by_key(|&member| (peers.header(member).membership.map(|m| m.key), member));
            let place = members.iter().position(|&member| member == rank)?;
            let (group, seat) = group.subgroup(sequence, own.colour, place, members.len());
            Some((group, place, seat))
        })
    }
}

/// The part of `len_bytes` bytes that rank `rank` reduces.
fn lines(len_bytes: usize, rank: usize, world_size: usize) -> Range<usize> {
    let lines = Blocks {
        numel: len_bytes.div_ceil(LINE_BYTES),
        world_size,
        counts: None,
    };
    let own = lines.of_bytes(rank, LINE_BYTES);
    own.start.min(len_bytes)..own.end.min(len_bytes)
}

fn late(
    ranks: Vec<usize>,
    fingerprint: &Fingerprint,
    timeout: std::time::Duration,
) -> CollectiveError {
    CollectiveError::Late {
        ranks,
        operation: fingerprint.operation.name(),
        sequence: fingerprint.sequence,
        bucket: fingerprint.context.bucket,
        timeout_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
    }
}

/// Where the result of a reduction goes.
enum Into<'a> {
    /// To this rank's part of everyone's lent memory.
    All,
    /// To this rank's part of one rank's lent memory.
    Rank(usize),
    /// To memory of this rank's own.
    Slice(&'a mut [u8]),
}

/// This rank's part of every rank's elements, where they lie.
struct Columns<'a, 'p> {
    peers: &'a mut Peers<'p, Header>,
    /// The part within the whole.
    own: Range<usize>,
    into: Into<'a>,
}

impl Ranks for Columns<'_, '_> {
    fn world_size(&self) -> usize {
        self.peers.parties()
    }

    fn input(&self, rank: usize, bytes: Range<usize>) -> &[u8] {
        match self.peers.header(rank).placement {
            Placement::Lent => &self.peers.lent(rank)[bytes],
            Placement::Shared => {
                &self.peers.shared(rank)[self.own.start + bytes.start..self.own.start + bytes.end]
            }
        }
    }

    fn store(&mut self, bytes: Range<usize>, result: &[u8]) {
        match &mut self.into {
            Into::All => {
                for rank in 0..self.peers.parties() {
                    self.peers.lent_mut(rank)[bytes.clone()].copy_from_slice(result);
                }
            }
            Into::Rank(rank) => self.peers.lent_mut(*rank)[bytes].copy_from_slice(result),
            Into::Slice(slice) => slice[bytes].copy_from_slice(result),
        }
    }
}

const _: () = assert!(LINE_BYTES.is_multiple_of(8), "no element is cut in two");

impl CollectiveError {
    /// A mismatch between two parties, said of the ranks they are.
    fn with_ranks(mut self, ranks: [usize; 2]) -> Self {
        if let CollectiveError::Mismatch {
            expected_rank,
            found_rank,
            ..
        } = &mut self
        {
            (*expected_rank, *found_rank) = (ranks[*expected_rank], ranks[*found_rank]);
        }
        self
    }
}
