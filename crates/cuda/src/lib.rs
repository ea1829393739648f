#![doc = include_str!("../README.md")]
#![cfg_attr(not(feature = "cuda"), forbid(unsafe_code))]

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
mod backend;
#[cfg(feature = "cuda")]
mod buffer;
#[cfg(feature = "cuda")]
mod graph;
mod info;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod normed;
#[cfg(feature = "cuda")]
mod reduce;
#[cfg(feature = "cuda")]
mod resident;
#[cfg(feature = "cuda")]
mod session;
#[cfg(feature = "cuda")]
mod status;
mod timing;
#[cfg(feature = "cuda")]
mod update_sums;

#[cfg(not(feature = "cuda"))]
pub use absent::CudaBackend;
#[cfg(feature = "cuda")]
pub use backend::CudaBackend;
pub use info::DeviceInfo;
pub use timing::DeviceTime;

/// The backend's name in messages.
const NAME: &str = "cuda";
