//! The memory that a plan runs on.

pub(crate) mod absorb;
pub(crate) mod adapting;
pub(crate) mod allocator;
pub(crate) mod device;
pub(crate) mod device_lanes;
pub(crate) mod device_params;
pub(crate) mod device_sums;
pub(crate) mod evaluated;
pub(crate) mod exchange;
pub(crate) mod gradient_view;
pub(crate) mod gradient_views;
pub(crate) mod gradients;
pub(crate) mod lane_views;
pub(crate) mod lanes;
pub(crate) mod masters;
pub(crate) mod norm;
pub(crate) mod outcomes;
pub(crate) mod ready;
pub(crate) mod segment_state;
pub(crate) mod state;
pub(crate) mod storage;
pub(crate) mod tables;
pub(crate) mod tensors;
pub(crate) mod units;
pub(crate) mod update_sums;
pub(crate) mod written;
