//! Pass `shard`: each rank updates, and keeps, only its part (ZeRO).

use std::num::NonZeroUsize;

use serde::Serialize;

use super::{ActsOn, Pass};
use crate::{Note, Ownership, Plan, PlanError, Verdict};

/// What ranks share out among each other.
///
/// # Source
/// Rajbhandari et al. 2020, arXiv:1910.02054.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default, Serialize)]
pub enum Zero {
    /// Nothing: every rank updates everything.
    #[default]
    Zero0,
    /// The optimizer's state and the update; gradients are all-reduced, parameters all-gathered after the update.
    Zero1,
    /// Gradients too: they are reduce-scattered.
    Zero2,
    /// Parameters too: they are gathered when they are needed.
    Zero3,
}

impl Zero {
    /// The stage as a number.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// The stage of this number.
    pub fn of(number: u8) -> Option<Self> {
        [Zero::Zero0, Zero::Zero1, Zero::Zero2, Zero::Zero3]
            .get(usize::from(number))
            .copied()
    }
}

/// Cuts the elements of every dtype into a shard for each rank; see [`Zero`] for the stages.
///
/// The bits are those of an update that is not sharded. Layer-wise rules need sums over whole tensors, so their shards hold whole
/// tensors, whatever ownership is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Shard {
    zero: Zero,
    ownership: Ownership,
    group: Option<NonZeroUsize>,
}

impl Shard {
    /// The stage, on shards of equal length.
    pub fn new(zero: Zero) -> Self {
        Self {
            zero,
            ownership: Ownership::Elements,
            group: None,
        }
    }

    /// Shares out among every `ranks` consecutive ranks in place of all: calls that gather parameters stay within such a group, and
    /// state takes a group's part of the memory and not the world's. Gradients are reduced within the groups first, then each
    /// shard's across them, so sums of more than one group differ by rounding from those of one. Needs
    /// [`crate::Comms::in_groups`].
    pub fn group(mut self, ranks: NonZeroUsize) -> Self {
        self.group = Some(ranks);
        self
    }

    /// Who gets what.
    pub fn ownership(mut self, ownership: Ownership) -> Self {
        self.ownership = ownership;
        self
    }
}

impl Pass for Shard {
    fn name(&self) -> &'static str {
        "shard"
    }

    fn acts_on(&self) -> ActsOn {
        ActsOn::Ranks
    }

    fn apply(&self, plan: &mut Plan) -> Result<(), PlanError> {
        if plan.ranks.zero != Zero::Zero0 {
            return Err(PlanError::PassTwice { pass: self.name() });
        }
        if self.zero == Zero::Zero0 {
            return Ok(());
        }
        let mut ownership = self.ownership;
        let first = plan.storages.iter().find_map(|spec| spec.members.first());
        let normed = match first {
            Some(&member) => plan.kernel_of(member)?.normed().is_some(),
            None => false,
        };
        if normed && ownership == Ownership::Elements {
            ownership = Ownership::Tensors;
            let reason = format!(
                "{} needs sums over whole tensors, so shards begin and end with tensors",
                plan.optimizer.name()
            );
            let note = Note::new(self.name(), Verdict::Split, reason);
            plan.notes.push(note);
        }
        (plan.ranks.zero, plan.ranks.ownership) = (self.zero, ownership);
        let what = match self.zero {
            Zero::Zero0 | Zero::Zero1 => "optimizer state",
            Zero::Zero2 => "optimizer state and gradients",
            Zero::Zero3 => "optimizer state, gradients and parameters",
        };
        plan.ranks.shard_group = self.group;
        let world = plan.ranks.topology.world;
        let among = self.group.map_or(world, NonZeroUsize::get);
        if among > world || !world.is_multiple_of(among) {
            return Err(PlanError::Topology {
                expected: format!("a world that is a multiple of a shard group's {among} ranks"),
                found: format!("{world} ranks"),
            });
        }
        let reason = format!(
            "{what} are shared out among {among} ranks{}",
            match world / among {
                1 => String::new(),
                groups => format!(", alike in {groups} groups"),
            }
        );
        let note = Note::new(self.name(), Verdict::Applied, reason);
        plan.notes.push(note);
        Ok(())
    }
}
