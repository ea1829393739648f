//! Kernel of reductions in rank order, `kernels/rank_order.cu`: loaded.

use std::ffi::{CString, c_char};

use fusestep_tensor::DType;

use crate::driver::{Address, Driver, Function, Module};

/// File name of the kernel, and the start of its entries' names.
const STEM: &str = "rank_order";

/// Bytes that a thread reads at a time, to which each rank's received elements are aligned.
pub(crate) const PACK_BYTES: usize = 16;

/// Compute capability of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capability {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

/// Entries of the kernel, one for each dtype in the order of [`DType::ALL`]. Each is a module of
/// its own, unloaded before its device's context is released.
#[derive(Debug)]
pub(crate) struct Kernels {
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    module: Module,
    function: Function,
}

/// Addresses of all ranks' elements and of their reduction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts {
    /// Address of this rank's elements.
    pub(crate) own: Address,
    /// Address of other ranks' elements, one rank after the other. This rank's place among them is
    /// not read.
    pub(crate) received: Address,
    /// Bytes from one rank's elements to the next rank's.
    pub(crate) stride_bytes: usize,
    /// Address of the result, which may be `own` or the place of a rank's received elements.
    pub(crate) result: Address,
    /// Bytes of each part.
    pub(crate) len_bytes: usize,
    /// Number of parts.
    pub(crate) ranks: usize,
    /// Number of this rank.
    pub(crate) own_rank: usize,
}

impl Kernels {
    /// Loads all entries into the current context of a device of this compute capability. An entry
    /// is machine code if the driver takes it, else PTX.
    ///
    /// Functions are looked up here, too: a driver may put off loading until then, and no call
    /// should wait for it.
    pub(crate) fn load(driver: &Driver, capability: Capability) -> Result<Self, String> {
        let mut loaded = Self { entries: Vec::with_capacity(DType::ALL.len()) };
        for dtype in DType::ALL {
            match Entry::load(driver, capability, &format!("{STEM}_{dtype}")) {
                Ok(entry) => loaded.entries.push(entry),
                Err(reason) => {
                    loaded.unload(driver);
                    return Err(reason);
                }
            }
        }
        Ok(loaded)
    }

    /// The entry for a dtype.
    pub(crate) fn function(&self, dtype: DType) -> Result<Function, String> {
        let place = DType::ALL.into_iter().position(|known| known == dtype);
        let entry = place.and_then(|place| self.entries.get(place));
        let entry = entry.ok_or_else(|| format!("no sum in rank order of {dtype}"))?;
        Ok(entry.function)
    }

    /// Unloads the modules; their context is current.
    pub(crate) fn unload(&self, driver: &Driver) {
        for entry in &self.entries {
            // SAFETY: loaded by `load`, unloaded once. Launches have ended, or their communicator
            // was aborted.
            unsafe { (driver.module_unload)(entry.module) };
        }
    }
}

impl Entry {
    fn load(driver: &Driver, capability: Capability, name: &str) -> Result<Self, String> {
        let Capability { major, minor } = capability;
        let code = fusestep_kernels::machine_code(name, (major, minor));
        let code = code.ok_or_else(|| "there is none".to_owned());
        let assembled = code.and_then(|code| {
            // SAFETY: a whole file of machine code, as the driver reads without its length.
            unsafe { load_module(driver, code.image.as_ptr().cast()) }
        });
        let module = match assembled {
            Ok(module) => module,
            Err(refusal) => {
                let ptx = fusestep_kernels::entry_ptx(name);
                let ptx = ptx.ok_or_else(|| format!("no PTX of `{name}`"))?;
                let text = zero_ended(ptx)?;
                // SAFETY: the image ends in 0, as PTX must.
                let loaded = unsafe { load_module(driver, text.as_ptr()) };
                loaded.map_err(|reason| {
                    format!(
                        "{reason}, for the kernel that sums in rank order (machine code for \
                         {major}.{minor}: {refusal}); expected a driver that reads PTX ISA 8.1 \
                         (530 or newer), or `Reduction::Engine`"
                    )
                })?
            }
        };
        let (name, mut function) = (zero_ended(name.to_owned())?, std::ptr::null_mut());
        // SAFETY: the module is loaded; the name ends in 0; it writes one handle.
        let code = unsafe { (driver.module_function)(&mut function, module, name.as_ptr()) };
        match driver.check(code) {
            Ok(()) => Ok(Self { module, function }),
            Err(reason) => {
                // SAFETY: loaded above, and nobody has it.
                unsafe { (driver.module_unload)(module) };
                Err(reason)
            }
        }
    }
}

/// # Safety
/// `image` is PTX that ends in 0, or a whole file of machine code.
unsafe fn load_module(driver: &Driver, image: *const c_char) -> Result<Module, String> {
    let mut module = std::ptr::null_mut();
    // SAFETY: the caller's; the image has been read when the call returns, which writes one handle.
    let code = unsafe { (driver.module_load)(&mut module, image.cast()) };
    driver.check(code).map(|()| module)
}

fn zero_ended(text: String) -> Result<CString, String> {
    CString::new(text).map_err(|_| "expected text without a zero byte, found one".to_owned())
}
