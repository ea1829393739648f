//! Runs saved and resumed: a state's own tensors as a file, and checkpoints of any number of ranks
//! as a folder.

mod agree;
mod begun;
mod behind;
mod checkpoints;
mod counts;
pub(crate) mod file;
mod file_sums;
mod fits;
mod generation;
mod manifest;
mod other_ranks;
mod place;
mod progress;
pub(crate) mod save;
mod settings;
mod shard_file;
mod shards;
mod snapshot;
mod values;
mod writer;

pub use behind::{Saved, Saves};
pub use checkpoints::Checkpoints;
pub use checkpoints::Remembered;
pub use file::StateTensors;
pub use manifest::{Manifest, ShardSpec, TensorSpec};
pub use place::CheckpointFolder;
pub use place::FolderLock;
pub use progress::{OpenRun, OpenWindow};
pub use shards::{MAX_SHARDS, WholeTensors};
pub use snapshot::{BorrowedParams, RunToSave};
pub use values::Verified;
