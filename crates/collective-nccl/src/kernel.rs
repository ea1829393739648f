//! The sum in rank order on the GPU: `kernels/rank_order.cu`, loaded and launched.

use std::ffi::{CString, c_char, c_uint, c_void};

use fusestep_collective::ReduceOp;
use fusestep_tensor::DType;

use crate::driver::{Address, Driver, Function, Module};
use crate::link::Link;

/// The kernel's file name and the start of its entries' names.
const STEM: &str = "rank_order";

/// Threads of a block.
const BLOCK_THREADS: c_uint = 512;

/// Most blocks of a launch, some for each multiprocessor of a large GPU; a thread goes on where the
/// grid ends.
const GRID_BLOCKS: usize = 1024;

/// Bytes that a thread takes at a time, and what received elements are aligned to so that it may.
pub(crate) const PACK_BYTES: usize = 16;

/// An entry for each dtype, in the order of [`DType::ALL`], each a module of its own. They are
/// unloaded with their device's context.
#[derive(Debug)]
pub(crate) struct Kernels {
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    module: Module,
    function: Function,
}

/// Where the elements of all ranks lie, and where their reduction goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts {
    /// Those of this rank.
    pub(crate) own: Address,
    /// Those of the others, one rank after the other; the own ones are not read.
    pub(crate) received: Address,
    /// Bytes from one rank's to the next one's.
    pub(crate) stride_bytes: usize,
    /// The result, which may lie upon `own` or another rank's.
    pub(crate) result: Address,
    /// Bytes of each part.
    pub(crate) len_bytes: usize,
    /// Number of parts.
    pub(crate) ranks: usize,
    /// This rank.
    pub(crate) own_rank: usize,
}

/// As the kernel reads it.
#[repr(C)]
struct Arguments {
    own: u64,
    received: u64,
    stride_bytes: u64,
    result: u64,
    numel: u64,
    ranks: u32,
    own_rank: u32,
    op: u32,
    reserved: u32,
}

impl Kernels {
    /// Loads all entries into the current context of a device of this compute capability: machine
    /// code where there is some that the driver takes, else PTX.
    ///
    /// Looking a function up loads it, if the driver put that off; so no call waits for a load.
    pub(crate) fn load(driver: &Driver, capability: (u32, u32)) -> Result<Self, String> {
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

    fn function(&self, dtype: DType) -> Result<Function, String> {
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
    fn load(driver: &Driver, capability: (u32, u32), name: &str) -> Result<Self, String> {
        let code = fusestep_kernels::machine_code(name, capability);
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
                        "{reason}, for the kernel that sums in rank order (machine code for {}.{}: \
                         {refusal}); expected a driver that reads PTX ISA 8.1 (530 or newer), or \
                         `Reduction::Engine`",
                        capability.0, capability.1
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

impl Link {
    /// Reduces the parts in rank order, in the order of the stream, as
    /// `fusestep_collective::reduce_in_rank_order` does on the host.
    ///
    /// All addresses are multiples of an element's length.
    pub(crate) fn reduce(&self, parts: &Parts, dtype: DType, op: ReduceOp) -> Result<(), String> {
        let numel = parts.len_bytes / dtype.len_bytes();
        if numel == 0 {
            return Ok(());
        }
        let function = self.device.kernels()?.function(dtype)?;
        let mut arguments = Arguments {
            own: parts.own,
            received: parts.received,
            stride_bytes: parts.stride_bytes as u64,
            result: parts.result,
            numel: numel as u64,
            ranks: u32::try_from(parts.ranks).map_err(|_| "more ranks than 32 bits count")?,
            own_rank: u32::try_from(parts.own_rank).map_err(|_| "a rank beyond 32 bits")?,
            op: code(op),
            reserved: 0,
        };
        let packs = parts.len_bytes.div_ceil(PACK_BYTES);
        let blocks = packs.div_ceil(BLOCK_THREADS as usize).min(GRID_BLOCKS) as c_uint;
        let mut parameters = [(&raw mut arguments).cast::<c_void>()];
        // SAFETY: the entry takes one block of these arguments, which is copied before the call
        // returns. They lead to device memory of the stated lengths that the call holds
        // until its mark was reached or the communicator aborted.
        self.device.call(|driver| unsafe {
            (driver.launch)(
                function,
                blocks,
                1,
                1,
                BLOCK_THREADS,
                1,
                1,
                0,
                self.stream,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }
}

/// `rank_order::Op` of the kernel.
fn code(op: ReduceOp) -> u32 {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Average => 1,
        ReduceOp::Prod => 2,
        ReduceOp::Max => 3,
        ReduceOp::Min => 4,
    }
}
