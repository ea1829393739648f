//! GPU of a rank: its context, its kernels, the communicators on it, and memory to be freed once no
//! call is under way.

use std::ffi::{CStr, c_int};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::NcclError;
use crate::driver::{Address, Context, Driver};
use crate::handle::Handle;
use crate::kernel::{Capability, Kernels};

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`.
const CAPABILITY_MAJOR: c_int = 75;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR`.
const CAPABILITY_MINOR: c_int = 76;

/// A GPU with its primary context, which other users of the GPU in this process share.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) driver: Driver,
    context: Context,
    handle: c_int,
    /// Kernels, or the reason why they cannot be loaded, which the first call that needs a kernel
    /// returns.
    kernels: Result<Kernels, String>,
    calls: Mutex<Calls>,
    communicators: Mutex<Vec<Weak<Handle>>>,
    pub(crate) index: usize,
    pub(crate) name: String,
    pub(crate) uuid: [u8; 16],
}

// SAFETY: contexts and modules may be used from any thread that makes them current, and the
// driver's functions from all at once.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// GPUs that this process has open, by driver and index. All communicators of a GPU share one
/// entry.
static OPEN: Mutex<Vec<(PathBuf, usize, Weak<Device>)>> = Mutex::new(Vec::new());

/// Guard that makes the device's context the calling thread's. Dropping it restores the context
/// from before.
pub(crate) struct Entered<'a> {
    device: &'a Device,
    before: Context,
}

impl Device {
    /// Opens GPU `index` for `rank`, with its kernels, or returns the device that another
    /// communicator has opened.
    pub(crate) fn open(library: &Path, index: usize, rank: usize) -> Result<Arc<Self>, NcclError> {
        let find = |open: &mut Vec<(PathBuf, usize, Weak<Self>)>| {
            open.retain(|(.., device)| device.strong_count() > 0);
            let mut known = open.iter();
            let same = known.find(|(path, known, _)| path == library && *known == index);
            same.and_then(|(.., device)| device.upgrade())
        };
        if let Some(device) = find(&mut locked(&OPEN)) {
            return Ok(device);
        }
        // The lock is not held here: loading takes a while, and other ranks open GPUs of their own.
        let made = Arc::new(Self::make(library, index, rank)?);
        let mut open = locked(&OPEN);
        if let Some(device) = find(&mut open) {
            // Two threads have come at once.
            return Ok(device);
        }
        open.push((library.to_owned(), index, Arc::downgrade(&made)));
        Ok(made)
    }

    fn make(library: &Path, index: usize, rank: usize) -> Result<Self, NcclError> {
        let driver = Driver::load(library)?;
        let call =
            |call: &'static str, code: c_int| driver.check(code).map_err(NcclError::of_call(call));
        let (mut count, mut handle) = (0, 0);
        let (mut name, mut uuid) = ([0; 256], [0; 16]);
        let (mut major, mut minor) = (0, 0);
        let mut context = std::ptr::null_mut();
        // SAFETY: each function writes the one value, or as many bytes, as its argument has room
        // for; `handle` is a device that the driver has named.
        let text = unsafe {
            call("cuDeviceGetCount", (driver.device_count)(&mut count))?;
            let count = usize::try_from(count).unwrap_or(0);
            if index >= count {
                return Err(NcclError::NoSuchDevice { rank, device: index, count });
            }
            let device = (driver.device_get)(&mut handle, index as c_int);
            call("cuDeviceGet", device)?;
            let named = (driver.device_name)(name.as_mut_ptr(), 255, handle);
            call("cuDeviceGetName", named)?;
            call("cuDeviceGetUuid", (driver.device_uuid)(&mut uuid, handle))?;
            for (value, attribute) in
                [(&mut major, CAPABILITY_MAJOR), (&mut minor, CAPABILITY_MINOR)]
            {
                let asked = (driver.device_attribute)(value, attribute, handle);
                call("cuDeviceGetAttribute", asked)?;
            }
            let retained = (driver.context_retain)(&mut context, handle);
            call("cuDevicePrimaryCtxRetain", retained)?;
            CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
        };
        let mut device = Self {
            name: text,
            driver,
            context,
            handle,
            kernels: Err(String::new()),
            calls: Mutex::default(),
            communicators: Mutex::default(),
            index,
            uuid,
        };
        let capability = Capability { major: major.unsigned_abs(), minor: minor.unsigned_abs() };
        let entered = device.enter();
        let loaded = entered.and_then(|_entered| Kernels::load(&device.driver, capability));
        device.kernels = loaded;
        Ok(device)
    }

    /// Makes the device's context the calling thread's.
    pub(crate) fn enter(&self) -> Result<Entered<'_>, String> {
        let mut before = std::ptr::null_mut();
        // SAFETY: it writes one pointer; the context lives as long as this device.
        unsafe {
            self.driver.check((self.driver.context_current)(&mut before))?;
            self.driver.check((self.driver.context_set)(self.context))?;
        }
        Ok(Entered { device: self, before })
    }

    /// Makes a call of the driver in the device's context.
    pub(crate) fn call(&self, call: impl FnOnce(&Driver) -> c_int) -> Result<(), String> {
        let _entered = self.enter()?;
        self.driver.check(call(&self.driver))
    }

    /// The kernels, which were loaded when the device was opened.
    pub(crate) fn kernels(&self) -> Result<&Kernels, String> {
        self.kernels.as_ref().map_err(Clone::clone)
    }

    /// Counts a call as under way until the result is dropped. Memory dropped meanwhile is freed
    /// then, if no other call is under way.
    pub(crate) fn begin_call(self: &Arc<Self>) -> UnderWay {
        locked(&self.calls).under_way += 1;
        UnderWay(Arc::clone(self))
    }

    /// Frees memory at once, or when no call is under way. The driver would wait for all work of
    /// the device, and a call's work waits for other ranks.
    pub(crate) fn give_back(&self, address: Address) {
        let mut calls = locked(&self.calls);
        calls.dropped.push(address);
        self.give_back_dropped(&mut calls);
    }

    /// Keeps all memory from now on until the process ends.
    pub(crate) fn give_up(&self) {
        locked(&self.calls).gave_up = true;
    }

    /// Adds a communicator to those of the device.
    pub(crate) fn add(&self, handle: &Arc<Handle>) {
        let mut all = locked(&self.communicators);
        all.retain(|known| known.strong_count() > 0);
        all.push(Arc::downgrade(handle));
    }

    /// Communicators of the device that have not been destroyed or aborted.
    pub(crate) fn not_ended(&self) -> Vec<Arc<Handle>> {
        let known: Vec<_> = locked(&self.communicators).iter().filter_map(Weak::upgrade).collect();
        known.into_iter().filter(|known| !known.is_ended()).collect()
    }

    fn give_back_dropped(&self, calls: &mut Calls) {
        if calls.under_way > 0 || calls.gave_up || calls.dropped.is_empty() {
            return;
        }
        // If the context cannot be entered it is gone, and its memory with it.
        let _entered = self.enter();
        for address in calls.dropped.drain(..) {
            // SAFETY: allocated by `DeviceBuffer::allocate`, freed once. Operations on it have
            // ended: no call is under way, nor can one begin under this lock.
            unsafe { (self.driver.free)(address) };
        }
    }
}

/// The calls under way on a device, and memory that waits for their end.
#[derive(Debug, Default)]
struct Calls {
    under_way: usize,
    dropped: Vec<Address>,
    /// Whether work on the device does not end, for which the driver would wait for ever.
    gave_up: bool,
}

/// Guard of a call that is under way.
#[derive(Debug)]
pub(crate) struct UnderWay(Arc<Device>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut calls = locked(&self.0.calls);
        calls.under_way -= 1;
        self.0.give_back_dropped(&mut calls);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
        if locked(&self.calls).gave_up {
            return;
        }
        if let Ok(kernels) = &self.kernels
            && let Ok(_entered) = self.enter()
        {
            kernels.unload(&self.driver);
        }
        // SAFETY: retained once, by `make`; memory, streams and events on it hold the device.
        unsafe { (self.driver.context_release)(self.handle) };
    }
}
