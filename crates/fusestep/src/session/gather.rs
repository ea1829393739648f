//! Whole parameters of many ranks.

#[cfg(doc)]
use fusestep_planner::Run;
use fusestep_planner::{DeviceParams, GatheredParams, PlanError};

use super::Session;

impl Session<'_> {
    /// Whole parameters at any ZeRO stage, for as long as the result lives; all ranks ask for the
    /// same. Ranks that have not met do so first, so that what they get is what they train.
    ///
    /// # Errors
    /// As [`Run::gather`]; as [`Run::handshake`].
    pub fn gather(&mut self, names: &[&str]) -> Result<GatheredParams, PlanError> {
        self.meet()?;
        self.attempt(|run| run.gather(names))
    }

    /// [`Session::gather`] into memory of the device, without the host;
    /// [`Session::use_again`] takes it back once it has been read.
    ///
    /// # Errors
    /// As [`Run::gather_on_device`]; as [`Run::handshake`].
    pub fn gather_on_device(&mut self, names: &[&str]) -> Result<DeviceParams, PlanError> {
        self.meet()?;
        self.attempt(|run| run.gather_on_device(names))
    }

    /// Keeps the memory of parameters that are no longer read, for those that are gathered next.
    pub fn use_again(&mut self, params: DeviceParams) {
        self.saving.comms.use_again(params);
    }

    /// Values that a model is evaluated with: averages under a rule that keeps them
    /// (Schedule-Free), else the parameters; training goes on with its bits. All ranks ask for the
    /// same.
    ///
    /// # Errors
    /// As [`Run::gather_averages`]; as [`Run::handshake`].
    pub fn gather_averages(&mut self, names: &[&str]) -> Result<GatheredParams, PlanError> {
        self.meet()?;
        self.attempt(|run| run.gather_averages(names))
    }
}
