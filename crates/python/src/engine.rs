//! The engine by which a rank's process joins the others.

use std::time::Duration;

use fusestep::collective::{ALONE_REMEDY, Carrier, started_together};
use fusestep::{Communicator, Error};
use fusestep_collective_processes::{ProcessCommunicator, ProcessOptions};

use crate::device::Device;
use crate::setup::Setup;

/// The communicator of a rank: of host memory, or of its device.
pub(crate) fn join(setup: &Setup) -> Result<Box<dyn Communicator>, Error> {
    let started = connect(setup.engine.as_deref(), setup.timeout)?;
    match &setup.device {
        Device::Host => Ok(started),
        Device::Cuda(on) => on.join(started, setup.timeout, setup.nccl_library.clone()),
    }
}

/// The communicator of the processes that a launcher has started.
fn connect(engine: Option<&str>, timeout: Duration) -> Result<Box<dyn Communicator>, Error> {
    match engine {
        Some("processes") => {}
        Some("mpi") => return mpi(timeout),
        None if started_together().is_some_and(|started| started.carrier == Carrier::Mpi) => {
            return mpi(timeout);
        }
        None => {}
        Some(other) => {
            return Err(format!("engine: expected processes or mpi, found {other}").into());
        }
    }
    let options = ProcessOptions { timeout, ..ProcessOptions::default() };
    Ok(Box::new(ProcessCommunicator::world(&options)?))
}

#[cfg(feature = "mpi")]
fn mpi(timeout: Duration) -> Result<Box<dyn Communicator>, Error> {
    let options = fusestep_collective_mpi::MpiOptions { timeout, ..Default::default() };
    let world = fusestep_collective_mpi::MpiCommunicator::world(&options)?;
    Ok(Box::new(world))
}

#[cfg(not(feature = "mpi"))]
fn mpi(_: Duration) -> Result<Box<dyn Communicator>, Error> {
    let started = started_together().map_or_else(String::new, |started| format!("{started}; "));
    Err(format!(
        "engine: {started}expected a build with MPI, found one that leaves it out; build the wheel \
         with `maturin build --release --features mpi` (it takes an MPI with mpicc, and libclang), \
         or start the processes of one machine with torchrun, or {ALONE_REMEDY}"
    )
    .into())
}
