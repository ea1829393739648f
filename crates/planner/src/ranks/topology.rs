//! Which rank of how many.

use fusestep_collective::Communicator;
use serde::Serialize;

use crate::PlanError;

/// This rank and the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Topology {
    /// This rank, counted from 0.
    pub rank: usize,
    /// The number of ranks, at least 1.
    pub world: usize,
}

impl Default for Topology {
    fn default() -> Self {
        Self::SOLO
    }
}

impl Topology {
    /// A world of one rank.
    pub const SOLO: Topology = Topology { rank: 0, world: 1 };

    /// Rank `rank` of `world`.
    ///
    /// # Errors
    /// [`PlanError::Topology`] if there is no such rank.
    pub fn new(rank: usize, world: usize) -> Result<Self, PlanError> {
        let topology = Self { rank, world };
        topology.validate().map(|()| topology)
    }

    /// The place of a communicator in its group.
    pub fn of(comm: &dyn Communicator) -> Self {
        Self {
            rank: comm.rank(),
            world: comm.world_size(),
        }
    }

    pub(crate) fn validate(self) -> Result<(), PlanError> {
        if self.rank < self.world {
            return Ok(());
        }
        Err(PlanError::Topology {
            expected: format!("a rank below the world size {}", self.world),
            found: format!("rank {}", self.rank),
        })
    }
}
