//! The closed list of passes.

use crate::error::Result;
use crate::plan::lanes::Lanes;
use crate::plan::passes::rewrite::{ActsOn, Rewrite};
use crate::plan::passes::{
    ClipByGlobalNorm, CoalesceGradients, Distributed, FuseAllReduce, FuseBroadcast, FuseOptimizer,
    FuseReduceIntoUpdate, LossScaling, Shard, UpdateInBackward, UpdateNorms,
};
use crate::plan::settings::{GradientAccumulation, LocalSgd};
use crate::plan::value::Plan;

macro_rules! passes {
    ($($(#[doc = $doc:literal])* $pass:ident,)*) => {
        /// A rewrite of a plan: how a step runs, never its bits. Only [`ClipByGlobalNorm`],
        /// [`LossScaling`], [`GradientAccumulation`], [`Lanes`] and [`LocalSgd`] add to the
        /// arithmetic.
        ///
        /// A pass writes a [`crate::Note`] for everything it does, splits, skips or refuses. A
        /// refusal is no error: the plan stays as it was and says why.
        ///
        /// The list is closed, since each pass relies on what the others leave of a plan.
        #[derive(Clone, Debug)]
        #[non_exhaustive]
        pub enum Pass {
            $($(#[doc = $doc])* $pass($pass),)*
        }

        $(impl From<$pass> for Pass {
            fn from(pass: $pass) -> Self {
                Self::$pass(pass)
            }
        })*

        impl Pass {
            /// The part of a plan that the pass rewrites.
            pub(crate) fn acts_on(&self) -> ActsOn {
                match self {
                    $(Self::$pass(_) => $pass::ACTS_ON,)*
                }
            }

            /// Rewrites a plan.
            ///
            /// # Errors
            /// As [`Rewrite::apply`].
            pub(crate) fn rewrite(&self, plan: &mut Plan) -> Result<()> {
                match self {
                    $(Self::$pass(pass) => pass.apply(plan),)*
                }
            }
        }
    };
}

passes! {
    /// One list of gradients for tensors of one kind.
    CoalesceGradients,
    /// One launch for tensors of one kernel and size.
    FuseOptimizer,
    /// Slices of tensors, each rank's own.
    Distributed,
    /// A limit on the norm of all gradients together.
    ClipByGlobalNorm,
    /// A loss scale, and steps that are skipped.
    LossScaling,
    /// Norms of updates.
    UpdateNorms,
    /// Sums over micro-steps.
    GradientAccumulation,
    /// Sums in the order of the global batch.
    Lanes,
    /// Averages of parameters in place of reductions.
    LocalSgd,
    /// State, gradients and parameters that ranks share out.
    Shard,
    /// Buckets of gradients, one call each.
    FuseAllReduce,
    /// Many tensors to a broadcast.
    FuseBroadcast,
    /// Reduction and update in one pass over memory.
    FuseReduceIntoUpdate,
    /// Updates while gradients come.
    UpdateInBackward,
}
