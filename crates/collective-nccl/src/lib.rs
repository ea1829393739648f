#![cfg_attr(feature = "nccl", doc = include_str!("../README.md"))]
#![cfg_attr(
    not(feature = "nccl"),
    doc = "Collectives on NCCL: the feature `nccl` adds the engine, which is all that needs GPUs."
)]
#![cfg_attr(not(feature = "nccl"), forbid(unsafe_code))]

#[cfg(feature = "nccl")]
mod buffer;
#[cfg(feature = "nccl")]
mod calls;
#[cfg(feature = "nccl")]
mod communicator;
#[cfg(feature = "nccl")]
mod cut;
#[cfg(feature = "nccl")]
mod data;
#[cfg(feature = "nccl")]
mod device;
#[cfg(feature = "nccl")]
mod driver;
#[cfg(feature = "nccl")]
mod exchange;
mod folder;
#[cfg(feature = "nccl")]
mod founding;
#[cfg(feature = "nccl")]
mod gpus;
#[cfg(feature = "nccl")]
mod handle;
#[cfg(feature = "nccl")]
mod kernel;
#[cfg(feature = "nccl")]
mod launch;
#[cfg(feature = "nccl")]
mod library;
#[cfg(feature = "nccl")]
mod link;
#[cfg(feature = "nccl")]
mod memory;
#[cfg(feature = "nccl")]
mod movement;
mod options;
#[cfg(feature = "nccl")]
mod reduction;
#[cfg(feature = "nccl")]
mod staging;
#[cfg(feature = "nccl")]
mod workspace;

#[cfg(feature = "nccl")]
pub use buffer::DeviceBuffer;
#[cfg(feature = "nccl")]
pub use communicator::NcclCommunicator;
pub use folder::{FolderControl, Meeting};
pub use options::{MIN_VERSION, NcclError, NcclOptions, Reduction};
