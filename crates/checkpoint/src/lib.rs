#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod agree;
mod averaged;
mod begun;
mod checkpoints;
mod commits;
mod converted;
mod converted_state;
mod counts;
mod fits;
mod flight;
mod generation;
mod lists;
mod load;
mod manifest;
mod names;
mod open_run;
mod other_ranks;
mod own_values;
mod place;
mod refusal;
mod saves;
mod settings;
mod shard_file;
mod shards;
mod snapshot;
mod state_file;
mod state_sums;
mod values;
mod verified;
mod writer;

pub use checkpoints::{Checkpoints, Remembered};
pub use converted::{KeptState, convert};
pub use converted_state::convert_state;
pub use load::load;
pub use manifest::{Manifest, ShardSpec, TensorSpec};
pub use names::MODEL_FILE;
pub use open_run::{OpenRun, OpenWindow};
pub use place::{CheckpointFolder, FolderLock};
pub use saves::{Saved, Saves, save};
pub use shards::MAX_SHARDS;
pub use state_file::{StateTensors, load_state, save_state};
pub use values::WholeTensors;
pub use verified::Verified;

/// Types and shapes of tensors, by name.
pub type WholeSpecs = std::collections::BTreeMap<String, TensorSpec>;

/// Result of a function of this crate that can fail.
type Result<T, E = fusestep_planner::PlanError> = std::result::Result<T, E>;
