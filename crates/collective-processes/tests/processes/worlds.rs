//! The world of this process, and groups that may end in an error.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use fusestep_collective::{Collectives, Communicator, Membership};
use fusestep_collective_processes::{ProcessCommunicator, ProcessOptions, Rendezvous};

/// Lives from the first test to the last.
static WORLD: Mutex<Option<ProcessCommunicator>> = Mutex::new(None);

/// The whole job: what the parent has started, or this process alone.
pub(crate) fn with_world<R>(body: impl FnOnce(&mut ProcessCommunicator) -> R) -> R {
    let mut world = WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    let world = world.get_or_insert_with(|| {
        let options = ProcessOptions {
            dump_folder: Some(std::env::temp_dir().join("fusestep-mpi-suite")),
            claim_bytes: 4 << 10,
            ..ProcessOptions::default()
        };
        let place = if super::start::is_rank() {
            Rendezvous::from_environment().unwrap()
        } else {
            Rendezvous { rank: 0, world_size: 1, session: super::start::session("alone") }
        };
        ProcessCommunicator::join(&place, &options).unwrap()
    });
    body(world)
}

/// The sizes of worlds that there can be.
pub(crate) fn sizes() -> Vec<usize> {
    vec![with_world(|world| world.world_size())]
}

/// Runs `body` on this rank if the world is of this size.
pub(crate) fn world<R>(ranks: usize, body: impl Fn(&mut dyn Communicator) -> R) -> Vec<R> {
    with_world(|world| if world.world_size() == ranks { vec![body(world)] } else { Vec::new() })
}

/// Runs `body` in a group of all ranks with a timeout of its own; then waits for all, however the
/// group has ended.
pub(crate) fn group<R>(timeout_ms: u64, body: impl FnOnce(Box<dyn Communicator>) -> R) -> R {
    with_world(|world| {
        world.set_timeout(Duration::from_millis(timeout_ms));
        let all = Membership { colour: 0, key: 0 };
        let group = world.split(Some(all)).unwrap().unwrap();
        world.set_timeout(Duration::from_secs(60));
        let result = body(group);
        world.barrier().unwrap();
        result
    })
}
