//! Runs saved and resumed: a state's own tensors as a file, and checkpoints of any number of ranks
//! as a folder.

mod counts;
mod file;
mod generation;
mod lock;
mod manifest;
mod other_ranks;
mod place;
mod progress;
mod save;
mod shards;
mod values;

pub use file::StateTensors;
pub use lock::FolderLock;
pub use manifest::{Manifest, ShardSpec, TensorSpec};
pub use place::CheckpointFolder;
pub use progress::{OpenRun, OpenWindow};
pub use shards::{MAX_SHARDS, WholeTensors};
