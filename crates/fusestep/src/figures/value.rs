//! Figures of a machine: how fast its calls, its memory and its threads are.

use std::time::{SystemTime, UNIX_EPOCH};

use fusestep_collective::{Costs, Link};
use fusestep_planner::{CostModel, Reach, Topology};
use fusestep_tensor::counted;
use serde::{Deserialize, Serialize};

use super::machine;

/// Version of this library, which figures are measured with and for.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Least seconds of a call. A line through measured times may pass through zero, and calls that
/// cost nothing would be cut without end.
const LEAST_CALL_SECONDS: f64 = 1e-6;

/// Share of the best rate at which threads count as enough.
const ENOUGH: f64 = 0.97;

/// Figures of one machine, from which settings that a program leaves open are chosen:
/// [`crate::StepOptions::figures`].
///
/// `fusestep check` measures them once and keeps them in the user's cache folder. A program that
/// wants them asks by [`Figures::of_this_machine`]; nothing else reads files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Version of fusestep that measured.
    pub version: String,
    /// Day on which threads were measured, `YYYY-MM-DD`.
    pub measured: String,
    /// Name of the processor.
    pub processor: String,
    /// Number of processors that the measurement could use.
    pub processors: usize,
    /// Costs of calls and memory, for each world that was measured.
    pub worlds: Vec<WorldFigures>,
    /// Speed of memory, for each number of threads that was measured.
    pub threads: Vec<ThreadFigures>,
    /// Length of the program's backward pass, behind which calls can hide, if it is known. It is
    /// the program's and is not kept with the machine's figures.
    #[serde(skip)]
    pub backward_seconds: Option<f64>,
}

/// Costs between the ranks of one world.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorldFigures {
    /// Name of the engine.
    pub engine: String,
    /// Number of ranks.
    pub ranks: usize,
    /// Whether ranks see each other's memory.
    pub shares_memory: bool,
    /// Day of the measurement, `YYYY-MM-DD`.
    pub measured: String,
    /// Costs of calls, and of passes over memory.
    pub costs: Costs,
}

/// Speed of memory from some threads together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ThreadFigures {
    /// Number of threads.
    pub threads: usize,
    /// Bytes that they read and write per second.
    pub bytes_per_second: f64,
}

impl WorldFigures {
    /// The cost model of this world.
    pub fn model(&self) -> CostModel {
        let held =
            |link: Link| Link { alpha_seconds: link.alpha_seconds.max(LEAST_CALL_SECONDS), ..link };
        CostModel::from(Costs {
            all_reduce: held(self.costs.all_reduce),
            reduce_scatter: held(self.costs.reduce_scatter),
            all_gather: held(self.costs.all_gather),
            ..self.costs
        })
    }
}

impl Figures {
    /// Figures of this machine and day without any measurement yet.
    pub fn unmeasured() -> Self {
        Self {
            version: VERSION.to_owned(),
            measured: Self::today(),
            processor: machine::processor(),
            processors: machine::processors(),
            worlds: Vec::new(),
            threads: Vec::new(),
            backward_seconds: None,
        }
    }

    /// The day, `YYYY-MM-DD`, as figures say when they were measured.
    pub fn today() -> String {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        machine::day(since.map_or(0, |since| since.as_secs() / 86_400))
    }

    /// Adds the costs of a world, in place of those of the same engine and number of ranks.
    pub fn add(&mut self, world: WorldFigures) {
        let same = |of: &WorldFigures| of.engine == world.engine && of.ranks == world.ranks;
        self.worlds.retain(|of| !same(of));
        self.worlds.push(world);
    }

    /// The figures of the world that is nearest to this one, of those whose ranks reach each other
    /// in the same way.
    pub fn world(&self, topology: Topology) -> Option<&WorldFigures> {
        let shares_memory = topology.reach == Reach::SharedMemory;
        let alike = self.worlds.iter().filter(|of| of.shares_memory == shares_memory);
        alike.min_by_key(|of| of.ranks.abs_diff(topology.world))
    }

    /// The fewest threads, of `most` at most, that memory is as fast with as it gets; `None` where
    /// none of these were measured.
    pub fn threads(&self, most: usize) -> Option<usize> {
        let known = || self.threads.iter().filter(|of| of.threads <= most);
        let best = known().map(|of| of.bytes_per_second).fold(0.0, f64::max);
        let enough = known().filter(|of| of.bytes_per_second >= ENOUGH * best);
        enough.map(|of| of.threads).min()
    }

    /// The reason why so many threads take the place of all, as a note says it.
    pub fn text_of_threads(&self, threads: usize, all: usize) -> String {
        let threads = counted(threads as u64, "thread");
        format!(
            "{threads} in place of {all}, with which memory is as fast; measured {} by `fusestep \
             check`",
            self.measured
        )
    }

    /// These figures for a program whose backward passes take so long.
    pub fn with_backward_seconds(self, seconds: f64) -> Self {
        Self { backward_seconds: Some(seconds), ..self }
    }
}
