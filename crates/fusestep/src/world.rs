//! The ranks that this process is one of, as its launcher tells it.

use fusestep_collective::{Carrier, Communicator, Solo, Started, started_together};

use crate::Error;

/// The communicator of all processes that were started together: by `fusestep launch` or torchrun
/// (feature `processes`, on by default), or by mpirun, srun and their like (feature `mpi`). A
/// process that was started by itself is a world of one.
///
/// ```no_run
/// # use fusestep::{AdamW, Cpu, Error, ParamDesc};
/// # fn train(params: &[ParamDesc]) -> Result<(), Error> {
/// let mut world = fusestep::world()?;
/// let mut opt = AdamW::new(1e-3).zero(1).on(world.as_mut()).build(params, Cpu::new())?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// A launcher whose engine is no feature of this build, or whose variables are not all there; other
/// processes that do not come.
pub fn world() -> Result<Box<dyn Communicator>, Error> {
    match started_together() {
        None => Ok(Box::new(Solo::new())),
        Some(started) => match started.carrier {
            Carrier::Addresses => processes(&started),
            Carrier::Mpi => mpi(&started),
        },
    }
}

/// [`world`] with a GPU for each rank, whose memory NCCL moves: the GPU whose number is this
/// process's number on its machine.
///
/// # Errors
/// As [`world`]; a machine without such a GPU, or without NCCL.
#[cfg(feature = "nccl")]
pub fn world_on_gpus() -> Result<Box<dyn Communicator>, Error> {
    use fusestep_collective_nccl::{NcclCommunicator, NcclOptions};

    let control = world()?;
    let gpu = fusestep_collective::local_rank().unwrap_or(control.rank());
    Ok(Box::new(NcclCommunicator::new(control, gpu, &NcclOptions::default())?))
}

#[cfg(feature = "processes")]
fn processes(_: &Started) -> Result<Box<dyn Communicator>, Error> {
    use fusestep_collective_processes::{ProcessCommunicator, ProcessOptions};

    Ok(Box::new(ProcessCommunicator::world(&ProcessOptions::default())?))
}

#[cfg(not(feature = "processes"))]
fn processes(started: &Started) -> Result<Box<dyn Communicator>, Error> {
    Err(without("processes", started))
}

#[cfg(feature = "mpi")]
fn mpi(_: &Started) -> Result<Box<dyn Communicator>, Error> {
    use fusestep_collective_mpi::{MpiCommunicator, MpiOptions};

    Ok(Box::new(MpiCommunicator::world(&MpiOptions::default())?))
}

#[cfg(not(feature = "mpi"))]
fn mpi(started: &Started) -> Result<Box<dyn Communicator>, Error> {
    Err(without("mpi", started))
}

/// The error of a launcher whose engine is no feature of this build.
#[cfg(not(all(feature = "processes", feature = "mpi")))]
fn without(feature: &str, started: &Started) -> Error {
    let remedy = fusestep_collective::ALONE_REMEDY;
    format!(
        "world: {started}; expected a build of fusestep with the feature `{feature}`, found one \
         that leaves it out; add the feature, or {remedy}"
    )
    .into()
}
