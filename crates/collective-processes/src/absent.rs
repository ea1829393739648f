//! Stand-ins for the engine, on systems other than Linux, which lack the calls that it is made of.

use std::time::Duration;

use fusestep_collective::{Communicator, Solo};

use crate::{LaunchOptions, Launched, ProcessError, ProcessOptions, Rendezvous};

/// One rank of a group of processes on one machine; this system has none, and nobody makes one.
#[derive(Debug)]
pub struct ProcessCommunicator(Solo);

impl ProcessCommunicator {
    /// All processes that a launcher has started.
    ///
    /// # Errors
    /// [`ProcessError::NotHere`], always.
    pub fn world(_options: &ProcessOptions) -> Result<Self, ProcessError> {
        Err(ProcessError::NotHere)
    }

    /// The processes that pass the same session.
    ///
    /// # Errors
    /// [`ProcessError::NotHere`], always.
    pub fn join(_place: &Rendezvous, _options: &ProcessOptions) -> Result<Self, ProcessError> {
        Err(ProcessError::NotHere)
    }

    /// How long this rank waits for others from the next call on.
    pub fn set_timeout(&mut self, _timeout: Duration) {}
}

impl Communicator for ProcessCommunicator {
    fusestep_collective::forward_calls! {
        this => this.0;
        rank, world_size, execute, split, set_context, aborter, recorder,
    }
}

/// Starts all ranks and waits for them.
///
/// # Errors
/// Always: see [`ProcessError::NotHere`].
pub fn launch(_options: &LaunchOptions) -> std::io::Result<Launched> {
    Err(std::io::Error::other(ProcessError::NotHere))
}

/// Whether this process is the first of its start to say a text: always, where none is launched.
pub fn says_first(_text: &str) -> bool {
    true
}

/// Does nothing: nobody starts a guard here.
pub fn guard() {}
