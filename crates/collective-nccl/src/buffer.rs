//! Memory on a GPU.

use std::sync::Arc;

use fusestep_tensor::{DeviceOrder, DeviceSliceMut};

use crate::NcclError;
use crate::device::Device;
use crate::driver::Address;
use crate::library::Stream;

/// Memory on the GPU of a communicator, freed when dropped. Lengths are in bytes.
///
/// The driver frees memory once all work of the GPU has ended. So a buffer that is dropped while
/// any communicator of the GPU makes a call is freed when no call is under way. Allocation is not
/// put off and may wait for calls under way. Allocate before calls on communication streams begin:
/// another rank may not have begun the call that an allocation waits for.
#[derive(Debug)]
pub struct DeviceBuffer {
    pub(crate) device: Arc<Device>,
    pub(crate) address: Address,
    len_bytes: usize,
}

/// Least length of an allocation: the driver refuses zero, so an empty buffer has memory that
/// nobody uses.
const LEAST_BYTES: usize = 256;

/// Default stream of the context.
const DEFAULT_STREAM: Stream = std::ptr::null_mut();

impl DeviceBuffer {
    pub(crate) fn allocate(device: &Arc<Device>, len_bytes: usize) -> Result<Self, String> {
        let (mut address, room) = (0, len_bytes.max(LEAST_BYTES));
        // SAFETY: it writes one address.
        device.call(|driver| unsafe { (driver.allocate)(&mut address, room) })?;
        Ok(Self { device: Arc::clone(device), address, len_bytes })
    }

    /// Length of the buffer.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Address of the buffer on the GPU, a `CUdeviceptr`.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The whole buffer, for a call. Earlier copies to it are complete, since
    /// [`upload`](Self::upload) waits for them.
    pub fn slice_mut(&mut self) -> DeviceSliceMut<'_> {
        // SAFETY: allocated in the GPU's primary context and freed when `self` is dropped, which is
        // borrowed meanwhile; no copy is under way between methods.
        unsafe {
            DeviceSliceMut::new(
                self.device.index as u32,
                self.address,
                self.len_bytes,
                DeviceOrder::HostWaits,
            )
        }
    }

    /// Fills the buffer from host bytes.
    ///
    /// # Errors
    /// [`NcclError::Call`] with the driver's words, or with both lengths if they differ.
    pub fn upload(&mut self, bytes: &[u8]) -> Result<(), NcclError> {
        self.require(bytes.len())?;
        let copied = self.put(0, bytes, DEFAULT_STREAM);
        copied.and_then(|()| self.finish()).map_err(failed)
    }

    /// Copies the buffer to host bytes.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    pub fn download(&self, bytes: &mut [u8]) -> Result<(), NcclError> {
        self.require(bytes.len())?;
        self.get(0, bytes, DEFAULT_STREAM).map_err(failed)
    }

    fn require(&self, len_bytes: usize) -> Result<(), NcclError> {
        if len_bytes == self.len_bytes {
            Ok(())
        } else {
            Err(failed(format!(
                "expected {} bytes as on the GPU, found {len_bytes}",
                self.len_bytes
            )))
        }
    }

    /// Copies host bytes to the buffer at `start`, in the order of the stream. The bytes have been
    /// read when this returns, since the driver copies pageable memory first.
    pub(crate) fn put(&self, start: usize, bytes: &[u8], stream: Stream) -> Result<(), String> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.assert_within(start, bytes.len());
        let (to, from) = (self.address + start as u64, bytes.as_ptr().cast());
        // SAFETY: both ranges are live and long enough, as asserted.
        self.device.call(|driver| unsafe { (driver.upload)(to, from, bytes.len(), stream) })
    }

    /// Copies bytes from `start` on to the host, in the order of the stream. The bytes have arrived
    /// when this returns.
    pub(crate) fn get(&self, start: usize, bytes: &mut [u8], stream: Stream) -> Result<(), String> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.assert_within(start, bytes.len());
        let (to, from) = (bytes.as_mut_ptr().cast(), self.address + start as u64);
        // SAFETY: both ranges are live and long enough, as asserted; the host's is borrowed until
        // the stream is done with it.
        self.device.call(|driver| unsafe {
            match (driver.download)(to, from, bytes.len(), stream) {
                0 => (driver.stream_synchronize)(stream),
                refused => refused,
            }
        })
    }

    /// Asserts that a copy stays within the buffer; a longer one would write over other memory.
    fn assert_within(&self, start: usize, len_bytes: usize) {
        let room = self.len_bytes.max(LEAST_BYTES);
        assert!(start + len_bytes <= room, "a copy within the buffer");
    }

    /// Waits for copies on the default stream.
    fn finish(&self) -> Result<(), String> {
        // SAFETY: the null stream is the context's default one.
        self.device.call(|driver| unsafe { (driver.stream_synchronize)(DEFAULT_STREAM) })
    }
}

fn failed(reason: String) -> NcclError {
    NcclError::of_call("copy between host and GPU")(reason)
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        self.device.give_back(self.address);
    }
}
