//! Runs saved and resumed: a state's own tensors as a file, and checkpoints of any number of ranks as a folder.

mod counts;
mod file;
mod folder;
mod lock;
mod other_ranks;
mod progress;
mod save;

pub use file::StateTensors;
pub use folder::{Manifest, ShardSpec, TensorSpec, WholeTensors};
pub use lock::FolderLock;
pub use progress::{OpenRun, OpenWindow};
