//! Communicator on MPI, which programs hold.

use std::sync::Arc;
use std::time::Duration;

use fusestep_collective::{
    CallOptions, Communicator, Ranked, Timeout, forward_calls, mark_joined, started_together,
};

use crate::by_messages::ByMessages;
use crate::group::{Founding, Group};
use crate::library::Mpi;
use crate::machine;
use crate::native::Native;
use crate::{MpiError, MpiOptions, Reduction};

/// One rank of an MPI job, or of a subgroup of it.
///
/// Ranks are processes of one program that `mpirun` has started. A group that ends in an error ends
/// for good, on all ranks alike. The process goes on and leaves MPI when its last communicator is
/// dropped. It ends the job if other processes do not leave, too. A rank that stops while data
/// moves ends the job: the reason is printed and the flight recorder written first.
///
/// # Cost
/// One exchange of 72 bytes between all ranks and then the messages that [`docs/collectives.md`]
/// lists. Calls poll, so each needs a core for as long as it lasts. After 30 µs it gives the core
/// away if another thread wants it.
///
/// [`docs/collectives.md`]: https://docs.rs/fusestep-collective-mpi
#[derive(Debug)]
pub struct MpiCommunicator {
    /// The ranks of the job: in shared memory if all run on one machine, else by messages.
    inner: Box<dyn World>,
    timeout: Timeout,
    mpi: Arc<Mpi>,
}

/// A communicator of the whole job.
trait World: Communicator + std::fmt::Debug {}

impl<C: Communicator + std::fmt::Debug> World for C {}

impl MpiCommunicator {
    /// Starts MPI and returns the communicator of all processes of the job. A program must use MPI
    /// for nothing before. A process that no launcher has started is a world of one.
    ///
    /// # Errors
    /// [`MpiError::AlreadyStarted`], [`MpiError::ThreadLevel`], [`MpiError::Alone`],
    /// [`MpiError::Differs`], or a call of MPI that failed. An MPI that cannot work without a
    /// launcher ends the process itself.
    pub fn world(options: &MpiOptions) -> Result<Self, MpiError> {
        let mpi = Arc::new(Mpi::start(options)?);
        if let Some(started) = started_together().filter(|_| mpi.world_size == 1) {
            return Err(MpiError::Alone { started: Box::new(started) });
        }
        mark_joined();
        machine::compare_options(&mpi, options)?;
        let native = match options.reduction {
            Reduction::Reproducible => None,
            Reduction::Engine => Some(Native::world(&mpi)?),
        };
        let shared = match options.reduction {
            Reduction::Reproducible if options.share_memory => machine::share(&mpi, options)?,
            _ => None,
        };
        if let Some(shared) = shared {
            let timeout = shared.inner.timeout().clone();
            return Ok(Self { inner: Box::new(shared), timeout, mpi });
        }
        let founding = Founding {
            members: (0..mpi.world_size).collect(),
            rank: mpi.rank,
            tag: 0,
            options: options.clone(),
        };
        let group = Group::new(Arc::clone(&mpi), founding, None);
        let timeout = group.timeout.clone();
        let calls = CallOptions {
            timeout: timeout.clone(),
            recorded_calls: options.recorded_calls,
            dump_folder: options.dump_folder.clone(),
        };
        let inner = Box::new(Ranked::on(ByMessages::new(group, native), calls));
        Ok(Self { inner, timeout, mpi })
    }

    /// Sets how long this rank waits for others from the next call on. Groups made by a later split
    /// have the same timeout.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout.set(timeout);
    }

    /// The MPI's own name and version.
    pub fn library_version(&self) -> &str {
        self.mpi.version.trim_end_matches('\0')
    }
}

impl Communicator for MpiCommunicator {
    forward_calls! {
        this => this.inner;
        rank, world_size, execute, split, set_context, aborter, recorder, allocate, shares_memory,
        reduce_update, failure,
    }
}
