//! A world in groups of ranks that share shards: the communicators within and across them.

use fusestep_collective::{CallContext, CollectiveError, Communicator, Membership};

use crate::renumbered::Renumbered;

/// The ranks that share shards with this one, and those that have the same shard in other groups.
pub(crate) struct ShardGroups {
    // Their errors name ranks of the world.
    pub(crate) within: Box<dyn Communicator>,
    pub(crate) across: Box<dyn Communicator>,
}

impl ShardGroups {
    /// Groups of so many consecutive ranks; all ranks call it.
    pub(crate) fn split(
        comm: &mut dyn Communicator,
        group: usize,
    ) -> Result<Self, CollectiveError> {
        let (rank, world) = (comm.rank(), comm.world_size());
        let refused = || CollectiveError::Refused {
            rank,
            operation: "split",
            reason: format!(
                "expected a world that is a multiple of a shard group's {group} ranks, found \
                 {world} ranks"
            ),
        };
        if !world.is_multiple_of(group) {
            return Err(refused());
        }
        let (colour, key) = ((rank / group) as u32, 0);
        let within = comm.split(Some(Membership { colour, key }))?;
        let colour = (rank % group) as u32;
        let across = comm.split(Some(Membership { colour, key }))?;
        let (within, across) = within.zip(across).ok_or_else(refused)?;
        let first = rank / group * group;
        let within_ranks = (first..first + group).collect();
        let across_ranks = (rank % group..world).step_by(group).collect();
        Ok(Self {
            within: Box::new(Renumbered::new(within, within_ranks, comm.aborter())),
            across: Box::new(Renumbered::new(across, across_ranks, comm.aborter())),
        })
    }

    pub(crate) fn set_context(&mut self, context: CallContext) {
        self.within.set_context(context);
        self.across.set_context(context);
    }

    pub(crate) fn finish_on_device(&mut self) -> Result<(), CollectiveError> {
        self.within.finish_on_device()?;
        self.across.finish_on_device()
    }
}
