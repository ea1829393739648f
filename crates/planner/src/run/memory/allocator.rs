//! Allocator of memory that calls move and of memory that they do not.

use fusestep_coalesce::HostMemory;
use fusestep_collective::Communicator;
use fusestep_launch::{Backend, Buffer};

use crate::error::Result;

pub(crate) struct Allocator<'a> {
    pub(crate) backend: &'a dyn Backend,
    /// Communicator that allocates memory that calls move, so that other ranks see it; without one
    /// the backend does.
    pub(crate) comm: Option<&'a mut dyn Communicator>,
}

impl Allocator<'_> {
    /// Memory of an arena that calls move, or one that they do not.
    pub(crate) fn arena(&mut self, len_bytes: usize, moves: bool) -> Result<Box<dyn Buffer>> {
        match &mut self.comm {
            Some(comm) if moves && self.backend.host().is_some() => {
                let memory: HostMemory = comm.allocate(len_bytes)?;
                Ok(Box::new(memory))
            }
            _ => Ok(self.backend.allocate(len_bytes)?),
        }
    }
}
