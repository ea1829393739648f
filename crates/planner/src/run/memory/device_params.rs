//! Whole parameters in a device's memory.

use std::ops::Range;

use fusestep_launch::{Backend, Buffer};
use fusestep_tensor::DeviceSliceMut;

#[cfg(doc)]
use crate::PlanError;
use crate::error::Result;

/// Whole parameters on a device, for as long as this value lives.
///
/// Dropping it gives memory of the device back, for which a driver may wait until all work there
/// has ended; [`Comms::use_again`](crate::Comms::use_again) keeps it for the next ones.
#[derive(Debug)]
pub struct DeviceParams {
    pub(crate) buffers: Vec<Box<dyn Buffer>>,
    /// Buffer of each parameter, and its bytes there.
    pub(crate) places: Vec<(usize, Range<usize>)>,
}

impl DeviceParams {
    /// The parameter that was asked for at this position, in the order of events: what reads it
    /// begins behind `ready`, and records `done`. `None` beyond the last one.
    pub fn slice_mut(&mut self, position: usize) -> Option<DeviceSliceMut<'_>> {
        let (buffer, range) = self.places.get(position)?;
        self.buffers[*buffer].device_mut()?.part(range.clone())
    }

    /// Copies a parameter to the host; waits for the device.
    ///
    /// # Errors
    /// [`PlanError::Backend`], also if `bytes` are more than the parameter has.
    ///
    /// # Panics
    /// If not so many were asked for.
    pub fn read(&self, backend: &dyn Backend, position: usize, bytes: &mut [u8]) -> Result<()> {
        let (buffer, range) = &self.places[position];
        Ok(backend.read(self.buffers[*buffer].as_ref(), range.start, bytes)?)
    }

    /// Bytes of all of them.
    pub fn len_bytes(&self) -> usize {
        self.places.iter().map(|(_, range)| range.len()).sum()
    }
}
