//! What stands in for the engine in a build without the feature `mpi`.

use std::convert::Infallible;

use fusestep_collective::{
    Aborter, Call, CallContext, CollectiveError, Communicator, FlightRecorder, Membership,
};

use crate::{MpiError, MpiOptions, launched_ranks};

/// One rank of an MPI job; this build leaves MPI out, so that there is no value of this type.
#[derive(Debug)]
pub struct MpiCommunicator {
    never: Infallible,
}

impl MpiCommunicator {
    /// All processes of the job.
    ///
    /// # Errors
    /// [`MpiError::NotBuilt`], always: the feature `mpi` is off.
    pub fn world(_options: &MpiOptions) -> Result<Self, MpiError> {
        Err(MpiError::NotBuilt {
            launched: launched_ranks(),
        })
    }

    /// How long this rank waits for others from the next call on.
    pub fn set_timeout(&mut self, _timeout: std::time::Duration) {
        match self.never {}
    }

    /// What the MPI calls itself.
    pub fn library_version(&self) -> &str {
        match self.never {}
    }
}

impl Communicator for MpiCommunicator {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_mpi_says_what_would_work_and_that_it_was_launched() {
        let error = MpiCommunicator::world(&MpiOptions::default()).unwrap_err();
        assert!(error.to_string().starts_with(
            "mpi: this build leaves MPI out; build with the feature `mpi` (it takes an MPI with \
             mpicc, and libclang), or use ranks that are threads"
        ));
        let launched = MpiError::NotBuilt { launched: Some(4) }.to_string();
        assert!(
            launched.ends_with(
                "; 4 processes were started together, and each would take itself for the whole"
            ),
            "{launched}"
        );
    }
}
