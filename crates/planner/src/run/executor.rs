//! Launches of a step, run by a backend or by a caller who lends tensors.

use fusestep_launch::{Backend, BackendError, Buffer, Launch, LaunchReport, MAX_SUMS, Reduce};

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

    /// Begins to bring the first `len_bytes` bytes of a buffer to the host, behind all launches. A
    /// device's lender goes on meanwhile; others have them at once.
    ///
    /// # Errors
    /// Errors of the backend.
    fn bring(
        &mut self,
        buffer: &dyn Buffer,
        len_bytes: usize,
    ) -> Result<Box<dyn Brought>, BackendError> {
        let mut bytes = vec![0; len_bytes];
        self.backend().read(buffer, 0, &mut bytes)?;
        Ok(Box::new(bytes))
    }

    /// Ways to sums over whole tensors, if the framework has cut tensors over processes of its own;
    /// `None` if what is lent are whole tensors.
    fn sharing(&mut self) -> Option<&mut dyn Sharing> {
        None
    }
}

/// Bytes that are on their way to the host.
pub trait Brought: Send {
    /// Waits for the bytes, and for nothing that was enqueued behind them.
    ///
    /// # Errors
    /// Errors of the device, also of work before.
    fn wait(self: Box<Self>) -> Result<Vec<u8>, BackendError>;
}

/// Bytes that are there.
impl Brought for Vec<u8> {
    fn wait(self: Box<Self>) -> Result<Vec<u8>, BackendError> {
        Ok(*self)
    }
}

/// Sums over tensors that a framework has cut over processes of its own.
///
/// All processes share the same sums in the same order, whichever parts they have.
pub trait Sharing {
    /// Takes the sums that the launch's kernel defines over this process's part of each tensor, at
    /// the tensor's position in the storage.
    ///
    /// # Errors
    /// As [`Lender::launch`].
    fn measure(
        &mut self,
        launch: &Launch<'_>,
        sums: &mut [[f64; MAX_SUMS]],
    ) -> Result<(), BackendError>;

    /// Puts sums over whole parameters in place of those over parts, the same bits on all
    /// processes: `width` numbers for each parameter of the plan, in its order.
    ///
    /// # Errors
    /// Errors of the framework's calls.
    fn share(&mut self, sums: &mut [f64], width: usize) -> Result<(), BackendError>;
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

    pub(crate) fn sharing(&mut self) -> Option<&mut dyn Sharing> {
        match self {
            Executor::Backend(_) => None,
            Executor::Lender(lender) => lender.sharing(),
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
