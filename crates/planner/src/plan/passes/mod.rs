//! Passes: each rewrites a plan and notes what it did and why.

pub(crate) mod accumulation;
pub(crate) mod averaging;
pub(crate) mod broadcasts;
pub(crate) mod buckets;
pub(crate) mod clip;
pub(crate) mod coalesce_gradients;
pub(crate) mod conflicts;
pub(crate) mod distributed;
pub(crate) mod fuse_all_reduce;
pub(crate) mod fuse_broadcast;
pub(crate) mod fuse_optimizer;
pub(crate) mod fuse_reduce_into_update;
pub(crate) mod in_backward;
pub(crate) mod loss_scaling;
pub(crate) mod norm;
pub(crate) mod order;
pub(crate) mod pass;
pub(crate) mod rewrite;
pub(crate) mod shard;
pub(crate) mod share_out;
pub(crate) mod tables;
pub(crate) mod update_norms;

pub use clip::ClipByGlobalNorm;
pub use coalesce_gradients::CoalesceGradients;
pub use distributed::Distributed;
pub use fuse_all_reduce::FuseAllReduce;
pub use fuse_broadcast::FuseBroadcast;
pub use fuse_optimizer::FuseOptimizer;
pub use fuse_reduce_into_update::FuseReduceIntoUpdate;
pub use in_backward::UpdateInBackward;
pub use loss_scaling::LossScaling;
pub use pass::Pass;
pub use shard::Shard;
pub use update_norms::UpdateNorms;
