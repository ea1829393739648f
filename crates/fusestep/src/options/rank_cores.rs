//! Communication streams by the cores of a machine.

use std::num::NonZeroUsize;
use std::thread::available_parallelism;

use fusestep_planner::{Comms, Reach, Topology};
use fusestep_tensor::counted;

/// Cores of a rank's machine, and what ranks there compute on while they give gradients. Threads
/// that reduce beside that take a core of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankCores {
    /// Cores that the process may run on.
    pub cores: usize,
    /// Threads on which one rank computes.
    pub threads: usize,
    /// Ranks on the machine; all ranks if `None`, and where they see each other's memory.
    pub ranks: Option<usize>,
}

impl RankCores {
    /// The cores of this process, for ranks that compute on so many threads.
    pub fn of_this_process(threads: NonZeroUsize, ranks: Option<usize>) -> Self {
        let cores = available_parallelism().map_or(1, NonZeroUsize::get);
        Self { cores, threads: threads.get(), ranks }
    }

    /// Communication streams of each rank, and why: none where ranks fill the cores.
    pub(super) fn streams(self, topology: Topology) -> (usize, String) {
        let told = self.ranks.filter(|_| topology.reach == Reach::Calls);
        let ranks = told.map_or(topology.world, |ranks| ranks.clamp(1, topology.world));
        let (streams, do_what) = if ranks.saturating_mul(self.threads) < self.cores {
            (Comms::DEFAULT_STREAMS, "leave some of")
        } else {
            (0, "fill")
        };
        let reason = format!(
            "{}: {} on the machine of rank 0, on {} each, {do_what} {}",
            counted(streams as u64, "communication stream"),
            counted(ranks as u64, "rank"),
            counted(self.threads as u64, "thread"),
            counted(self.cores as u64, "core"),
        );
        (streams, reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_fill_the_cores_have_no_streams_of_their_own() {
        let shared = |world| Topology { rank: 0, world, reach: Reach::SharedMemory };
        let calls = |world| Topology { reach: Reach::Calls, ..shared(world) };
        for (topology, cores, threads, ranks, expected) in [
            (shared(2), 2, 1, None, 0),
            (shared(2), 3, 1, None, 2),
            (shared(2), 8, 4, None, 0),
            (shared(2), 9, 4, None, 2),
            // All of them are on one machine, whatever a launcher says.
            (shared(8), 8, 1, Some(4), 0),
            (calls(8), 8, 1, None, 0),
            (calls(8), 8, 1, Some(4), 2),
            (calls(8), 4, 1, Some(4), 0),
            (calls(2), 1, usize::MAX, Some(0), 0),
        ] {
            let own = RankCores { cores, threads, ranks };
            let (streams, why) = own.streams(topology);
            assert_eq!(streams, expected, "{own:?} {topology:?}: {why}");
        }
        let own = RankCores { cores: 2, threads: 1, ranks: None };
        let why = "0 communication streams: 2 ranks on the machine of rank 0, on 1 thread each, \
                   fill 2 cores";
        assert_eq!(own.streams(shared(2)), (0, why.to_owned()));
    }
}
