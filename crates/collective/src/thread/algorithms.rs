//! The collectives, as what each rank brings and what it does with the others' memory.

use std::sync::Arc;
use std::time::Instant;

use fusestep_simd::{Contribution, MAX_REPLICAS, Participant, Peers, copy_bytes};
use fusestep_tensor::DType;
use smallvec::SmallVec;

use super::ThreadCommunicator;
use super::group::{Group, Header, Placement};
use crate::sharing::lines;
use crate::{
    Blocks, Buffers, Call, CallShape, CollectiveError, Fingerprint, Membership, Movement, OfRanks,
    Operation, RankMemory, ReduceUpdate, Share,
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

impl<'a> Round<'a> {
    /// A round to which a rank brings nothing but its header; its own part, if it gets one, is
    /// nobody else's.
    fn bare((header, deadline): (Header, Instant)) -> Self {
        Self {
            header,
            deadline,
            shared: &[],
            writable: &mut [],
            cut: Cut::None,
            reserved: usize::MAX,
            replicas: Default::default(),
            replica_ends: &[],
        }
    }
}

type Joined = (Arc<Group>, usize, Participant<Header, CollectiveError>);

impl ThreadCommunicator {
    /// Any call that all ranks of the group make.
    pub(super) fn collective(
        &mut self,
        call: Call<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        let fingerprint = call.shape().fingerprint(blocks.numel, self.sequence, self.context);
        let placement = match call.buffers {
            Buffers::InPlace(_) => Placement::Writable,
            Buffers::OutOfPlace { .. } => Placement::Shared,
        };
        let round = Round::bare(self.header(fingerprint, placement));
        match call.operation {
            Operation::AllReduce(op)
            | Operation::Reduce { reduce: op, .. }
            | Operation::ReduceScatter(op) => self.reduction(round, call, blocks, op),
            Operation::Gather { root } => {
                self.gather(round, call.buffers, root, (blocks, call.dtype))
            }
            _ => self.movement(round, call, blocks),
        }
    }

    /// Meets the others, compares fingerprints, and does `work` if they agree.
    pub(super) fn round<R>(
        &mut self,
        round: Round<'_>,
        work: impl FnOnce(&mut Peers<'_, Header>) -> R,
    ) -> Result<R, CollectiveError> {
        let world_size = self.ends.len();
        for rank in 0..world_size {
            self.ends[rank] = match round.cut {
                Cut::None => 0,
                Cut::Lines => lines(round.writable.len(), rank, world_size).end,
                Cut::Blocks(blocks, element_bytes) => blocks.of_bytes(rank, element_bytes).end,
                Cut::Own if rank < self.rank => 0,
                Cut::Own => round.writable.len(),
            };
        }
        let fingerprint = round.header.fingerprint;
        let timeout = self.group.options.timeout;
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
        let late = |ranks: &[usize]| fingerprint.late(group.behind(own, ranks), timeout);
        let recorder = &mut self.recorder;
        self.participant.rendezvous(contribution, round.deadline, late, |peers| {
            Fingerprint::compare(world_size, |rank| &peers.header(rank).fingerprint)?;
            let arrived = |rank: usize| peers.header(rank).arrived_ns;
            if let Some(last) = (0..world_size).max_by_key(|&rank| arrived(rank)) {
                recorder.waited(last, arrived(last).saturating_sub(round.header.arrived_ns));
            }
            Ok(work(peers))
        })?
    }

    /// Each rank takes what it needs from where it lies.
    fn movement(
        &mut self,
        round: Round<'_>,
        call: Call<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        let level = self.group.options.level;
        let movement = Movement {
            operation: call.operation,
            blocks: &blocks.all_bytes(call.dtype.len_bytes()),
        };
        let Share { shown, pulls } = movement.share(self.rank, call.buffers);
        let shared = &*shown;
        self.round(Round { shared, ..round }, |peers| {
            for pull in pulls {
                copy_bytes(level, pull.into, &peers.shared(pull.from)[pull.range]);
            }
        })
    }

    /// Each rank writes its block to the root, all at the same time.
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
            Buffers::InPlace(writable) if root == self.rank => {
                self.round(Round { writable, cut, ..round }, |_| ())
            }
            Buffers::InPlace(buffer) => self.round(round, |peers| {
                peers.reserved().writable_mut(root).copy_from_slice(&buffer[own])
            }),
            Buffers::OutOfPlace { send, receive } => {
                let (writable, cut) =
                    if root == self.rank { (receive, cut) } else { (&mut [][..], Cut::None) };
                self.round(Round { writable, cut, ..round }, |peers| {
                    peers.reserved().writable_mut(root).copy_from_slice(send)
                })
            }
        }
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
        let header = self.header(fingerprint, Placement::Shared);
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
            shared: call.grads,
            reserved: 0,
            replicas,
            replica_ends: &ends,
            ..Round::bare(header)
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

    /// Exchanges memberships and takes this rank's place in its subgroup.
    pub(super) fn join_subgroup(
        &mut self,
        membership: Option<Membership>,
    ) -> Result<Option<Joined>, CollectiveError> {
        let fingerprint = CallShape::SPLIT.fingerprint(0, self.sequence, self.context);
        let mut round = Round::bare(self.header(fingerprint, Placement::Writable));
        round.header.membership = membership;
        let (group, rank, sequence) = (Arc::clone(&self.group), self.rank, self.sequence);
        self.round(round, |peers| {
            let own = membership?;
            let passed = |member: usize| peers.header(member).membership;
            let members = own.members(peers.parties(), passed);
            let place = members.iter().position(|&member| member == rank)?;
            let (group, participant) = group.subgroup(sequence, own.colour, place, members.len());
            Some((group, place, participant))
        })
    }
}
