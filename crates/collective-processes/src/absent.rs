//! What stands in for the engine on systems that lack what it is made of.

use std::convert::Infallible;
use std::path::PathBuf;
use std::time::Duration;

use fusestep_collective::{
    Aborter, Call, CallContext, CollectiveError, Communicator, FlightRecorder, Membership,
};

use crate::{LaunchOptions, Launched, ProcessError, ProcessOptions, Rendezvous};

/// One rank of a group of processes on one machine; this system has none.
#[derive(Debug)]
pub struct ProcessCommunicator {
    never: Infallible,
}

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
    pub fn set_timeout(&mut self, _timeout: Duration) {
        match self.never {}
    }
}

impl Communicator for ProcessCommunicator {
    fn rank(&self) -> usize {
        match self.never {}
    }
    fn world_size(&self) -> usize {
        match self.never {}
    }
    fn execute(&mut self, _call: Call<'_>) -> Result<(), CollectiveError> {
        match self.never {}
    }
    fn split(
        &mut self,
        _membership: Option<Membership>,
    ) -> Result<Option<Box<dyn Communicator>>, CollectiveError> {
        match self.never {}
    }
    fn set_context(&mut self, _context: CallContext) {
        match self.never {}
    }
    fn aborter(&self) -> Aborter {
        match self.never {}
    }
    fn recorder(&self) -> &FlightRecorder {
        match self.never {}
    }
}

/// Starts all ranks and waits for them.
///
/// # Errors
/// Always: see [`ProcessError::NotHere`].
pub fn launch(_options: &LaunchOptions) -> std::io::Result<Launched> {
    Err(std::io::Error::other(ProcessError::NotHere))
}
