//! The collectives, as what each rank brings and what it does with the others' memory.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use fusestep_simd::{Contribution, MAX_REPLICAS, Participant, Peers, copy_bytes};
use fusestep_tensor::DType;
use smallvec::SmallVec;

use super::ThreadCommunicator;
use super::group::{Group, Header, Placement};
use super::reduction::lines;
use crate::{
    Blocks, Buffers, Call, CollectiveError, Fingerprint, Membership, OfRanks, Operation,
    RankMemory, ReduceUpdate,
};

/// How writable memory is cut into a part for each rank.
#[derive(Clone, Copy)]
pub(super) enum Cut<'a> {
    /// Into nothing: nothing is writable.
    None,
    /// Into equal numbers of cache lines.
    Lines,
    /// Into the ranks' blocks.
    Blocks(Blocks<'a>, usize),
    /// All of it is this rank's part.
    Own,
}

/// What a rank brings to a round, with everything that belongs to it.
pub(super) struct Round<'a> {
    pub(super) header: Header,
    pub(super) deadline: Instant,
    pub(super) shared: &'a [u8],
    pub(super) writable: &'a mut [u8],
    pub(super) cut: Cut<'a>,
    /// Bytes of this rank's part that nobody else works on.
    pub(super) reserved: usize,
    /// More memory that is cut into the ranks' blocks, and where the blocks end in each.
    pub(super) replicas: [&'a mut [u8]; MAX_REPLICAS],
    pub(super) replica_ends: &'a [usize],
}

type Joined = (Arc<Group>, usize, Participant<Header, CollectiveError>);

impl ThreadCommunicator {
    /// Any call that all ranks of the group make.
    pub(super) fn collective(
        &mut self,
        call: Call<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        let fingerprint = Fingerprint::new(&call, blocks.numel, self.sequence, self.context);
        let placement = match call.buffers {
            Buffers::InPlace(_) => Placement::Writable,
            Buffers::OutOfPlace { .. } => Placement::Shared,
        };
        let (header, deadline) = self.header(fingerprint, placement);
        let round = Round {
            header,
            deadline,
            shared: &[],
            writable: &mut [],
            cut: Cut::None,
            reserved: usize::MAX,
            replicas: Default::default(),
            replica_ends: &[],
        };
        let bytes = |rank: usize| blocks.of_bytes(rank, call.dtype.len_bytes());
        match call.operation {
            Operation::AllReduce(op)
            | Operation::Reduce { reduce: op, .. }
            | Operation::ReduceScatter(op) => self.reduction(round, call, blocks, op),
            Operation::Broadcast { root } => self.broadcast(round, call.buffers, root),
            Operation::AllGather => self.all_gather(round, call.buffers, bytes),
            Operation::Scatter { root } => self.scatter(round, call.buffers, root, bytes),
            Operation::Gather { root } => {
                self.gather(round, call.buffers, root, (blocks, call.dtype))
            }
            Operation::AllToAll => self.all_to_all(round, call.buffers, bytes),
            Operation::Barrier
            | Operation::Split
            | Operation::ReduceUpdate
            | Operation::Send { .. }
            | Operation::Receive { .. } => self.round(round, |_| ()),
        }
    }

    /// Meets the others, compares fingerprints, and does `work` if they agree.
    pub(super) fn round<R>(
        &mut self,
        round: Round<'_>,
        work: impl FnOnce(&mut Peers<'_, Header>) -> R,
    ) -> Result<R, CollectiveError> {
        let world_size = self.ends.len();
        match round.cut {
            Cut::None => self.ends.fill(0),
            Cut::Lines => {
                for rank in 0..world_size {
                    self.ends[rank] = lines(round.writable.len(), rank, world_size).end;
                }
            }
            Cut::Blocks(blocks, element_bytes) => {
                for rank in 0..world_size {
                    self.ends[rank] = blocks.of_bytes(rank, element_bytes).end;
                }
            }
            Cut::Own => {
                self.ends[..self.rank].fill(0);
                self.ends[self.rank..].fill(round.writable.len());
            }
        }
        let fingerprint = round.header.fingerprint;
        let timeout = self.group.options().timeout;
        let contribution = Contribution {
            header: round.header,
            shared: round.shared,
            writable: round.writable,
            ends: &self.ends,
            reserved: round.reserved,
            replicas: round.replicas,
            replica_ends: round.replica_ends,
        };
        let (group, own) = (&self.group, self.rank);
        let late = |ranks: &[usize]| late(group.behind(own, ranks), &fingerprint, timeout);
        let recorder = &mut self.recorder;
        self.participant
            .rendezvous(contribution, round.deadline, late, |peers| {
                Fingerprint::compare(world_size, |rank| &peers.header(rank).fingerprint)?;
                let arrived = |rank: usize| peers.header(rank).arrived_ns;
                if let Some(last) = (0..world_size).max_by_key(|&rank| arrived(rank)) {
                    recorder.waited(last, arrived(last).saturating_sub(round.header.arrived_ns));
                }
                Ok(work(peers))
            })?
    }

    fn broadcast(
        &mut self,
        round: Round<'_>,
        buffers: Buffers<'_>,
        root: usize,
    ) -> Result<(), CollectiveError> {
        let level = self.group.options().level;
        match buffers {
            Buffers::InPlace(buffer) if root == self.rank => self.round(
                Round {
                    shared: buffer,
                    ..round
                },
                |_| (),
            ),
            Buffers::InPlace(receive) => self.round(round, |peers| {
                copy_bytes(level, receive, peers.shared(root))
            }),
            Buffers::OutOfPlace { send, receive } => {
                let shared = if root == self.rank { send } else { &[] };
                self.round(Round { shared, ..round }, |peers| {
                    copy_bytes(level, receive, peers.shared(root))
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
        let level = self.group.options().level;
        let own = bytes(rank);
        match buffers {
            Buffers::OutOfPlace { send, receive } => self.round(
                Round {
                    shared: send,
                    ..round
                },
                |peers| {
                    for from in 0..world_size {
                        copy_bytes(level, &mut receive[bytes(from)], peers.shared(from));
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
                            copy_bytes(level, &mut before[bytes(from)], peers.shared(from));
                        }
                        for from in rank + 1..world_size {
                            let to = bytes(from);
                            let after = &mut after[to.start - own.end..to.end - own.end];
                            copy_bytes(level, after, peers.shared(from));
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
            Buffers::OutOfPlace { send, receive } => {
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
            Buffers::InPlace(writable) if root == self.rank => self.round(
                Round {
                    writable,
                    cut,
                    ..round
                },
                |_| (),
            ),
            Buffers::InPlace(buffer) => self.round(round, |peers| {
                peers
                    .reserved()
                    .writable_mut(root)
                    .copy_from_slice(&buffer[own])
            }),
            Buffers::OutOfPlace { send, receive } => {
                let (writable, cut) = if root == self.rank {
                    (receive, cut)
                } else {
                    (&mut [][..], Cut::None)
                };
                self.round(
                    Round {
                        writable,
                        cut,
                        ..round
                    },
                    |peers| peers.reserved().writable_mut(root).copy_from_slice(send),
                )
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
            Buffers::OutOfPlace { send, receive } => (send, receive),
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

    /// This rank's block of everyone's gradients and parameters.
    pub(super) fn update_everywhere(
        &mut self,
        call: ReduceUpdate<'_>,
        blocks: Blocks<'_>,
        work: &mut dyn FnMut(RankMemory<'_>),
    ) -> Result<(), CollectiveError> {
        let (rank, sequence) = (self.rank, self.sequence);
        let fingerprint = call.fingerprint(blocks.numel, sequence, self.context);
        let (header, deadline) = self.header(fingerprint, Placement::Shared);
        let own = blocks.of_bytes(rank, call.grad_dtype.len_bytes());
        let ranks = 0..self.ends.len();
        let mut ends: SmallVec<[usize; 64]> = SmallVec::new();
        for replica in call.replicas.iter() {
            let width = replica.dtype.len_bytes();
            ends.extend(ranks.clone().map(|rank| blocks.of_bytes(rank, width).end));
        }
        let mut bytes = call.replicas.into_iter().map(|replica| replica.bytes);
        let replicas = std::array::from_fn(|_| bytes.next().unwrap_or_default());
        let round = Round {
            header,
            deadline,
            shared: call.grads,
            writable: &mut [],
            cut: Cut::None,
            reserved: 0,
            replicas,
            replica_ends: &ends,
        };
        self.round(round, |peers| {
            let mut all = peers.replicas();
            let grads = (0..peers.parties()).map(|rank| &peers.shared(rank)[own.clone()]);
            let mut memory = RankMemory {
                rank,
                grads: grads.collect(),
                replicas: all.of(rank).map(|_| OfRanks::new()).collect(),
            };
            for (replica, bytes) in all.all_mut() {
                memory.replicas[replica].push(bytes);
            }
            work(memory);
        })
    }

    /// A send or a receive, from `pair.0` to `pair.1`; party 0 of a pair's rendezvous is the
    /// sender.
    pub(super) fn transfer(
        &mut self,
        call: Call<'_>,
        numel: usize,
        pair: (usize, usize),
    ) -> Result<(), CollectiveError> {
        let side = usize::from(self.rank == pair.1);
        let (mut participant, transfers) = match self.pairs.remove(&pair) {
            Some(known) => known,
            None => (self.group.pair_participant(pair, side)?, 0),
        };
        let mut fingerprint = Fingerprint::new(&call, numel, transfers + 1, self.context);
        let own_name = call.operation;
        let (header, deadline) = self.header(fingerprint, Placement::Shared);
        fingerprint.operation = Operation::Send { to: pair.1 };
        let (shared, receive): (&[u8], &mut [u8]) = match call.buffers {
            Buffers::InPlace(buffer) if side == 0 => (buffer, &mut []),
            Buffers::InPlace(buffer) => (&[], buffer),
            Buffers::OutOfPlace { send, .. } if side == 0 => (send, &mut []),
            Buffers::OutOfPlace { receive, .. } => (&[], receive),
        };
        let contribution = Contribution {
            header: Header {
                fingerprint,
                ..header
            },
            shared,
            writable: &mut [],
            ends: &[0, 0],
            reserved: 0,
            replicas: Default::default(),
            replica_ends: &[],
        };
        let named = Fingerprint {
            operation: own_name,
            ..fingerprint
        };
        let timeout = self.group.options().timeout;
        let (group, own) = (&self.group, self.rank);
        let late = |sides: &[usize]| {
            let ranks: Vec<usize> = sides.iter().map(|&side| [pair.0, pair.1][side]).collect();
            late(group.behind(own, &ranks), &named, timeout)
        };
        group.set_transfer(own, Some([pair.1, pair.0][side]));
        let outcome = participant.rendezvous(contribution, deadline, late, |peers| {
            let compared = Fingerprint::compare(2, |side| &peers.header(side).fingerprint);
            compared.map_err(|error| error.with_ranks([pair.0, pair.1]))?;
            if side == 1 {
                receive.copy_from_slice(peers.shared(0));
            }
            Ok(())
        });
        // Until the group is closed others whose deadline comes now have to see that this rank only
        // waited; it is closed by this error, and what is written down says no more then.
        if !matches!(outcome, Err(CollectiveError::Late { .. })) {
            group.set_transfer(own, None);
        }
        self.pairs.insert(pair, (participant, transfers + 1));
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
        let (header, deadline) = self.header(fingerprint, Placement::Writable);
        let round = Round {
            header: Header {
                membership,
                ..header
            },
            deadline,
            shared: &[],
            writable: &mut [],
            cut: Cut::None,
            reserved: usize::MAX,
            replicas: Default::default(),
            replica_ends: &[],
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
            let (group, participant) = group.subgroup(sequence, own.colour, place, members.len());
            Some((group, place, participant))
        })
    }
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
