//! One GPU: its context, and memory on it.

use std::ffi::{CStr, c_int};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use crate::NcclError;
use crate::driver::{Address, Context, Driver};
use crate::kernel::Kernels;
use crate::library::Stream;

/// A GPU with its primary context, which other users of the GPU in this process share.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) driver: Driver,
    context: Context,
    handle: c_int,
    /// Loaded when a reduction first needs it, or why it cannot be.
    kernels: OnceLock<Result<Kernels, String>>,
    pub(crate) index: usize,
    pub(crate) name: String,
    pub(crate) uuid: [u8; 16],
}

// SAFETY: contexts and modules may be used from any thread that makes them current, and the
// driver's functions from all at once.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// While it lives, the device's context is the calling thread's; then the one from before is again.
pub(crate) struct Entered<'a> {
    device: &'a Device,
    before: Context,
}

impl Device {
    /// Opens GPU `index` for `rank`.
    pub(crate) fn open(library: &Path, index: usize, rank: usize) -> Result<Self, NcclError> {
        let driver = Driver::load(library)?;
        let call = |call: &'static str, code: c_int| {
            driver
                .check(code)
                .map_err(|reason| NcclError::Call { call, reason })
        };
        let (mut count, mut handle) = (0, 0);
        // SAFETY: each function writes the one value, or as many bytes, as its argument has room
        // for; `handle` is a device that the driver has named.
        unsafe {
            call("cuDeviceGetCount", (driver.device_count)(&mut count))?;
            let count = usize::try_from(count).unwrap_or(0);
            if index >= count {
                return Err(NcclError::NoSuchDevice {
                    rank,
                    device: index,
                    count,
                });
            }
            call(
                "cuDeviceGet",
                (driver.device_get)(&mut handle, index as c_int),
            )?;
            let (mut name, mut uuid) = ([0; 256], [0; 16]);
            call(
                "cuDeviceGetName",
                (driver.device_name)(name.as_mut_ptr(), 255, handle),
            )?;
            call("cuDeviceGetUuid", (driver.device_uuid)(&mut uuid, handle))?;
            let mut context = std::ptr::null_mut();
            call(
                "cuDevicePrimaryCtxRetain",
                (driver.context_retain)(&mut context, handle),
            )?;
            Ok(Self {
                name: CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned(),
                driver,
                context,
                handle,
                kernels: OnceLock::new(),
                index,
                uuid,
            })
        }
    }

    /// Makes the context the calling thread's.
    pub(crate) fn enter(&self) -> Result<Entered<'_>, String> {
        let mut before = std::ptr::null_mut();
        // SAFETY: it writes one pointer; the context lives as long as this device.
        unsafe {
            self.driver
                .check((self.driver.context_current)(&mut before))?;
            self.driver.check((self.driver.context_set)(self.context))?;
        }
        Ok(Entered {
            device: self,
            before,
        })
    }

    /// The kernels of this device, whose context is current.
    pub(crate) fn kernels(&self) -> Result<&Kernels, String> {
        let loaded = self.kernels.get_or_init(|| Kernels::load(&self.driver));
        loaded.as_ref().map_err(Clone::clone)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // SAFETY: it was current before. If its owner has destroyed it since, the driver says so,
        // and there is nothing to do.
        unsafe { (self.device.driver.context_set)(self.before) };
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Some(Ok(kernels)) = self.kernels.get()
            && let Ok(_entered) = self.enter()
        {
            kernels.unload(&self.driver);
        }
        // SAFETY: retained once, by `open`; memory, streams and events on it hold the device.
        unsafe { (self.driver.context_release)(self.handle) };
    }
}

/// Memory on the GPU of a communicator, given back when dropped. Lengths are in bytes.
#[derive(Debug)]
pub struct DeviceBuffer {
    pub(crate) device: Arc<Device>,
    pub(crate) address: Address,
    len_bytes: usize,
    owner: Owner,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    This,
    Caller,
}

impl DeviceBuffer {
    pub(crate) fn allocate(device: &Arc<Device>, len_bytes: usize) -> Result<Self, String> {
        let _entered = device.enter()?;
        let mut address = 0;
        // SAFETY: it writes one address. The driver refuses a length of zero, which gets memory
        // nobody uses.
        let code = unsafe { (device.driver.allocate)(&mut address, len_bytes.max(256)) };
        device.driver.check(code)?;
        Ok(Self {
            device: Arc::clone(device),
            address,
            len_bytes,
            owner: Owner::This,
        })
    }

    /// Memory that the caller has, in the primary context of the same GPU.
    ///
    /// # Safety
    /// `address` leads to `len_bytes` bytes of that GPU, which live as long as the buffer and are
    /// used by nothing else during calls.
    pub(crate) unsafe fn borrow(device: &Arc<Device>, address: Address, len_bytes: usize) -> Self {
        Self {
            device: Arc::clone(device),
            address,
            len_bytes,
            owner: Owner::Caller,
        }
    }

    /// Its length.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Where it lies on the GPU, a `CUdeviceptr`.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Fills it.
    ///
    /// # Errors
    /// The driver's words, or both lengths if they differ.
    pub fn upload(&mut self, bytes: &[u8]) -> Result<(), NcclError> {
        self.require(bytes.len())?;
        let copied = self.put(0, bytes, std::ptr::null_mut());
        copied.and_then(|()| self.finish()).map_err(failed)
    }

    /// Reads it.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    pub fn download(&self, bytes: &mut [u8]) -> Result<(), NcclError> {
        self.require(bytes.len())?;
        let copied = self.get(0, bytes, std::ptr::null_mut());
        copied.and_then(|()| self.finish()).map_err(failed)
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

    /// Puts host bytes at `start`, in the order of the stream. The bytes have been read when this
    /// returns: they lie in pageable memory, from which the driver copies first.
    pub(crate) fn put(&self, start: usize, bytes: &[u8], stream: Stream) -> Result<(), String> {
        if bytes.is_empty() {
            return Ok(());
        }
        assert!(
            start + bytes.len() <= self.len_bytes.max(256),
            "upload within the buffer"
        );
        let _entered = self.device.enter()?;
        // SAFETY: both ranges are live and long enough, as asserted.
        let code = unsafe {
            (self.device.driver.upload)(
                self.address + start as u64,
                bytes.as_ptr().cast(),
                bytes.len(),
                stream,
            )
        };
        self.device.driver.check(code)
    }

    /// Reads bytes from `start` on, in the order of the stream; they have arrived when this
    /// returns.
    pub(crate) fn get(&self, start: usize, bytes: &mut [u8], stream: Stream) -> Result<(), String> {
        if bytes.is_empty() {
            return Ok(());
        }
        assert!(
            start + bytes.len() <= self.len_bytes.max(256),
            "download within the buffer"
        );
        let _entered = self.device.enter()?;
        // SAFETY: both ranges are live and long enough, as asserted; the host's is borrowed until
        // the stream is done with it.
        unsafe {
            let code = (self.device.driver.download)(
                bytes.as_mut_ptr().cast(),
                self.address + start as u64,
                bytes.len(),
                stream,
            );
            self.device.driver.check(code)?;
            self.device
                .driver
                .check((self.device.driver.stream_synchronize)(stream))
        }
    }

    /// Waits for copies on the default stream.
    fn finish(&self) -> Result<(), String> {
        let _entered = self.device.enter()?;
        let driver = &self.device.driver;
        // SAFETY: the null stream is the context's default one.
        driver.check(unsafe { (driver.stream_synchronize)(std::ptr::null_mut()) })
    }
}

fn failed(reason: String) -> NcclError {
    NcclError::Call {
        call: "copy between host and GPU",
        reason,
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.owner == Owner::This
            && let Ok(_entered) = self.device.enter()
        {
            // SAFETY: allocated by `allocate`, freed once. Operations on it have ended, or their
            // communicator was aborted.
            unsafe { (self.device.driver.free)(self.address) };
        }
    }
}
