//! Errors of sessions that cannot be set up.

use fusestep_collective::{CollectiveError, TakenForWhole};
use fusestep_planner::PlanError;
use thiserror::Error;

use crate::OptionError;

/// The reason why a session could not be set up; nothing of it is left.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SessionError {
    /// A setting out of range, without effect, or against another one.
    #[error(transparent)]
    Setting(#[from] OptionError),
    /// Planning, memory or a call between ranks failed.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A launcher has started several processes, and this one would train as if it were the only
    /// one.
    #[error(transparent)]
    TakenForWhole(#[from] TakenForWhole),
    /// The device could not be opened.
    #[error(transparent)]
    Device(crate::Error),
    /// There is nothing to train.
    #[error("build: expected a parameter at least, found none")]
    NoParameters,
}

impl SessionError {
    /// The error itself, for a caller that takes any.
    pub(crate) fn into_inner(self) -> crate::Error {
        match self {
            Self::Setting(error) => error.into(),
            Self::Plan(error) => error.into(),
            Self::TakenForWhole(error) => error.into(),
            Self::Device(error) => error,
            Self::NoParameters => self.into(),
        }
    }
}

impl From<CollectiveError> for SessionError {
    fn from(error: CollectiveError) -> Self {
        Self::Plan(error.into())
    }
}
