//! The collectives: what each rank brings, and what it does with the other ranks' memory.

use fusestep_simd::copy_bytes;
use smallvec::SmallVec;

use super::engine::Threads;
use super::group::{Header, Placement};
use crate::rendezvous::{Contribution, MAX_REPLICAS, Peers};
use crate::sharing::lines;
use crate::{
    Begun, Blocks, Buffers, Call, CollectiveError, Fingerprint, Movement, OfRanks, OnShared,
    RankMemory, ReduceUpdate, Share,
};

/// Ways to cut writable memory into a part for each rank.
#[derive(Clone, Copy)]
pub(super) enum Cut<'a> {
    /// No parts, since nothing is writable.
    None,
    /// Parts of equal numbers of cache lines.
    Lines,
    /// The ranks' blocks, of elements of this many bytes.
    Blocks(Blocks<'a>, usize),
    /// One part, which is this rank's.
    Own,
}

/// Memory that a rank brings to a round, with its header.
pub(super) struct Round<'a> {
    pub(super) header: Header,
    pub(super) shared: &'a [u8],
    pub(super) writable: &'a mut [u8],
    pub(super) cut: Cut<'a>,
    /// Bytes of this rank's part that no other rank works on.
    pub(super) reserved: usize,
    /// More memory that is cut into the ranks' blocks, and the ends of the blocks in each replica.
    pub(super) replicas: [&'a mut [u8]; MAX_REPLICAS],
    pub(super) replica_ends: &'a [usize],
}

impl<'a> Round<'a> {
    /// A round to which a rank brings only its header. Its own part, if it gets one, is reserved
    /// for it.
    pub(super) fn bare(header: Header) -> Self {
        Self {
            header,
            shared: &[],
            writable: &mut [],
            cut: Cut::None,
            reserved: usize::MAX,
            replicas: Default::default(),
            replica_ends: &[],
        }
    }
}

impl Threads {
    /// Meets the other ranks, compares fingerprints, and does `work` if they agree.
    pub(super) fn round<R>(
        &mut self,
        begun: &mut Begun<'_>,
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
        let arrived_ns = round.header.arrived_ns;
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
        let (print, timeout) = (&begun.print, begun.timeout);
        let late = |ranks: &[usize]| print.late(group.behind(own, ranks), timeout);
        let recorder = &mut *begun.recorder;
        self.participant.rendezvous(contribution, begun.deadline, late, |peers| {
            Fingerprint::compare(world_size, |rank| &peers.header(rank).fingerprint)?;
            let arrived = |rank: usize| peers.header(rank).arrived_ns;
            if let Some(last) = (0..world_size).max_by_key(|&rank| arrived(rank)) {
                recorder.waited(last, arrived(last).saturating_sub(arrived_ns));
            }
            Ok(work(peers))
        })?
    }

    /// Takes the bytes that this rank needs from where they lie on other ranks.
    pub(super) fn movement(
        &mut self,
        begun: &mut Begun<'_>,
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
        self.round(begun, Round { shared, ..round }, |peers| {
            for pull in pulls {
                copy_bytes(level, pull.into, &peers.shared(pull.from)[pull.range]);
            }
        })
    }

    /// Writes this rank's block to the root, at the same time as other ranks write theirs.
    pub(super) fn gather(
        &mut self,
        begun: &mut Begun<'_>,
        round: Round<'_>,
        call: Call<'_>,
        root: usize,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        let element_bytes = call.dtype.len_bytes();
        let cut = Cut::Blocks(blocks, element_bytes);
        let own = blocks.of_bytes(self.rank, element_bytes);
        match call.buffers {
            // The root's own block is in its place already.
            Buffers::InPlace(writable) if root == self.rank => {
                self.round(begun, Round { writable, cut, ..round }, |_| ())
            }
            Buffers::InPlace(buffer) => self.round(begun, round, |peers| {
                peers.reserved().writable_mut(root).copy_from_slice(&buffer[own])
            }),
            Buffers::OutOfPlace { send, receive } => {
                let (writable, cut) =
                    if root == self.rank { (receive, cut) } else { (&mut [][..], Cut::None) };
                self.round(begun, Round { writable, cut, ..round }, |peers| {
                    peers.reserved().writable_mut(root).copy_from_slice(send)
                })
            }
        }
    }
}

impl OnShared for Threads {
    fn reduce_update(
        &mut self,
        begun: &mut Begun<'_>,
        call: ReduceUpdate<'_>,
        blocks: Blocks<'_>,
        work: &mut dyn FnMut(RankMemory<'_>),
    ) -> Result<(), CollectiveError> {
        let rank = self.rank;
        let own = match call.grads {
            [] => 0..0,
            _ => blocks.of_bytes(rank, call.grad_dtype.len_bytes()),
        };
        let ranks = 0..self.ends.len();
        let mut ends: SmallVec<[usize; 64]> = SmallVec::new();
        for replica in call.replicas.iter() {
            ends.extend(ranks.clone().map(|rank| replica.block(blocks, rank).end));
        }
        let mut bytes = call.replicas.into_iter().map(|replica| replica.bytes);
        let replicas = std::array::from_fn(|_| bytes.next().unwrap_or_default());
        let round = Round {
            shared: call.grads,
            reserved: 0,
            replicas,
            replica_ends: &ends,
            ..Round::bare(Header::of(begun, Placement::Shared))
        };
        self.round(begun, round, |peers| {
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
}
