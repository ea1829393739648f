//! Pass `shard`: each rank updates, and keeps, only its part (ZeRO).

use std::num::NonZeroUsize;

use fusestep_tensor::counted;

use crate::error::{PlanError, Result};
use crate::plan::note::Verdict;
use crate::plan::passes::rewrite::{ActsOn, Rewrite, refuse_twice};
use crate::plan::settings::{Ownership, ZeroStage};
use crate::plan::stage::{Gather, Reduced, Stage};
use crate::plan::value::Plan;

/// Cuts every bucket into a part for each rank; see [`ZeroStage`] for what a rank keeps of the
/// others' parts.
///
/// The bits are those of an update that is not sharded, for every rule: sums over whole tensors are
/// exchanged.
#[derive(Clone, Copy, Debug)]
pub struct Shard {
    zero: ZeroStage,
    ownership: Ownership,
    group: Option<NonZeroUsize>,
}

impl Shard {
    /// The stage, on shards of equal length.
    pub fn new(zero: ZeroStage) -> Self {
        Self { zero, ownership: Ownership::Elements, group: None }
    }

    /// Shares out among every `ranks` consecutive ranks in place of all: calls that gather
    /// parameters stay within such a group, and state takes a group's part of the memory and
    /// not the world's. Gradients are reduced within the groups first, then each shard's across
    /// them, so sums of more than one group differ by rounding from those of one. Needs
    /// [`crate::Comms::in_groups`].
    pub fn group(mut self, ranks: NonZeroUsize) -> Self {
        self.group = Some(ranks);
        self
    }

    /// Says where shards end.
    pub fn ownership(mut self, ownership: Ownership) -> Self {
        self.ownership = ownership;
        self
    }
}

impl Rewrite for Shard {
    const NAME: &'static str = "shard";
    const ACTS_ON: ActsOn = ActsOn::Ranks;

    fn apply(&self, plan: &mut Plan) -> Result<()> {
        refuse_twice(Self::NAME, plan.zero != ZeroStage::None)?;
        if self.zero == ZeroStage::None {
            return Ok(());
        }
        let world = plan.topology.world;
        let among = self.group.map_or(world, NonZeroUsize::get);
        if among > world || !world.is_multiple_of(among) {
            return Err(PlanError::Topology {
                expected: format!("a world that is a multiple of a shard group's {among} ranks"),
                found: format!(
                    "{}; groups of {} work, or leave the group out",
                    counted(world as u64, "rank"),
                    divisors(world)
                ),
            });
        }
        (plan.zero, plan.ownership, plan.shard_group) = (self.zero, self.ownership, among);
        for stage in &mut plan.stages {
            if let Stage::Reduce(reduce) = stage {
                reduce.result = Reduced::Part;
            }
        }
        if world > 1 && self.zero != ZeroStage::Three {
            let gathers = (0..plan.buckets.len())
                .map(|bucket| Stage::Gather(Gather { bucket, broadcasts: Vec::new() }));
            plan.stages.extend(gathers);
        }
        if world == 1 {
            plan.note(Self::NAME, Verdict::Skipped, "one rank has everything");
            return Ok(());
        }
        let what = match self.zero {
            ZeroStage::None | ZeroStage::One => "optimizer state is",
            ZeroStage::Two => "optimizer state and gradients are",
            ZeroStage::Three => "optimizer state, gradients and parameters are",
        };
        let groups = match world / among {
            1 => String::new(),
            groups => format!(", alike in {groups} groups"),
        };
        let among = counted(among as u64, "rank");
        let reason = format!("{what} shared out among {among}{groups}");
        plan.note(Self::NAME, Verdict::Applied, reason);
        Ok(())
    }
}

/// The divisors of a number of ranks, in words.
fn divisors(world: usize) -> String {
    let all = (1..=world).filter(|among| world.is_multiple_of(*among));
    let all: Vec<String> = all.map(|among| among.to_string()).collect();
    let (last, others) = all.split_last().map_or(("", &[][..]), |(last, rest)| (last, rest));
    if others.is_empty() { last.to_owned() } else { format!("{} or {last}", others.join(", ")) }
}
