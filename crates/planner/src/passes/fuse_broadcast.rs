//! Pass `fuse_broadcast`: updated parameters of one owner in one call.

use super::{ActsOn, Pass};
use crate::{Plan, PlanError};

/// Brings updated parameters from the ranks that own them to all ranks in calls of at most this many bytes, each of one owner and
/// dtype; a longer tensor is a call of its own.
///
/// It is for ZeRO stages 1 and 2 with whole tensors owned, where shards may differ so much in length that the all-gather which
/// they have otherwise waits for the longest. With shards of equal length it refuses, and the all-gather stays. The same cap holds
/// for [`crate::RankPlan::broadcast_params`].
///
/// # Source
/// PaddlePaddle, `sharding/utils.py` (`fuse_opt_broadcast_param_ops`), 2023: there in MB, 32 by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FuseBroadcast {
    cap_bytes: u64,
}

impl Default for FuseBroadcast {
    fn default() -> Self {
        Self::of_bytes(32 << 20)
    }
}

impl FuseBroadcast {
    /// Calls of at most this many bytes.
    pub fn of_bytes(cap_bytes: u64) -> Self {
        Self { cap_bytes }
    }
}

impl Pass for FuseBroadcast {
    fn name(&self) -> &'static str {
        "fuse_broadcast"
    }

    fn acts_on(&self) -> ActsOn {
        ActsOn::Ranks
    }

    fn apply(&self, plan: &mut Plan) -> Result<(), PlanError> {
        match plan.ranks.broadcast_cap_bytes.replace(self.cap_bytes) {
            Some(_) => Err(PlanError::PassTwice { pass: self.name() }),
            None => Ok(()),
        }
    }
}
