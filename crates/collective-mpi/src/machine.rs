//! Ranks that all run on one machine: MPI starts and numbers them, shared memory carries their
//! calls.

use std::ffi::{c_int, c_void};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fusestep_collective::{CollectiveError, Communicator, Membership};
use fusestep_collective_processes::{ProcessCommunicator, ProcessOptions, Rendezvous};
use mpi::ffi;

use crate::library::{Handle, Mpi, check};
use crate::{MpiError, MpiOptions, Reduction, watch};

/// Longest wait for ranks that MPI says are here to meet in shared memory.
const MEETING_TIME: Duration = Duration::from_secs(20);

/// Communicator of shared memory; dropping it leaves MPI last.
#[derive(Debug)]
pub(crate) struct OnMachine<C: Communicator> {
    pub(crate) inner: C,
    mpi: Arc<Mpi>,
    /// Folder to which the world's flight recorder is written if one of its groups fails.
    dump_folder: Option<PathBuf>,
}

/// Compares the options that decide which messages processes send. Ranks that differ in them would
/// wait for ever.
pub(crate) fn compare_options(mpi: &Mpi, options: &MpiOptions) -> Result<(), MpiError> {
    let code = match (options.reduction, options.share_memory) {
        (Reduction::Reproducible, false) => 1,
        (Reduction::Reproducible, true) => 2,
        (Reduction::Engine, _) => 3,
    };
    // The minimum of both: the smallest code, and the largest with its sign turned.
    let (own, mut all) = ([code, -code], [0i32; 2]);
    // SAFETY: both pairs are this function's own; all processes make this call, first thing.
    let agreed = unsafe {
        let (own, all) = (own.as_ptr().cast(), all.as_mut_ptr().cast());
        let world = mpi.world.0;
        ffi::MPI_Allreduce(own, all, 2, ffi::RSMPI_INT32_T, ffi::RSMPI_MIN, world)
    };
    check(agreed).map_err(MpiError::of_call("MPI_Allreduce"))?;
    if all == own {
        return Ok(());
    }
    let shared = if options.share_memory { " in shared memory" } else { "" };
    Err(MpiError::Differs {
        own: match options.reduction {
            Reduction::Reproducible => format!("reproducible sums{shared}"),
            Reduction::Engine => "the engine's own sums".to_owned(),
        },
    })
}

/// Joins all processes of the job in shared memory, if all run on one machine; all of them call it.
pub(crate) fn share(
    mpi: &Arc<Mpi>,
    options: &MpiOptions,
) -> Result<Option<OnMachine<ProcessCommunicator>>, MpiError> {
    if ranks_here(mpi)? != mpi.world_size {
        return Ok(None);
    }
    let random = || RandomState::new().build_hasher().finish();
    let mut token = [random(), random()];
    let world = mpi.world.0;
    // SAFETY: the token is this function's own and 16 bytes long; all processes make this call.
    let told = unsafe {
        let bytes = token.as_mut_ptr().cast::<c_void>();
        ffi::MPI_Bcast(bytes, 16, ffi::RSMPI_UINT8_T, 0, world)
    };
    check(told).map_err(MpiError::of_call("MPI_Bcast"))?;
    let place = Rendezvous {
        rank: mpi.rank,
        world_size: mpi.world_size,
        session: format!("mpi {:016x}{:016x}", token[0], token[1]),
    };
    let joined = ProcessCommunicator::join(
        &place,
        &ProcessOptions {
            timeout: options.timeout.min(MEETING_TIME),
            recorded_calls: options.recorded_calls,
            dump_folder: options.dump_folder.clone(),
            level: options.level,
            ..ProcessOptions::default()
        },
    );
    let (own, mut all) = (i32::from(joined.is_ok()), 0i32);
    // SAFETY: both numbers are this function's own; all processes make this call.
    let agreed = unsafe {
        let (own, all) = ((&raw const own).cast(), (&raw mut all).cast());
        ffi::MPI_Allreduce(own, all, 1, ffi::RSMPI_INT32_T, ffi::RSMPI_MIN, world)
    };
    check(agreed).map_err(MpiError::of_call("MPI_Allreduce"))?;
    // Containers may hide ranks of a machine from each other: then all of them send messages.
    Ok(joined.ok().filter(|_| all == 1).map(|mut inner| {
        inner.set_timeout(options.timeout);
        OnMachine::new(inner, Arc::clone(mpi), options)
    }))
}

/// The number of processes of the job on this machine.
fn ranks_here(mpi: &Mpi) -> Result<usize, MpiError> {
    // SAFETY: a constant of the library.
    let mut here = Handle(unsafe { ffi::RSMPI_COMM_NULL });
    let mut ranks = 0;
    // SAFETY: MPI runs as long as `mpi` does, and all processes make this call, first thing.
    let code = unsafe {
        ffi::MPI_Comm_split_type(
            mpi.world.0,
            ffi::RSMPI_COMM_TYPE_SHARED,
            mpi.rank as c_int,
            ffi::RSMPI_INFO_NULL,
            &mut here.0,
        )
    };
    check(code).map_err(MpiError::of_call("MPI_Comm_split_type"))?;
    // SAFETY: the communicator was made above; the result is this function's own.
    let code = unsafe { ffi::MPI_Comm_size(here.0, &mut ranks) };
    check(code).map_err(MpiError::of_call("MPI_Comm_size"))?;
    // SAFETY: as above; it is not used again.
    let code = unsafe { ffi::MPI_Comm_free(&mut here.0) };
    check(code).map_err(MpiError::of_call("MPI_Comm_free"))?;
    Ok(ranks as usize)
}

impl<C: Communicator> OnMachine<C> {
    fn new(inner: C, mpi: Arc<Mpi>, options: &MpiOptions) -> Self {
        if options.dump_folder.is_some() {
            watch::abort_at_end(inner.aborter());
        }
        Self { inner, mpi, dump_folder: options.dump_folder.clone() }
    }
}

impl<C: Communicator> Communicator for OnMachine<C> {
    fusestep_collective::forward_calls! {
        this => this.inner;
        rank, world_size, execute, set_context, aborter, recorder, allocate, shares_memory,
        reduce_update, failure,
    }

    fn split(
        &mut self,
        membership: Option<Membership>,
    ) -> Result<Option<Box<dyn Communicator>>, CollectiveError> {
        let inner = self.inner.split(membership)?;
        let mpi = &self.mpi;
        Ok(inner.map(|inner| {
            let mpi = Arc::clone(mpi);
            let dump_folder = None;
            Box::new(OnMachine { inner, mpi, dump_folder }) as Box<dyn Communicator>
        }))
    }
}

impl<C: Communicator> Drop for OnMachine<C> {
    fn drop(&mut self) {
        match self.inner.failure() {
            None | Some(CollectiveError::Left { .. }) => {
                // A communication stream has failed between two calls of this group.
                if let Some(folder) = &self.dump_folder
                    && self.mpi.troubled.load(Ordering::SeqCst)
                {
                    // An error changes nothing: the job ends.
                    let _ = self.inner.recorder().dump(folder);
                }
            }
            // Another process may never leave MPI, and this one must not wait long for it.
            Some(error) => {
                self.mpi.troubled.store(true, Ordering::SeqCst);
                self.mpi.keep_error(error);
            }
        }
    }
}
