//! Control communicator of processes that have nothing in common but a folder.

mod engine;
mod files;
mod meeting;

use std::time::Duration;

use fusestep_collective::{CallOptions, Communicator, Ranked, Timeout, forward_calls};

use engine::InFolder;
use files::Files;
pub use meeting::Meeting;

/// A control communicator for processes that no launcher has started together. Ranks leave each
/// other files in a folder that all of them see. Made by [`Meeting::join`].
///
/// It carries what a control communicator must: all-gather, broadcast, transfers, barriers and
/// splits. It moves no gradients: reductions and the rest are refused.
///
/// # Cost
/// Some files per call and a look at the folder every 5 ms at most; `mpirun` is the faster way to
/// start processes.
#[derive(Debug)]
pub struct FolderControl(Ranked<InFolder>);

impl FolderControl {
    fn new(files: Files, world_size: usize, timeout: Duration) -> Self {
        let options =
            CallOptions { timeout: Timeout::new(timeout), recorded_calls: 256, dump_folder: None };
        Self(Ranked::on(InFolder::new(files, world_size), options))
    }
}

impl Communicator for FolderControl {
    forward_calls! {
        this => this.0;
        rank, world_size, execute, split, set_context, aborter, recorder, failure,
    }
}
