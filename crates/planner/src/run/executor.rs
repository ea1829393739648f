//! Launches of a step, run by a backend or by a caller who lends tensors.

use fusestep_launch::{
    Backend, BackendError, Buffer, GroupValues, Launch, LaunchReport, MAX_SUMS, Reduce,
};

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

    /// Runs one launch, as [`Lender::launch`]: on a device, which may derive the launch's step
    /// scalars itself.
    ///
    /// # Errors
    /// As [`Lender::launch`].
    fn launch_derived(
        &mut self,
        launch: Launch<'_>,
        _from: DerivedFrom<'_>,
    ) -> Result<LaunchReport, BackendError> {
        self.launch(launch)
    }

    /// Begins to bring the control block that the lender's launches follow in place of the plan's;
    /// `None` if they follow that.
    ///
    /// # Errors
    /// As [`Lender::bring`].
    fn bring_control(&mut self) -> Result<Option<Box<dyn Brought>>, BackendError> {
        Ok(None)
    }

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

    /// Writes the factor that the framework has multiplied its loss with to the plan's control
    /// block, before norms are taken: it is taken out of them and of the gradients. The block has
    /// the plan's own before.
    ///
    /// # Errors
    /// Errors of the device.
    fn scale(&mut self, _control: &mut dyn Buffer) -> Result<(), BackendError> {
        Ok(())
    }

    /// Ways to sums over whole tensors, if the framework has cut tensors over processes of its own;
    /// `None` if what is lent are whole tensors.
    fn sharing(&mut self) -> Option<&mut dyn Sharing> {
        None
    }
}

/// Values that a device derives the step scalars of a launch from.
#[derive(Clone, Copy, Debug)]
pub struct DerivedFrom<'a> {
    /// Number of the launch's rule in the plan.
    pub rule: usize,
    /// Hyper-parameters of all groups at the step to come.
    pub values: &'a [GroupValues],
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

    pub(crate) fn scale(&mut self, control: &mut dyn Buffer) -> Result<(), BackendError> {
        match self {
            Executor::Backend(_) => Ok(()),
            Executor::Lender(lender) => lender.scale(control),
        }
    }

    /// Whether launches go to a device on which tensors are lent.
    pub(crate) fn lends_on_device(&self) -> bool {
        matches!(self, Executor::Lender(lender) if lender.backend().device().is_some())
    }

    /// Runs a launch. `from` is there for a device on which tensors are lent.
    pub(crate) fn launch(
        &mut self,
        launch: Launch<'_>,
        from: Option<DerivedFrom<'_>>,
    ) -> Result<LaunchReport, BackendError> {
        match (self, from) {
            (Executor::Backend(backend), _) => backend.launch(launch),
            (Executor::Lender(lender), None) => lender.launch(launch),
            (Executor::Lender(lender), Some(from)) => lender.launch_derived(launch, from),
        }
    }

    pub(crate) fn reduce(&mut self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError> {
        match self {
            Executor::Backend(backend) => backend.reduce(reduce),
            Executor::Lender(lender) => lender.reduce(reduce),
        }
    }
}
