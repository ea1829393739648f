//! The trait of backends, which own memory and run launches, and its roles.

mod device_stream;
mod device_sums;
mod host_launches;
mod launches;
mod memory;
mod tables;

use bytemuck::Zeroable;

pub use self::device_stream::DeviceStream;
pub use self::device_sums::DeviceSums;
pub use self::host_launches::HostLaunches;
pub use self::launches::Launches;
pub use self::memory::Memory;
pub use self::tables::Tables;
use crate::{BackendError, Buffer, ControlBlock};

/// Owner of memory that runs launches there. Roles that not every backend has are asked for by
/// [`Backend::host`] and [`Backend::device`].
///
/// The bits of the result are the same on every backend.
pub trait Backend: Memory + Launches {
    /// The backend's launches in the host's memory; `None` if it works elsewhere.
    fn host(&self) -> Option<&dyn HostLaunches> {
        None
    }

    /// The backend with its roles on a device; `None` if it works on none.
    fn device(&self) -> Option<&dyn DeviceBackend> {
        None
    }
}

/// Backend on a device: one that has every role there.
pub trait DeviceBackend: Backend + DeviceStream + DeviceSums + Tables {}

impl<T: Backend + DeviceStream + DeviceSums + Tables> DeviceBackend for T {}

impl ControlBlock {
    /// Copies the block from a backend's memory; waits for what was enqueued before.
    ///
    /// # Errors
    /// As [`Memory::read`].
    pub fn read(backend: &dyn Backend, buffer: &dyn Buffer) -> Result<Self, BackendError> {
        let mut block = Self::zeroed();
        backend.read(buffer, 0, bytemuck::bytes_of_mut(&mut block))?;
        Ok(block)
    }

    /// Copies the block into a backend's memory.
    ///
    /// # Errors
    /// As [`Memory::write`].
    pub fn write(
        &self,
        backend: &dyn Backend,
        buffer: &mut dyn Buffer,
    ) -> Result<(), BackendError> {
        backend.write(buffer, 0, bytemuck::bytes_of(self))
    }
}
