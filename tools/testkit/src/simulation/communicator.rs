//! Ranks of a simulated world. Every call is an exchange of bytes, whose moment the schedule
//! decides.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::sync::Arc;
use std::time::Instant;

use fusestep_collective::{
    Aborter, Buffers, Call, CallContext, CollectiveError, Communicator, FlightRecorder, Membership,
    Operation, RankMemory, ReduceUpdate, reduce_slices,
};
use fusestep_simd::Level;

use super::schedule::{Brought, Schedule};
use crate::SimulatedDisk;

/// One rank's place in a group of a simulated world.
#[derive(Debug)]
pub(super) struct SimulatedRank {
    schedule: Arc<Schedule>,
    group: u64,
    /// Ranks of the world, in the group's order.
    members: Vec<usize>,
    /// Number of the rank in the world; the next field is the number in the group.
    world_rank: usize,
    rank: usize,
    sequence: u64,
    context: CallContext,
    shares_memory: bool,
    recorder: FlightRecorder,
}

impl SimulatedRank {
    pub(super) fn new(
        schedule: Arc<Schedule>,
        rank: usize,
        world: usize,
        shares_memory: bool,
    ) -> Self {
        Self::in_group(schedule, 0, (0..world).collect(), rank, shares_memory)
    }

    fn in_group(
        schedule: Arc<Schedule>,
        group: u64,
        members: Vec<usize>,
        world_rank: usize,
        shares_memory: bool,
    ) -> Self {
        let rank = members.iter().position(|&member| member == world_rank);
        let rank = rank.unwrap_or_default();
        Self {
            recorder: FlightRecorder::new(rank, members.len(), 1, Instant::now()),
            schedule,
            group,
            members,
            world_rank,
            rank,
            sequence: 0,
            context: CallContext::default(),
            shares_memory,
        }
    }

    fn exchange(&mut self, label: &str, bytes: Vec<u8>) -> Result<Brought, CollectiveError> {
        self.sequence += 1;
        let label = format!("{label} {:?}", self.context);
        let call = (self.group, self.sequence);
        self.schedule.exchange(self.world_rank, &self.members, call, &label, bytes)
    }
}

impl Communicator for SimulatedRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.members.len()
    }

    fn execute(&mut self, call: Call<'_>) -> Result<(), CollectiveError> {
        let blocks = call.blocks(self.rank, self.members.len())?;
        let (dtype, operation) = (call.dtype, call.operation);
        let block = |rank| blocks.of_bytes(rank, dtype.len_bytes());
        let own = block(self.rank);
        let brings = match &call.buffers {
            Buffers::InPlace(whole) if operation == Operation::AllGather => {
                whole[own.clone()].to_vec()
            }
            Buffers::InPlace(whole) => whole.to_vec(),
            Buffers::OutOfPlace { send, .. } => send.to_vec(),
        };
        let label = format!("{operation:?} {dtype} {} {:?}", blocks.numel, call.counts);
        let all = self.exchange(&label, brings)?;
        let is_out_of_place = matches!(call.buffers, Buffers::OutOfPlace { .. });
        let result = match call.buffers {
            Buffers::InPlace(whole) => whole,
            Buffers::OutOfPlace { receive, .. } => receive,
        };
        let reduced = |op| {
            let inputs: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
            let mut sum = vec![0; inputs[0].len()];
            reduce_slices(Level::detect(), dtype, op, &inputs, &mut sum);
            sum
        };
        match operation {
            Operation::AllReduce(op) => result.copy_from_slice(&reduced(op)),
            Operation::Reduce { reduce, root } if root == self.rank => {
                result.copy_from_slice(&reduced(reduce));
            }
            Operation::Reduce { .. } | Operation::Barrier => {}
            Operation::Broadcast { root } => result.copy_from_slice(&all[root]),
            Operation::AllGather => {
                for (rank, bytes) in all.iter().enumerate() {
                    result[block(rank)].copy_from_slice(bytes);
                }
            }
            Operation::Scatter { root } if is_out_of_place => {
                result.copy_from_slice(&all[root][own]);
            }
            Operation::ReduceScatter(op) => {
                let sum = reduced(op);
                let place = if is_out_of_place { 0..own.len() } else { own.clone() };
                result[place].copy_from_slice(&sum[own]);
            }
            other => {
                return Err(CollectiveError::Refused {
                    rank: self.rank,
                    operation: other.name(),
                    reason: "expected a call that a training step makes, found another".to_owned(),
                });
            }
        }
        Ok(())
    }

    fn split(
        &mut self,
        membership: Option<Membership>,
    ) -> Result<Option<Box<dyn Communicator>>, CollectiveError> {
        let text = membership.map_or(String::new(), |own| format!("{} {}", own.colour, own.key));
        let all = self.exchange("split", text.into_bytes())?;
        let Some(own) = membership else {
            return Ok(None);
        };
        let passed = |rank: usize| {
            let text = String::from_utf8_lossy(&all[rank]);
            let (colour, key) = text.split_once(' ')?;
            Some(Membership { colour: colour.parse().ok()?, key: key.parse().ok()? })
        };
        let members = own.members(all.len(), passed).into_iter();
        let members = members.map(|rank| self.members[rank]).collect();
        let mut hasher = DefaultHasher::new();
        (self.group, self.sequence, own.colour).hash(&mut hasher);
        let group = hasher.finish();
        Ok(Some(Box::new(Self::in_group(
            Arc::clone(&self.schedule),
            group,
            members,
            self.world_rank,
            self.shares_memory,
        ))))
    }

    fn set_context(&mut self, context: CallContext) {
        self.context = context;
    }

    fn aborter(&self) -> Aborter {
        let schedule = Arc::clone(&self.schedule);
        let seen = Arc::clone(&self.schedule);
        Aborter::new(self.rank, move |error| schedule.close(error)).seeing(move || seen.closed())
    }

    fn recorder(&self) -> &FlightRecorder {
        &self.recorder
    }

    fn shares_memory(&self) -> bool {
        self.shares_memory
    }

    /// Gives the work copies of every rank's memory; a second exchange brings the written bytes
    /// back.
    fn reduce_update(
        &mut self,
        call: ReduceUpdate<'_>,
        work: &mut dyn FnMut(RankMemory<'_>),
    ) -> Result<(), CollectiveError> {
        let world = self.members.len();
        let blocks = call.blocks(self.rank, world)?;
        let label = format!("reduce-update {} {:?}", call.grad_dtype, call.counts);
        let all_grads = self.exchange(&label, call.grads.to_vec())?;
        let mut copies = Vec::new();
        for replica in call.replicas.iter() {
            let all = self.exchange("replica", replica.bytes.to_vec())?;
            let own = blocks.of_bytes(self.rank, replica.dtype.len_bytes());
            copies.push(all.iter().map(|bytes| bytes[own.clone()].to_vec()).collect::<Vec<_>>());
        }
        let own = match call.grads {
            [] => 0..0,
            _ => blocks.of_bytes(self.rank, call.grad_dtype.len_bytes()),
        };
        work(RankMemory {
            rank: self.rank,
            grads: all_grads.iter().map(|bytes| &bytes[own.clone()]).collect(),
            replicas: copies
                .iter_mut()
                .map(|ranks| ranks.iter_mut().map(Vec::as_mut_slice).collect())
                .collect(),
        });
        for (replica, ranks) in call.replicas.into_iter().zip(copies) {
            // Bytes that each rank has written for this rank, block by block.
            let written = self.exchange("written", ranks.concat())?;
            for (rank, bytes) in written.iter().enumerate() {
                let place = blocks.of_bytes(rank, replica.dtype.len_bytes());
                let len = place.len();
                replica.bytes[place]
                    .copy_from_slice(&bytes[len * self.rank..len * (self.rank + 1)]);
            }
        }
        Ok(())
    }

    fn failure(&self) -> Option<CollectiveError> {
        self.schedule.closed()
    }
}

/// A disk as one rank sees it: each call is an event, and a dead rank makes none.
#[derive(Debug)]
pub(super) struct RankFiles {
    pub(super) disk: Arc<SimulatedDisk>,
    pub(super) schedule: Arc<Schedule>,
    pub(super) rank: usize,
}

impl RankFiles {
    fn disk(&self) -> io::Result<&SimulatedDisk> {
        self.schedule.event(self.rank).map_err(io::Error::other)?;
        Ok(&self.disk)
    }
}

files_of_disk!(RankFiles);
