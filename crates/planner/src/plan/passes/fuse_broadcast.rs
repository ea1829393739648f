//! Pass `fuse_broadcast`: updated parameters of one owner in one call.

use crate::error::Result;
use crate::plan::note::Verdict;
use crate::plan::passes::rewrite::{ActsOn, Rewrite, refuse_twice};
use crate::plan::settings::{Ownership, ZeroStage};
use crate::plan::value::Plan;

/// Brings updated parameters from the ranks that own them to all ranks in calls of at most this
/// many bytes, each of one owner and bucket; a longer tensor is a call of its own.
///
/// It is for ZeRO stages 1 and 2 with whole tensors owned ([`Ownership::Tensors`]), where parts may
/// differ so much in length that the all-gather which they have otherwise waits for the longest.
/// With parts of equal length it refuses, and the all-gather stays. The same cap holds for
/// [`crate::Run::broadcast_parameters`].
///
/// # Source
/// PaddlePaddle, `sharding/utils.py` (`fuse_opt_broadcast_param_ops`), 2023: there in MB, 32 by
/// default.
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

impl Rewrite for FuseBroadcast {
    const NAME: &'static str = "fuse_broadcast";
    const ACTS_ON: ActsOn = ActsOn::Fusion;

    fn apply(&self, plan: &mut Plan) -> Result<()> {
        refuse_twice(Self::NAME, plan.broadcast_cap_bytes.replace(self.cap_bytes).is_some())?;
        let refusal = match (plan.zero, plan.ownership) {
            _ if plan.topology.world == 1 => Some("a world of 1 rank has nobody to tell"),
            (ZeroStage::None, _) => Some("every rank updates all parameters itself"),
            (ZeroStage::Three, _) => {
                Some("parameters stay in their shards until a layer asks for them")
            }
            (_, Ownership::Elements) => {
                Some("parts of equal length come together in one all-gather for each bucket")
            }
            _ => None,
        };
        if let Some(reason) = refusal {
            plan.note(Self::NAME, Verdict::Skipped, reason);
        }
        Ok(())
    }
}
