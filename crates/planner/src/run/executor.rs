//! Launches of a step, run by a backend or by a caller who lends tensors.

use fusestep_launch::{Backend, BackendError, Launch, LaunchReport, Reduce};

use crate::error::Result;

/// Runs the launches of a plan whose parameters and gradients a framework keeps: `launch.lists` and
/// `reduce.list` lack them.
pub trait Lender {
    /// The backend that the state was allocated on.
    fn backend(&self) -> &dyn Backend;

    /// Runs one launch; `launch.members` has the parameter of each tensor.
    ///
    /// # Errors
    /// Errors of the backend and of lending.
    fn launch(&mut self, launch: Launch<'_>) -> Result<LaunchReport, BackendError>;

    /// Reads gradients; `reduce.members` has their parameters.
    ///
    /// # Errors
    /// As [`Lender::launch`].
    fn reduce(&mut self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError>;
}

/// Executor of a step's launches: a backend or a lender.
pub(crate) enum Executor<'a> {
    /// A backend, on tensors that the state keeps.
    Backend(&'a dyn Backend),
    /// A caller that lends tensors.
    Lender(&'a mut dyn Lender),
}

impl Executor<'_> {
    pub(crate) fn backend(&self) -> &dyn Backend {
        match self {
            Executor::Backend(backend) => *backend,
            Executor::Lender(lender) => lender.backend(),
        }
    }

    pub(crate) fn launch(&mut self, launch: Launch<'_>) -> Result<LaunchReport, BackendError> {
        match self {
            Executor::Backend(backend) => backend.launch(launch),
            Executor::Lender(lender) => lender.launch(launch),
        }
    }

    pub(crate) fn reduce(&mut self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError> {
        match self {
            Executor::Backend(backend) => backend.reduce(reduce),
            Executor::Lender(lender) => lender.reduce(reduce),
        }
    }
}
