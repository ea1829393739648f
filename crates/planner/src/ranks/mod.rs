//! A step of many ranks: what each rank holds, what it sends and when.
//!
//! A [`RankPlan`] is an ordinary [`crate::Plan`] of what one rank updates, whole tensors or pieces of them, and around it the
//! buckets of gradients, the cut of every dtype's elements into shards and the calls between ranks.

mod average;
mod broadcast;
mod broadcast_groups;
mod bucket;
mod checkpoint;
mod comms;
mod cost;
mod cost_bytes;
mod cost_page;
mod counts;
mod flat;
mod folder;
mod gather;
mod lock;
mod merge;
mod micro_step;
mod norm;
mod other_ranks;
mod plan;
mod prefetch;
mod progress;
mod ready;
mod run;
mod slots;
mod state;
mod topology;
mod update_norms;
mod words;

pub use broadcast_groups::BroadcastGroup;
pub use bucket::{Bucket, Span, groups_by_layer};
pub use comms::Comms;
pub use cost::{CostModel, Event, EventKind, RankSummary};
pub use flat::{Flat, Held, Ownership, Piece, owners_greedy_even, owners_in_use_order};
pub use folder::{Manifest, ShardSpec, TensorSpec, WholeTensors};
pub use gather::GatheredParams;
pub use lock::FolderLock;
pub use plan::RankPlan;
pub use prefetch::PendingGather;
pub use progress::{OpenRun, OpenWindow};
pub use run::RankReport;
pub use state::RankState;
pub use topology::Topology;

pub(crate) use plan::RankOptions;
