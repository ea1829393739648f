//! What stands in for the engine in a build without the feature `nccl`.

use std::convert::Infallible;

use fusestep_collective::{
    Aborter, Call, CallContext, CollectiveError, Communicator, FlightRecorder, Membership,
};

use crate::{NcclError, NcclOptions};

/// One rank of a group of GPUs; this build leaves NCCL out, so that there is no value of this type.
#[derive(Debug)]
pub struct NcclCommunicator {
    never: Infallible,
}

impl NcclCommunicator {
    /// A rank on GPU `device`.
    ///
    /// # Errors
    /// [`NcclError::NotBuilt`], always: the feature `nccl` is off.
    pub fn new(
        _control: Box<dyn Communicator>,
        _device: usize,
        _options: &NcclOptions,
    ) -> Result<Self, NcclError> {
        Err(NcclError::NotBuilt)
    }

    /// The version of NCCL.
    pub fn library_version(&self) -> String {
        match self.never {}
    }
}

impl Communicator for NcclCommunicator {
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
    use fusestep_collective::Solo;

    #[test]
    fn a_build_without_nccl_says_what_would_work() {
        let made = NcclCommunicator::new(Box::new(Solo::new()), 0, &NcclOptions::default());
        let text = made.unwrap_err().to_string();
        assert!(
            text.starts_with("nccl: this build leaves NCCL out; build with the feature `nccl`"),
            "{text}"
        );
    }
}
