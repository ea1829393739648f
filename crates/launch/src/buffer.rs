//! Memory that launches work on.

use std::any::Any;
use std::fmt;

use fusestep_tensor::DeviceSliceMut;

/// Memory of a backend: zeroed at allocation, aligned to 256 bytes.
pub trait Buffer: Send + fmt::Debug {
    /// Length in bytes.
    fn len_bytes(&self) -> usize;
    /// The bytes, if the host can read them in place.
    fn host(&self) -> Option<&[u8]>;
    /// The bytes, if the host can write them in place.
    fn host_mut(&mut self) -> Option<&mut [u8]>;
    /// The bytes of a device, for others that work on it, once they have been handed over
    /// ([`hand_over`](crate::DeviceStream::hand_over)); `None` before, and for memory of the host.
    fn device_mut(&mut self) -> Option<DeviceSliceMut<'_>> {
        None
    }
    /// The buffer as a value of any type, from which its backend gets back its own type.
    fn as_any(&self) -> &dyn Any;
    /// The buffer as a value of any type, from which its backend gets back its own type.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}
