//! Stages of a step, a file each, and what several of them share.

pub(crate) mod average;
pub(crate) mod device_lanes;
pub(crate) mod device_norm;
pub(crate) mod device_trust;
pub(crate) mod gather;
pub(crate) mod give;
pub(crate) mod lanes;
pub(crate) mod launches;
pub(crate) mod norm;
pub(crate) mod optimize;
pub(crate) mod parts;
pub(crate) mod reduce;
pub(crate) mod reduce_update;
pub(crate) mod trust;
pub(crate) mod update_norms;
pub(crate) mod wire;
