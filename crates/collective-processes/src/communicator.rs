//! The communicator: how a process finds its place among others.

use std::sync::Arc;
use std::time::Duration;

use fusestep_collective::{
    CallOptions, Communicator, MAX_TIMEOUT, Ranked, Timeout, forward_calls, mark_joined,
};

use crate::engine::Processes;
use crate::group::{Founding, Group};
use crate::session::SessionPlan;
use crate::{MAX_RANKS, ProcessError, ProcessOptions, Rendezvous, rendezvous, starter};

/// One rank of a group of processes on one machine, which exchange data through shared memory.
///
/// Dropping a communicator while other ranks still use theirs ends their calls. The error is
/// [`CollectiveError::Panicked`] if the dropping thread panicked, else [`CollectiveError::Left`].
/// If a process dies, the others' calls end some milliseconds later with [`CollectiveError::Died`].
///
/// [`CollectiveError::Left`]: fusestep_collective::CollectiveError::Left
/// [`CollectiveError::Panicked`]: fusestep_collective::CollectiveError::Panicked
/// [`CollectiveError::Died`]: fusestep_collective::CollectiveError::Died
///
/// # Cost
/// Each call waits twice for all ranks. Memory from [`allocate`](Communicator::allocate) is used
/// where it lies. Other memory goes through a shared buffer of 512 KiB, one stretch after the
/// other. Each stretch takes two more copies and two more waits. A reduce-scatter copies what other
/// ranks reduce, and no result.
#[derive(Debug)]
pub struct ProcessCommunicator(Ranked<Processes>);

impl ProcessCommunicator {
    /// All processes that a launcher has started: `fusestep launch -n N -- PROGRAM`, or torchrun.
    /// From then on this one ends, by SIGTERM, when `fusestep launch` has gone.
    ///
    /// # Errors
    /// [`ProcessError`] with what was expected and found in the environment, or the ranks that did
    /// not come.
    pub fn world(options: &ProcessOptions) -> Result<Self, ProcessError> {
        starter::follow();
        Self::join(&Rendezvous::from_environment()?, options)
    }

    /// The processes that pass the same session and number of ranks, each with its own rank.
    ///
    /// # Errors
    /// As [`world`](Self::world).
    pub fn join(place: &Rendezvous, options: &ProcessOptions) -> Result<Self, ProcessError> {
        let (rank, world_size) = (place.rank, place.world_size);
        if !(1..=MAX_RANKS).contains(&world_size) || rank >= world_size {
            return Err(ProcessError::World { rank, world_size });
        }
        let session = rendezvous::join(place, options.timeout.min(MAX_TIMEOUT))?;
        if world_size > 1 {
            mark_joined();
        }
        let founding = Founding {
            block: SessionPlan::new(place.world_size).world(),
            members: (0..place.world_size).collect(),
            rank: session.rank,
            memory: None,
            parent: None,
        };
        let group = Group::new(Arc::new(session), founding);
        let engine = Processes::new(group, options.clone());
        Ok(Self(Ranked::on(engine, CallOptions::from(options))))
    }

    /// Sets how long this rank waits for others from the next call on. Groups made by a split take
    /// the timeout over.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.0.timeout().set(timeout);
    }

    /// How long this rank waits for others; a clone sets it from elsewhere.
    pub fn timeout(&self) -> &Timeout {
        self.0.timeout()
    }
}

impl Communicator for ProcessCommunicator {
    forward_calls! {
        this => this.0;
        rank, world_size, execute, split, set_context, aborter, recorder, allocate, shares_memory,
        reduce_update, failure,
    }
}
