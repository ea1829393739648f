//! Library of NCCL as found at run time: its functions, loaded by name, and its error texts.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::path::Path;

use fusestep_collective::ReduceOp;
use fusestep_tensor::DType;
use libloading::Library;

use crate::options::version_text;
use crate::{MIN_VERSION, NcclError};

/// `ncclSuccess`.
pub(crate) const SUCCESS: c_int = 0;
/// `ncclInProgress`: a call that goes on while its caller does.
pub(crate) const IN_PROGRESS: c_int = 7;

/// `ncclComm_t`.
pub(crate) type Comm = *mut c_void;
/// `cudaStream_t`, which is the driver's `CUstream`.
pub(crate) type Stream = *mut c_void;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct UniqueId(pub(crate) [u8; 128]);

/// `ncclConfig_t` as of NCCL 2.14 and one field of 2.17. Its size and version tell newer versions
/// of NCCL which fields it lacks.
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
}

impl Config {
    /// Configuration of a communicator that does not block its callers.
    pub(crate) fn without_blocking() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: MIN_VERSION,
            blocking: 0,
            // `NCCL_CONFIG_UNDEF_INT`.
            cga_cluster_size: c_int::MIN,
        }
    }
}

/// Defines a table of functions of a library. The library is never unloaded, since it may have
/// threads of its own.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident {
        $($field:ident = $symbol:literal: fn($($argument:ty),*) -> $result:ty;)*
    }) => {
        $(#[$doc])*
        pub(crate) struct $table {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
            _library: std::mem::ManuallyDrop<libloading::Library>,
        }

        impl $table {
            fn find(
                library: libloading::Library,
                name: &std::path::Path,
            ) -> Result<Self, crate::NcclError> {
                $(
                    // SAFETY: the library's header declares the function with this type, which has
                    // not changed since the oldest version that is let in.
                    let $field = unsafe {
                        let symbol = $symbol.as_bytes();
                        library.get::<unsafe extern "C" fn($($argument),*) -> $result>(symbol)
                    };
                    let $field = *$field.map_err(|_| crate::NcclError::MissingSymbol {
                        library: name.display().to_string(),
                        symbol: $symbol,
                    })?;
                )*
                Ok(Self { $($field,)* _library: std::mem::ManuallyDrop::new(library) })
            }
        }
    };
}
pub(crate) use functions;

functions! {
    /// The functions of NCCL.
    Nccl {
        get_error_string = "ncclGetErrorString": fn(c_int) -> *const c_char;
        get_unique_id = "ncclGetUniqueId": fn(*mut UniqueId) -> c_int;
        init_rank = "ncclCommInitRankConfig":
            fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> c_int;
        finalize = "ncclCommFinalize": fn(Comm) -> c_int;
        destroy = "ncclCommDestroy": fn(Comm) -> c_int;
        abort = "ncclCommAbort": fn(Comm) -> c_int;
        async_error = "ncclCommGetAsyncError": fn(Comm, *mut c_int) -> c_int;
        group_start = "ncclGroupStart": fn() -> c_int;
        group_end = "ncclGroupEnd": fn() -> c_int;
        send = "ncclSend": fn(*const c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
        receive = "ncclRecv": fn(*mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
        all_reduce = "ncclAllReduce":
            fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
        reduce = "ncclReduce":
            fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Comm, Stream) -> c_int;
        broadcast = "ncclBroadcast":
            fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
        all_gather = "ncclAllGather":
            fn(*const c_void, *mut c_void, usize, c_int, Comm, Stream) -> c_int;
    }
}

impl Nccl {
    /// Loads NCCL and returns it with its version.
    pub(crate) fn load(path: &Path) -> Result<(Self, u32), NcclError> {
        let library = open(
            path,
            "install NCCL (Debian: libnccl2; pip: nvidia-nccl-cu12) and name its folder in \
             LD_LIBRARY_PATH",
        )?;
        let name = path.display().to_string();
        let version = {
            let symbol = "ncclGetVersion";
            // SAFETY: `ncclResult_t ncclGetVersion(int*)` in every version.
            let found = unsafe {
                library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(symbol.as_bytes())
            };
            let get =
                *found.map_err(|_| NcclError::MissingSymbol { library: name.clone(), symbol })?;
            let mut version = 0;
            // SAFETY: it writes one int.
            unsafe { get(&mut version) };
            u32::try_from(version).unwrap_or(0)
        };
        // The version is checked first: an old NCCL lacks some functions, and its age explains more
        // than a missing one.
        if version < MIN_VERSION {
            return Err(NcclError::OldLibrary {
                library: name,
                expected: version_text(MIN_VERSION),
                found: version_text(version),
            });
        }
        Ok((Self::find(ManuallyDrop::into_inner(library), path)?, version))
    }

    /// Turns a result code into an error with NCCL's text. `ncclInProgress` is no error.
    pub(crate) fn check(&self, code: c_int) -> Result<(), String> {
        match code {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(self.text(code)),
        }
    }

    pub(crate) fn text(&self, code: c_int) -> String {
        // SAFETY: it returns a static text for every code.
        let text = unsafe { CStr::from_ptr((self.get_error_string)(code)) };
        format!("NCCL error {code}, {}", text.to_string_lossy())
    }
}

impl std::fmt::Debug for Nccl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nccl").finish_non_exhaustive()
    }
}

/// Loads a library, which is not unloaded if something fails later.
pub(crate) fn open(path: &Path, remedy: &'static str) -> Result<ManuallyDrop<Library>, NcclError> {
    // SAFETY: loading runs the library's initialisers; NCCL's and the driver's are made for it. A
    // path other than theirs is the caller's to choose, as with the loader's own variables.
    let opened = unsafe { Library::new(path) };
    match opened {
        Ok(library) => Ok(ManuallyDrop::new(library)),
        Err(error) => Err(NcclError::MissingLibrary {
            library: path.display().to_string(),
            reason: error.to_string(),
            remedy,
        }),
    }
}

/// `ncclUint8`, the element type of all transfers.
pub(crate) const BYTES: c_int = 1;

/// NCCL's codes of a dtype and a reduction, if it has both.
pub(crate) fn names(dtype: DType, op: ReduceOp) -> Option<(c_int, c_int)> {
    let dtype = match dtype {
        DType::U8 => 1,
        DType::I32 => 2,
        DType::I64 => 4,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
        DType::U16 => return None,
    };
    let op = match op {
        ReduceOp::Sum => 0,
        ReduceOp::Prod => 1,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Average => 4,
        ReduceOp::Tree(_) => return None,
    };
    Some((dtype, op))
}
