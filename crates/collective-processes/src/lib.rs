#![doc = include_str!("../README.md")]

mod bell;
mod card;
mod communicator;
mod environment;
mod files;
mod group;
mod heap;
mod layout;
mod launch;
mod life;
mod meet;
mod movement;
mod options;
mod reduction;
mod rendezvous;
mod segment;
mod session;

pub use communicator::ProcessCommunicator;
pub use environment::{Rendezvous, launched_processes};
pub use launch::{LaunchOptions, Launched, launch};
pub use options::{ProcessError, ProcessOptions};
