//! Topology of a run: this rank, the world size, and the way in which ranks reach each other.

use fusestep_collective::Communicator;
use serde::Serialize;

use crate::error::{PlanError, Result};

/// Most ranks that a plan is made for: tables of ranks are part of every plan.
pub const MAX_WORLD: usize = 1 << 16;

/// Way in which the memory of one rank reaches another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reach {
    /// Calls of the engine copy it.
    #[default]
    Calls,
    /// Ranks see each other's memory: threads, and processes of one machine on a shared segment.
    SharedMemory,
}

/// Place of this rank: its rank and the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Topology {
    /// This rank, counted from 0.
    pub rank: usize,
    /// The number of ranks, at least 1.
    pub world: usize,
    /// Way in which ranks reach each other.
    pub reach: Reach,
}

impl Default for Topology {
    fn default() -> Self {
        Self::SOLO
    }
}

impl Topology {
    /// A world of one rank.
    pub const SOLO: Topology = Topology { rank: 0, world: 1, reach: Reach::Calls };

    /// Rank `rank` of `world`, which reach each other by calls.
    ///
    /// # Errors
    /// [`PlanError::Topology`] if there is no such rank, or there are more ranks than
    /// [`MAX_WORLD`].
    pub fn new(rank: usize, world: usize) -> Result<Self> {
        let topology = Self { rank, world, reach: Reach::Calls };
        topology.validate().map(|()| topology)
    }

    /// The place of a communicator in its group, and what it can do.
    pub fn of(comm: &dyn Communicator) -> Self {
        Self {
            rank: comm.rank(),
            world: comm.world_size(),
            reach: if comm.shares_memory() { Reach::SharedMemory } else { Reach::Calls },
        }
    }

    pub(crate) fn validate(self) -> Result<()> {
        if self.world > MAX_WORLD {
            return Err(PlanError::Topology {
                expected: format!("at most {MAX_WORLD} ranks"),
                found: self.world.to_string(),
            });
        }
        if self.rank < self.world {
            return Ok(());
        }
        Err(PlanError::Topology {
            expected: format!("a rank below the world size {}", self.world),
            found: format!("rank {}", self.rank),
        })
    }
}

/// Text of this rank's place among the ranks of its plan, for errors.
impl std::fmt::Display for Topology {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.world)
    }
}

/// Values that ranks begin to train with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Initial {
    /// Values of rank 0, which all ranks begin with.
    #[default]
    OfRankZero,
    /// Values of each rank, which have to be equal; the first step compares them.
    OwnAndEqual,
}

/// Text by which ranks compare the setting.
impl std::fmt::Display for Initial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::OfRankZero => "of rank 0",
            Self::OwnAndEqual => "own and equal",
        })
    }
}
