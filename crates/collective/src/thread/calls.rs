//! The engine's calls: a round of all ranks, or of two.

use std::sync::Arc;

use super::algorithms::Round;
use super::engine::Threads;
use super::group::{Group, Header, Placement};
use crate::{
    Aborter, Begun, Blocks, Buffers, Call, CollectiveError, Engine, Membership, OnShared,
    Operation, Pair, Place,
};

impl Engine for Threads {
    fn place(&self) -> Place {
        let Group { world_size, begun, .. } = *self.group;
        Place { rank: self.rank, world_size, begun }
    }

    fn collective(
        &mut self,
        begun: &mut Begun<'_>,
        call: Call<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        let placement = match call.buffers {
            Buffers::InPlace(_) => Placement::Writable,
            Buffers::OutOfPlace { .. } => Placement::Shared,
        };
        let round = Round::bare(Header::of(begun, placement));
        match call.operation {
            Operation::AllReduce(op)
            | Operation::Reduce { reduce: op, .. }
            | Operation::ReduceScatter(op) => self.reduction(begun, round, call, blocks, op),
            Operation::Gather { root } => self.gather(begun, round, call, root, blocks),
            _ => self.movement(begun, round, call, blocks),
        }
    }

    fn transfer(
        &mut self,
        begun: &mut Begun<'_>,
        pair: Pair,
        call: Call<'_>,
        _blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        self.between_two(begun, pair, call)
    }

    fn join(
        &mut self,
        begun: &mut Begun<'_>,
        membership: Option<Membership>,
    ) -> Result<Option<Self>, CollectiveError> {
        let header = Header { membership, ..Header::of(begun, Placement::Writable) };
        let (group, rank, sequence) = (Arc::clone(&self.group), self.rank, begun.print.sequence);
        self.round(begun, Round::bare(header), |peers| {
            let own = membership?;
            let passed = |member: usize| peers.header(member).membership;
            let members = own.members(peers.parties(), passed);
            let place = members.iter().position(|&member| member == rank)?;
            let (group, participant) = group.subgroup(sequence, own.colour, place, members.len());
            Some(Self::new(group, place, participant))
        })
    }

    fn close(&mut self, error: CollectiveError) -> CollectiveError {
        self.group.close(error)
    }

    fn leave(&mut self, last: CollectiveError) {
        self.group.close(last);
    }

    fn aborter(&self) -> Aborter {
        let close = |group: &Group, error| drop(group.close(error));
        Aborter::of(self.rank, &self.group, close, Group::failure)
    }

    fn failure(&self) -> Option<CollectiveError> {
        self.group.failure()
    }

    fn on_shared(&mut self) -> Option<&mut dyn OnShared> {
        Some(self)
    }
}
