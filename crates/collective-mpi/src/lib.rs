#![cfg_attr(feature = "mpi", doc = include_str!("../README.md"))]
#![cfg_attr(
    not(feature = "mpi"),
    doc = "Collectives on MPI: the feature `mpi` adds the engine, which is all that needs an MPI."
)]
#![cfg_attr(not(feature = "mpi"), forbid(unsafe_code))]

#[cfg(feature = "mpi")]
mod agreed;
#[cfg(feature = "mpi")]
mod algorithms;
#[cfg(feature = "mpi")]
mod by_messages;
#[cfg(feature = "mpi")]
mod calls;
#[cfg(feature = "mpi")]
mod communicator;
#[cfg(feature = "mpi")]
mod deadline;
#[cfg(feature = "mpi")]
mod exchange;
#[cfg(feature = "mpi")]
mod group;
#[cfg(feature = "mpi")]
mod library;
#[cfg(feature = "mpi")]
mod machine;
#[cfg(feature = "mpi")]
mod meeting;
#[cfg(feature = "mpi")]
mod native;
mod options;
#[cfg(feature = "mpi")]
mod party;
#[cfg(feature = "mpi")]
mod reduction;
#[cfg(feature = "mpi")]
mod say;
#[cfg(feature = "mpi")]
mod split;
#[cfg(feature = "mpi")]
mod watch;
#[cfg(feature = "mpi")]
mod wire;

#[cfg(feature = "mpi")]
pub use communicator::MpiCommunicator;
pub use options::{Compare, MpiError, MpiOptions, Reduction};
