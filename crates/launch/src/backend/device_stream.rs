//! The role of a device's stream: the order of what is enqueued there, by us and by others.

use crate::{BackendError, Buffer, Graph};

/// Stream of a backend on a device: work there is done in the order in which it is enqueued.
pub trait DeviceStream {
    /// The device's number.
    fn ordinal(&self) -> u32;

    /// Makes a buffer ready for others that work on the device. Their work on it begins behind all
    /// work that is enqueued here by now ([`Buffer::device_mut`]).
    ///
    /// # Errors
    /// [`BackendError::ForeignBuffer`]; [`BackendError::Device`].
    fn hand_over(&self, buffer: &mut dyn Buffer) -> Result<(), BackendError>;

    /// Lets work that is enqueued here from now on wait for the work of others on a buffer that was
    /// handed over. The host does not wait.
    ///
    /// # Errors
    /// As [`DeviceStream::hand_over`].
    fn take_back(&self, buffer: &mut dyn Buffer) -> Result<(), BackendError>;

    /// Records the launches that `enqueue` enqueues, instead of running them. The graph keeps the
    /// memory that they refer to.
    ///
    /// # Errors
    /// `enqueue`'s own error; [`BackendError::Device`], for example if `enqueue` waits for the
    /// device.
    fn capture(
        &self,
        enqueue: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Box<dyn Graph>, BackendError>;
}
