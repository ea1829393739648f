//! Modules, loaded once per stem, and their functions, looked up once per entry.

use std::ffi::CString;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cust::sys::{self, CUfunction, CUmodule, CUresult};
use fusestep_kernels::TABLE_BYTES;
use fusestep_launch::BackendError;

use crate::normed::Slots;
use crate::session::{Session, unavailable};
use crate::status::check;

/// Words of an argument block.
const BLOCK_WORDS: usize = TABLE_BYTES / 8;

/// What launches reuse: functions and the argument bytes.
#[derive(Debug)]
pub(crate) struct Kernels {
    session: Arc<Session>,
    functions: Vec<Function>,
    modules: Vec<Module>,
    /// The argument block; words, because the driver copies it for parameters that are aligned to
    /// 8 bytes.
    pub(crate) block: Box<[u64; BLOCK_WORDS]>,
    /// Where sums over tensors go.
    pub(crate) slots: Slots,
    /// Entries for resident tables, each its own.
    placed_slots: Vec<Arc<Mutex<Slots>>>,
}

#[derive(Debug)]
struct Module {
    stem: &'static str,
    handle: CUmodule,
}

#[derive(Debug)]
struct Function {
    entry: &'static str,
    handle: CUfunction,
}

// SAFETY: module and function handles belong to the context, not to a thread; the driver locks them
// itself.
unsafe impl Send for Kernels {}

impl Kernels {
    pub(crate) fn new(session: &Arc<Session>) -> Self {
        Self {
            session: Arc::clone(session),
            functions: Vec::new(),
            modules: Vec::new(),
            block: Box::new([0; BLOCK_WORDS]),
            slots: Slots::default(),
            placed_slots: Vec::new(),
        }
    }

    /// Slots of a resident table, kept by it.
    pub(crate) fn place_slots(
        &mut self,
        count: u64,
    ) -> Result<(Arc<Mutex<Slots>>, u64), BackendError> {
        let mut slots = Slots::default();
        let address = slots.at_least(&self.session, count)?;
        let slots = Arc::new(Mutex::new(slots));
        self.forget_slots()?;
        self.placed_slots.push(Arc::clone(&slots));
        Ok((slots, address))
    }

    /// Tensors skipped since the last call; waits for the device.
    pub(crate) fn take_skipped(&mut self) -> Result<u64, BackendError> {
        let mut skipped = self.slots.take_skipped()?;
        for slots in &self.placed_slots {
            skipped += slots
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take_skipped()?;
        }
        self.forget_slots()?;
        Ok(skipped)
    }

    /// Lets go of slots whose tables are gone, and keeps their counts.
    fn forget_slots(&mut self) -> Result<(), BackendError> {
        for slots in self
            .placed_slots
            .extract_if(.., |slots| Arc::strong_count(slots) == 1)
        {
            let mut slots = slots.lock().unwrap_or_else(PoisonError::into_inner);
            self.slots.count_skipped(slots.take_skipped()?);
        }
        Ok(())
    }

    /// The function of an entry; the context must be current.
    ///
    /// Only the first call for an entry allocates.
    pub(crate) fn function(
        &mut self,
        stem: &'static str,
        entry: &'static str,
    ) -> Result<CUfunction, BackendError> {
        let mut known = self.functions.iter();
        if let Some(function) = known.find(|function| function.entry == entry) {
            return Ok(function.handle);
        }
        let entries = fusestep_kernels::entries(stem);
        if entries.is_some_and(|entries| !entries.contains(&entry)) {
            return Err(unavailable(format!(
                "expected a device entry `{entry}`, found none in the PTX of `{stem}`; use the cpu \
                 backend"
            )));
        }
        let module = self.module(stem)?;
        let c_name = CString::new(entry)
            .map_err(|_| unavailable(format!("the entry `{entry}` holds a zero byte")))?;
        let mut handle = ptr::null_mut();
        // SAFETY: the module is loaded until `self` is dropped; the name ends in 0.
        let status = unsafe { sys::cuModuleGetFunction(&mut handle, module, c_name.as_ptr()) };
        check(status, || format!("looking up the entry `{entry}`"))?;
        self.functions.push(Function { entry, handle });
        Ok(handle)
    }

    fn module(&mut self, stem: &'static str) -> Result<CUmodule, BackendError> {
        if let Some(module) = self.modules.iter().find(|module| module.stem == stem) {
            return Ok(module.handle);
        }
        let ptx = fusestep_kernels::ptx(stem).ok_or_else(|| {
            let known: Vec<_> = fusestep_kernels::stems().collect();
            unavailable(format!(
                "there is no PTX of `{stem}`, only of {}; use the cpu backend",
                known.join(", ")
            ))
        })?;
        let text = CString::new(ptx)
            .map_err(|_| unavailable(format!("the PTX of `{stem}` holds a zero byte")))?;
        let mut handle = ptr::null_mut();
        // SAFETY: the image ends in 0, as PTX must, and is copied by the call.
        let status = unsafe { sys::cuModuleLoadData(&mut handle, text.as_ptr().cast()) };
        check(status, || {
            let version = ptx.lines().find(|line| line.starts_with(".version"));
            let hint = match status {
                CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => "; a newer driver reads it",
                _ => "",
            };
            format!(
                "loading the PTX of `{stem}` ({}{hint})",
                version.unwrap_or("no version")
            )
        })?;
        self.modules.push(Module { stem, handle });
        Ok(handle)
    }

    /// Unloads the modules; the context must be current and nothing that was launched may still
    /// run.
    fn unload(&mut self) {
        self.functions.clear();
        for module in self.modules.drain(..) {
            // SAFETY: each handle comes from a successful load and is unloaded once; its functions
            // are forgotten above.
            let _ = unsafe { sys::cuModuleUnload(module.handle) };
        }
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // Modules must not go while their code runs. After a fault of the device nothing runs, and
        // nothing can be unloaded either.
        if self.session.synchronize().is_ok() {
            self.unload();
        }
    }
}
