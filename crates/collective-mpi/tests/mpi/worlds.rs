//! The world of this process, and groups that may end in an error.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use fusestep_collective::{Collectives, Communicator, Membership};
use fusestep_collective_mpi::{Compare, MpiCommunicator, MpiOptions, Reduction};

/// Lives from the first test to the last.
static WORLD: Mutex<Option<MpiCommunicator>> = Mutex::new(None);

/// A number from the environment.
fn from_environment(name: &str) -> Option<usize> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

/// The whole job.
pub(crate) fn with_world<R>(body: impl FnOnce(&mut MpiCommunicator) -> R) -> R {
    let mut world = WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    let world = world.get_or_insert_with(|| {
        let defaults = MpiOptions::default();
        let chunk = from_environment("FUSESTEP_MPI_CHUNK_BYTES");
        let segment = from_environment("FUSESTEP_MPI_SEGMENT_BYTES");
        MpiCommunicator::world(&MpiOptions {
            timeout: Duration::from_secs(60),
            dump_folder: Some(std::env::temp_dir().join("fusestep-mpi-suite")),
            chunk_limit_bytes: chunk.unwrap_or(defaults.chunk_limit_bytes),
            segment_bytes: segment.unwrap_or(defaults.segment_bytes),
            compare: match from_environment("FUSESTEP_MPI_FIRST_OF_EACH") {
                Some(_) => Compare::FirstOfEach,
                None => Compare::EveryCall,
            },
            reduction: match from_environment("FUSESTEP_MPI_ENGINE") {
                Some(_) => Reduction::Engine,
                None => Reduction::Reproducible,
            },
            share_memory: from_environment("FUSESTEP_MPI_MESSAGES").is_none(),
            ..defaults
        })
        .unwrap()
    });
    body(world)
}

/// Leaves the job for good.
pub(crate) fn leave() {
    let world = WORLD.lock().unwrap_or_else(PoisonError::into_inner).take();
    drop(world);
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
