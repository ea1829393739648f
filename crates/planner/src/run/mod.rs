//! A plan that runs: its memory, the loop over its stages, and the calls between ranks.

pub(crate) mod allocate;
pub(crate) mod alone;
pub(crate) mod clock;
pub(crate) mod comms;
pub(crate) mod enqueued;
pub(crate) mod executor;
pub(crate) mod gather_on_device;
pub(crate) mod graph;
pub(crate) mod image;
pub(crate) mod masters;
pub(crate) mod memory;
pub(crate) mod micro_step;
pub(crate) mod prefetch;
pub(crate) mod report;
pub(crate) mod run;
pub(crate) mod stages;
pub(crate) mod step;
pub(crate) mod steps;
pub(crate) mod units;
pub(crate) mod values;
pub(crate) mod wanted;
