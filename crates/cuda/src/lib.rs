#![cfg_attr(feature = "cuda", doc = include_str!("../README.md"))]
#![cfg_attr(
    not(feature = "cuda"),
    doc = "Backend of fusestep on CUDA devices; empty without the feature `cuda`."
)]
#![cfg(feature = "cuda")]

mod accumulate;
mod adopt;
mod backend;
mod borrowed;
mod buffer;
mod checks;
mod entry;
mod event;
mod graph;
mod info;
mod kernels;
mod leaves;
mod loaded_entry;
mod normed;
mod reduce;
mod resident;
mod session;
mod status;
mod tensor_sums;
mod timing;
mod update_sums;

pub use adopt::{ContextHandle, StreamHandle};
pub use backend::CudaBackend;
pub use borrowed::{DeviceTensor, LendOnDevice};
pub use info::DeviceInfo;
pub use loaded_entry::EntryCode;
pub use timing::DeviceTime;

/// What calls here come to, unless another error is named.
type Result<T, E = fusestep_launch::BackendError> = std::result::Result<T, E>;

/// The backend's name in messages.
const NAME: &str = "cuda";
