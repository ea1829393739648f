#![doc = include_str!("../README.md")]

#[cfg(not(target_os = "linux"))]
mod absent;
#[cfg(target_os = "linux")]
mod card;
#[cfg(target_os = "linux")]
mod communicator;
#[cfg(target_os = "linux")]
mod engine;
mod environment;
mod error;
#[cfg(target_os = "linux")]
mod family;
#[cfg(target_os = "linux")]
mod files;
#[cfg(target_os = "linux")]
mod group;
#[cfg(target_os = "linux")]
mod guard;
#[cfg(target_os = "linux")]
mod heap;
#[cfg(target_os = "linux")]
mod last_calls;
#[cfg(target_os = "linux")]
mod launch;
mod launched;
#[cfg(target_os = "linux")]
mod layout;
#[cfg(target_os = "linux")]
mod life;
#[cfg(target_os = "linux")]
mod lines;
#[cfg(target_os = "linux")]
mod made;
#[cfg(target_os = "linux")]
mod movement;
#[cfg(target_os = "linux")]
mod notifier;
#[cfg(target_os = "linux")]
mod once;
#[cfg(target_os = "linux")]
mod place;
#[cfg(target_os = "linux")]
mod reduction;
#[cfg(target_os = "linux")]
mod rendezvous;
#[cfg(target_os = "linux")]
mod round;
#[cfg(target_os = "linux")]
mod segment;
#[cfg(target_os = "linux")]
mod session;
#[cfg(target_os = "linux")]
mod split;
#[cfg(target_os = "linux")]
mod starter;
#[cfg(target_os = "linux")]
mod task;

#[cfg(not(target_os = "linux"))]
pub use absent::{ProcessCommunicator, guard, launch, says_first};
#[cfg(target_os = "linux")]
pub use communicator::ProcessCommunicator;
pub use environment::{Rendezvous, launched_processes};
pub use error::{MAX_RANKS, ProcessError};
pub use fusestep_collective::Options as ProcessOptions;
#[cfg(target_os = "linux")]
pub use guard::guard;
#[cfg(target_os = "linux")]
pub use launch::launch;
pub use launched::{LaunchOptions, Launched, Prefix};
#[cfg(target_os = "linux")]
pub use once::says_first;
