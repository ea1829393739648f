//! Values that all parts of a launch share.

use fusestep_launch::{BackendError, Gate, HostCall, Launch};
use fusestep_simd::Level;

use crate::errors::FOREIGN;

/// The gate of a launch, as its control block sets it.
pub(crate) fn gate(launch: &Launch<'_>) -> Result<Gate, BackendError> {
    Gate::on_host(launch.control).ok_or(FOREIGN)
}

/// The arguments that all parts of a launch share.
pub(crate) fn host_call<'a>(level: Level, launch: &Launch<'a>, grad_factor: f64) -> HostCall<'a> {
    HostCall {
        level,
        scalars: launch.scalars,
        grad_factor,
        step_scalars: launch.step_scalars,
        changes: None,
        squares: None,
    }
}
