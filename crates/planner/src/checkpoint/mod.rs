//! Runs saved and resumed: a state's own tensors as a file, and checkpoints of any number of ranks
//! as a folder.

mod agree;
mod begun;
mod behind;
mod checkpoints;
mod commits;
mod counts;
pub(crate) mod file;
mod file_sums;
mod fits;
mod generation;
mod lists;
mod manifest;
mod names;
mod other_ranks;
mod place;
mod progress;
mod refusal;
pub(crate) mod save;
pub(crate) mod settings;
mod shard_file;
mod shards;
mod snapshot;
mod values;
mod verified;
mod writer;

pub use behind::{Saved, Saves};
pub use checkpoints::Checkpoints;
pub use checkpoints::Remembered;
use counts::Progress;
pub use file::StateTensors;
pub use manifest::{Manifest, ShardSpec, TensorSpec};
pub use place::CheckpointFolder;
pub use place::FolderLock;
pub use progress::{OpenRun, OpenWindow};
pub use shards::MAX_SHARDS;
pub use snapshot::{BorrowedParams, RunToLoad, RunToSave};
pub use values::WholeTensors;
pub use verified::Verified;
