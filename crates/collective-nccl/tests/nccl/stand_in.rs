//! What the stand-in for NCCL and the emulated driver can be told and asked.

use super::worlds::options;

pub(crate) const STALL: i32 = 1;
pub(crate) const ASYNC_ERROR: i32 = 2;

/// Has the stand-in misbehave until dropped.
pub(crate) struct Fault(libloading::Library);

impl Fault {
    /// `None` if the library is no stand-in.
    pub(crate) fn new(kind: i32, rank: i32, job: i32) -> Option<Self> {
        // SAFETY: the library is loaded already; the function takes three numbers.
        let library = unsafe { libloading::Library::new(options().nccl_library).ok()? };
        let fault = Self(library);
        fault.set(kind, rank, job).then_some(fault)
    }

    fn set(&self, kind: i32, rank: i32, job: i32) -> bool {
        // SAFETY: as above.
        unsafe {
            let set = self.0.get::<unsafe extern "C" fn(i32, i32, i32)>(b"standInFault");
            set.map(|set| set(kind, rank, job)).is_ok()
        }
    }

    /// NCCL communicators that nobody has given back.
    pub(crate) fn live(&self) -> i32 {
        // SAFETY: the function takes nothing and returns a number.
        unsafe {
            let live = self.0.get::<unsafe extern "C" fn() -> i32>(b"standInLive");
            live.map_or(0, |live| live())
        }
    }
}

impl Drop for Fault {
    fn drop(&mut self) {
        self.set(0, 0, 0);
    }
}

/// What the emulated driver has done since it was loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Allocations, frees, modules loaded and unloaded, functions looked up.
    pub(crate) made: [u64; 5],
    /// Calls that waited for all work of a device.
    pub(crate) waits: u64,
}

/// `None` if the driver does not count.
pub(crate) fn counts() -> Option<Counts> {
    let mut all = [0; 6];
    // SAFETY: the library is loaded already; the function writes six numbers.
    unsafe {
        let driver = libloading::Library::new(options().driver_library).ok()?;
        let count = driver.get::<unsafe extern "C" fn(*mut u64)>(b"emulatorCounts");
        count.ok()?(all.as_mut_ptr());
        // It stays loaded: communicators keep it.
        std::mem::forget(driver);
    }
    let [made @ .., waits] = all;
    Some(Counts { made, waits })
}
