//! An entry as the driver has loaded it: a module of its own, so that none is compiled or kept that
//! nobody launches.

use std::ffi::{CString, c_void};
use std::fmt;
use std::ptr;

use cust::sys::{self, CUfunction, CUmodule, CUresult};
use fusestep_launch::BackendError;

use crate::Result;
use crate::session::{Session, unavailable};
use crate::status::{check, describe};

/// Kind of code that the driver has loaded for a kernel's entry point: machine code or PTX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryCode {
    /// Machine code, assembled for this device or an earlier one of its kind.
    Machine {
        /// The device, as `ptxas` names it: `sm_90`.
        target: &'static str,
    },
    /// PTX of the entry alone, which the driver compiled, or found among what it has compiled.
    Ptx,
}

impl fmt::Display for EntryCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine { target } => write!(f, "machine code for {target}"),
            Self::Ptx => f.write_str("PTX"),
        }
    }
}

/// One entry in the device's memory.
#[derive(Debug)]
pub(crate) struct LoadedEntry {
    pub(crate) entry: &'static str,
    pub(crate) function: CUfunction,
    pub(crate) code: EntryCode,
    module: CUmodule,
}

impl LoadedEntry {
    /// Loads an entry of the kernel `stem`: machine code where there is some for the device and the
    /// driver takes it, else PTX. The session's context must be current.
    ///
    /// # Errors
    /// If there is no such kernel or entry, or the driver refuses its code.
    pub(crate) fn load(
        session: &Session,
        stem: &'static str,
        entry: &'static str,
    ) -> Result<Self, BackendError> {
        let ptx = match fusestep_kernels::entry_ptx(entry) {
            Some(ptx) => ptx,
            None => return Err(missing(stem, entry)),
        };
        let (module, code) = match load_machine_code(session, entry) {
            Ok(loaded) => loaded,
            Err(refusal) => (load_ptx(entry, &ptx, &refusal)?, EntryCode::Ptx),
        };
        let mut loaded = Self { entry, function: ptr::null_mut(), code, module };
        match loaded.look_up() {
            Ok(()) => Ok(loaded),
            Err(error) => {
                loaded.unload();
                Err(error)
            }
        }
    }

    fn look_up(&mut self) -> Result<()> {
        let name = zero_ended(self.entry, self.entry)?;
        // SAFETY: the module is loaded until `self` is unloaded; the name ends in 0; the call
        // writes one handle.
        let status =
            unsafe { sys::cuModuleGetFunction(&mut self.function, self.module, name.as_ptr()) };
        check(status, || format!("looking up the entry `{}` in its {}", self.entry, self.code))
    }

    /// Unloads it; the context must be current and nothing that was launched may still run.
    pub(crate) fn unload(self) {
        // SAFETY: the handle comes from a successful load and goes with `self`.
        let _ = unsafe { sys::cuModuleUnload(self.module) };
    }
}

/// Loads machine code for the device. The error is a clause that says why there is none, for the
/// text of a later error of its PTX.
fn load_machine_code(session: &Session, entry: &str) -> Result<(CUmodule, EntryCode), String> {
    // The driver's own variable by which programs are made to use their PTX.
    if std::env::var_os("CUDA_FORCE_PTX_JIT").is_some_and(|value| value == "1") {
        return Err("CUDA_FORCE_PTX_JIT asks for it".to_owned());
    }
    let (major, minor) = session.info.compute_capability;
    let code = fusestep_kernels::machine_code(entry, (major, minor));
    let code = code.ok_or_else(|| format!("there is no machine code for {major}.{minor}"))?;
    let mut module = ptr::null_mut();
    // SAFETY: the image is a whole file of machine code, as the driver reads without its length: a
    // test of fusestep-kernels looks at each.
    let status = unsafe { load(&mut module, code.image.as_ptr().cast()) };
    let target = code.target;
    match status {
        CUresult::CUDA_SUCCESS => Ok((module, EntryCode::Machine { target })),
        refused => Err(format!(
            "its machine code for {target} was refused with code {}: {}",
            refused as i32,
            describe(refused)
        )),
    }
}

/// Loads the text of one entry. `refusal` says why there is no machine code.
fn load_ptx(entry: &str, ptx: &str, refusal: &str) -> Result<CUmodule, BackendError> {
    let text = zero_ended(entry, ptx)?;
    let mut module = ptr::null_mut();
    // SAFETY: the image ends in 0, as PTX must.
    let status = unsafe { load(&mut module, text.as_ptr().cast()) };
    check(status, || {
        let version = ptx.lines().find(|line| line.starts_with(".version"));
        let hint = match status {
            CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => "; a newer driver reads it",
            _ => "",
        };
        format!(
            "loading the PTX of `{entry}` ({}{hint}; {refusal})",
            version.unwrap_or("no version")
        )
    })?;
    Ok(module)
}

/// # Safety
/// `image` is PTX that ends in 0, or a whole file of machine code.
unsafe fn load(module: &mut CUmodule, image: *const c_void) -> CUresult {
    // SAFETY: the caller's; the call copies the image and writes one handle.
    unsafe { sys::cuModuleLoadData(module, image) }
}

/// The error of an entry that does not exist; it names what there is instead.
fn missing(stem: &str, entry: &str) -> BackendError {
    if fusestep_kernels::ptx(stem).is_some() {
        return unavailable(format!(
            "expected a device entry `{entry}`, found none in the PTX of `{stem}`; use the cpu \
             backend"
        ));
    }
    let known: Vec<_> = fusestep_kernels::stems().collect();
    unavailable(format!(
        "there is no PTX of `{stem}`, only of {}; use the cpu backend",
        known.join(", ")
    ))
}

fn zero_ended(entry: &str, text: &str) -> Result<CString, BackendError> {
    CString::new(text).map_err(|_| unavailable(format!("the text of `{entry}` holds a zero byte")))
}
