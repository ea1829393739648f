//! The collectives between GPUs; ranks are threads of this process, which are their control
//! communicator. `cargo xtask nccl` runs this on the emulated driver and a stand-in for NCCL, which
//! the variables of `worlds.rs` name.

#[path = "nccl/deadlock.rs"]
mod deadlock;
#[path = "nccl/device.rs"]
mod device;
#[path = "nccl/endings.rs"]
mod endings;
#[path = "nccl/faults.rs"]
mod faults;
#[path = "nccl/founding.rs"]
mod founding;
#[path = "nccl/mismatches.rs"]
mod mismatches;
#[path = "../../../tests/collective/numbers.rs"]
mod numbers;
#[path = "../../../tests/collective/operations.rs"]
mod operations;
#[path = "../../../tests/collective/perturbed.rs"]
mod perturbed;
#[path = "nccl/rank_order.rs"]
mod rank_order;
#[path = "nccl/same_bits.rs"]
mod same_bits;
#[path = "nccl/segments.rs"]
mod segments;
#[path = "nccl/stand_in.rs"]
mod stand_in;
#[path = "nccl/streams.rs"]
mod streams;
#[path = "nccl/worlds.rs"]
mod worlds;
