#![cfg_attr(feature = "cuda", doc = include_str!("../README.md"))]
#![cfg_attr(
    not(feature = "cuda"),
    doc = "Backend of fusestep on CUDA devices; empty without the feature `cuda`."
)]
#![cfg(feature = "cuda")]

mod adopt;
mod backend;
mod borrowed;
mod buffer;
mod calls;
mod checks;
mod current;
mod entry;
mod event;
mod gradient_sums;
mod graph;
mod handles;
mod host_copy;
mod info;
mod kernels;
mod launch;
mod leaves;
mod loaded_entry;
mod normed;
mod recording;
mod reduce;
mod resident;
mod rows;
mod session;
mod status;
mod tensor_sums;
mod timing;
mod update_sums;

pub use backend::CudaBackend;
pub use borrowed::tables::{BorrowedStep, BorrowedTables};
pub use borrowed::{DeviceTensor, LendOnDevice};
pub use current::ContextBefore;
pub use handles::{ContextHandle, StreamHandle};
pub use host_copy::HostCopy;
pub use info::DeviceInfo;
pub use loaded_entry::EntryCode;
pub use timing::DeviceTime;

/// Result of a call here; its error is that of backends, unless another is named.
type Result<T, E = fusestep_launch::BackendError> = std::result::Result<T, E>;

/// The backend's name in messages.
const NAME: &str = "cuda";
