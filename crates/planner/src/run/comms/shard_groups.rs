//! Shard groups of a world: the communicators within and across groups, whose errors name ranks of
//! the world.

use fusestep_coalesce::HostMemory;
use fusestep_collective::{
    Aborter, Call, CallContext, CollectiveError, Communicator, DeviceCall, Membership, RankMemory,
    ReduceUpdate,
};
use fusestep_tensor::counted;

/// Communicators of this rank's shard group, and of the ranks with the same shard in other groups.
pub(crate) struct ShardGroups {
    // Their errors name ranks of the world.
    pub(crate) within: Box<dyn Communicator>,
    pub(crate) across: Box<dyn Communicator>,
}

impl ShardGroups {
    /// Splits the world into groups of so many consecutive ranks; all ranks call it.
    pub(crate) fn split(
        comm: &mut dyn Communicator,
        group: usize,
    ) -> Result<Self, CollectiveError> {
        let (rank, world) = (comm.rank(), comm.world_size());
        let refused = || CollectiveError::Refused {
            rank,
            operation: "split",
            reason: format!(
                "expected a world that is a multiple of a shard group's {group} ranks, found {}",
                counted(world as u64, "rank")
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

/// A group split off a world: its calls are the group's, its errors name ranks of the world, and an
/// error of one of its calls ends the world, so that ranks that wait in other groups hear of the
/// rank that failed rather than of those that gave up because of it.
struct Renumbered {
    inner: Box<dyn Communicator>,
    /// The members' ranks in the world, by their ranks in the group.
    ranks: Vec<usize>,
    world: Aborter,
}

impl Renumbered {
    /// `inner` of `world`, its rank `i` being the world's `ranks[i]`.
    fn new(inner: Box<dyn Communicator>, ranks: Vec<usize>, world: Aborter) -> Self {
        Self { inner, ranks, world }
    }

    fn own_rank(&self) -> usize {
        self.ranks[self.inner.rank()]
    }

    /// Rewrites an error of the group with ranks of the world. An error of the world itself stays
    /// as it is.
    fn in_world(&self, error: CollectiveError) -> CollectiveError {
        if self.world.failure().as_ref() == Some(&error) {
            return error;
        }
        error.in_world(&self.ranks)
    }

    /// Ends the world with what a call failed with; returns the error that holds, the first one.
    #[cold]
    #[inline(never)]
    fn failed(&self, error: CollectiveError) -> CollectiveError {
        let error = self.in_world(error);
        let told = match &error {
            // Groups of a world do not end when a rank leaves the world in peace.
            CollectiveError::Left { .. } => {
                CollectiveError::Aborted { rank: self.own_rank(), reason: error.to_string() }
            }
            error => error.clone(),
        };
        self.world.close(told.clone());
        match self.world.failure() {
            None | Some(CollectiveError::Left { .. }) => error,
            Some(first) if first == told || self.blames_this(&first) => error,
            Some(first) => first,
        }
    }

    /// Whether a rank that waited for this one took it for the late one, while it waited itself.
    fn blames_this(&self, first: &CollectiveError) -> bool {
        matches!(first, CollectiveError::Late { ranks, .. } if *ranks == [self.own_rank()])
    }
}

impl Communicator for Renumbered {
    fusestep_collective::forward_calls! {
        this => this.inner;
        rank, world_size, set_context, recorder, shares_memory, device, control,
    }

    fn execute(&mut self, call: Call<'_>) -> Result<(), CollectiveError> {
        let done = self.inner.execute(call);
        done.map_err(|error| self.failed(error))
    }

    fn split(
        &mut self,
        membership: Option<Membership>,
    ) -> Result<Option<Box<dyn Communicator>>, CollectiveError> {
        let made = self.inner.split(membership);
        let made = made.map_err(|error| self.failed(error))?;
        Ok(made.map(|made| match made.world_size() {
            all if all == self.ranks.len() => {
                Box::new(Self::new(made, self.ranks.clone(), self.world.clone())) as _
            }
            _ => made,
        }))
    }

    /// The group's aborter, with ranks of the world.
    fn aborter(&self) -> Aborter {
        let (inner, world) = (self.inner.aborter(), self.world.clone());
        let seen = (self.inner.aborter(), self.ranks.clone());
        let last = self.ranks.iter().max().map_or(0, |last| last + 1);
        let in_group = |rank: usize| self.ranks.iter().position(|own| *own == rank);
        let back: Vec<usize> = (0..last).map(|rank| in_group(rank).unwrap_or(rank)).collect();
        Aborter::new(self.own_rank(), move |error| inner.close(error.in_world(&back))).seeing(
            move || {
                let error = seen.0.failure()?;
                if world.failure().as_ref() == Some(&error) {
                    return Some(error);
                }
                Some(error.in_world(&seen.1))
            },
        )
    }

    fn allocate(&mut self, len_bytes: usize) -> Result<HostMemory, CollectiveError> {
        let memory = self.inner.allocate(len_bytes);
        memory.map_err(|error| self.in_world(error))
    }

    fn reduce_update(
        &mut self,
        call: ReduceUpdate<'_>,
        work: &mut dyn FnMut(RankMemory<'_>),
    ) -> Result<(), CollectiveError> {
        let done = self.inner.reduce_update(call, work);
        done.map_err(|error| self.failed(error))
    }

    fn execute_on_device(&mut self, call: DeviceCall<'_>) -> Result<(), CollectiveError> {
        let done = self.inner.execute_on_device(call);
        done.map_err(|error| self.failed(error))
    }

    fn finish_on_device(&mut self) -> Result<(), CollectiveError> {
        let done = self.inner.finish_on_device();
        done.map_err(|error| match error {
            // A rank may leave once it has finished, while others still look.
            CollectiveError::Left { .. } => self.in_world(error),
            error => self.failed(error),
        })
    }

    fn failure(&self) -> Option<CollectiveError> {
        Some(self.in_world(self.inner.failure()?))
    }
}
