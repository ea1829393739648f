//! Parameters that a framework keeps, as saving and resuming read and write them.

use fusestep_launch::{Backend, BackendError};

#[cfg(doc)]
use crate::Tensors;
use crate::plan::value::Plan;
use crate::run::memory::state::State;

/// Parameters that the caller's framework keeps ([`Tensors::Borrowed`]), by their positions in the
/// plan, as saving and resuming read and write them.
pub trait BorrowedParams {
    /// Copies a whole parameter.
    ///
    /// # Errors
    /// Errors of the framework; a length that is not the parameter's.
    fn read(&self, param: usize, bytes: &mut [u8]) -> Result<(), BackendError>;

    /// Writes a whole parameter in place.
    ///
    /// # Errors
    /// As [`BorrowedParams::read`].
    fn write(&self, param: usize, bytes: &[u8]) -> Result<(), BackendError>;
}

/// Plan, state, backend and parameters of the run that a save stores.
#[derive(Clone, Copy)]
pub struct RunToSave<'a> {
    /// Plan of the run.
    pub plan: &'a Plan,
    /// Optimizer state and counts, and parameters unless the caller keeps them.
    pub state: &'a State,
    /// The state's backend.
    pub backend: &'a dyn Backend,
    /// Parameters that the caller keeps ([`Tensors::Borrowed`]).
    pub params: Option<&'a dyn BorrowedParams>,
}

/// Plan, state, backend and parameters of the run that a resume writes to.
pub struct RunToLoad<'a> {
    /// Plan of the run.
    pub plan: &'a Plan,
    /// Optimizer state and counts, and parameters unless the caller keeps them.
    pub state: &'a mut State,
    /// The state's backend.
    pub backend: &'a dyn Backend,
    /// Parameters that the caller keeps ([`Tensors::Borrowed`]).
    pub params: Option<&'a dyn BorrowedParams>,
}

impl<'a> RunToSave<'a> {
    /// A run whose state keeps the parameters.
    pub fn of(plan: &'a Plan, state: &'a State, backend: &'a dyn Backend) -> Self {
        Self { plan, state, backend, params: None }
    }
}

impl<'a> RunToLoad<'a> {
    /// A run whose state keeps the parameters.
    pub fn of(plan: &'a Plan, state: &'a mut State, backend: &'a dyn Backend) -> Self {
        Self { plan, state, backend, params: None }
    }
}

impl std::fmt::Debug for RunToLoad<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunToLoad").field("step", &self.state.step()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for RunToSave<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunToSave").field("step", &self.state.step()).finish_non_exhaustive()
    }
}
