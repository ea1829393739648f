//! Flags of worlds and what calls cost there.

use anyhow::{Context, ensure};
use clap::Args;
use fusestep::StepOptions;
use fusestep_collective::{Costs, Link, measure};
use fusestep_planner::{CostModel, MAX_WORLD, Reach, Topology};

use crate::engine::{Engine, Ranks, Watch};
use crate::options::whole;

/// Most threads between which a link is measured.
const MOST_MEASURED: usize = 16;

/// The world that `plan` plans for.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct WorldArgs {
    /// Number of ranks
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, { MAX_WORLD as u64 }>)]
    pub(crate) world: Option<usize>,
    /// Engine that will carry the calls: ranks of `thread` and `processes` see each other's memory,
    /// ranks of an unnamed engine do not
    #[arg(long, value_enum, requires = "world")]
    pub(crate) engine: Option<Engine>,
    /// Microseconds of a call between ranks that moves next to nothing, as `fusestep check
    /// --engine` measures it
    #[arg(long, value_name = "US", default_value_t = 20.0, requires = "world")]
    pub(crate) latency_us: f64,
    /// Gigabytes of a buffer that an all-reduce gets through in a second, as `fusestep check
    /// --engine` measures them
    #[arg(long, value_name = "GB/S", default_value_t = 10.0, requires = "world")]
    pub(crate) bandwidth_gbs: f64,
    /// Gigabytes of a buffer that a reduce-scatter gets through in a second [default: twice an
    /// all-reduce's]
    #[arg(long, value_name = "GB/S", requires = "world")]
    pub(crate) scatter_gbs: Option<f64>,
    /// Gigabytes of a buffer that an all-gather gets through in a second [default: twice an
    /// all-reduce's]
    #[arg(long, value_name = "GB/S", requires = "world")]
    pub(crate) gather_gbs: Option<f64>,
    /// Gigabytes that a rank reads and writes in a second when it copies; its own copies and its
    /// update are predicted then
    #[arg(long, value_name = "GB/S", requires = "world")]
    pub(crate) memory_gbs: Option<f64>,
    /// Measure all these costs between ranks that are threads of this machine
    #[arg(long, requires = "world", conflicts_with_all = ["latency_us", "bandwidth_gbs", "scatter_gbs", "gather_gbs", "memory_gbs"])]
    pub(crate) measure: bool,
    /// Milliseconds of one backward pass, behind which calls are hidden unless --comm-streams is 0
    #[arg(long, value_name = "MS", default_value_t = 0.0, requires = "world")]
    pub(crate) backward_ms: f64,
}

impl WorldArgs {
    /// The cost model from which the step's time is predicted.
    ///
    /// # Errors
    /// Values that are no positive numbers; more ranks to measure between than a machine has room
    /// for.
    pub(crate) fn cost_model(&self, options: &StepOptions) -> anyhow::Result<CostModel> {
        let given = [
            ("--latency-us", Some(self.latency_us)),
            ("--bandwidth-gbs", Some(self.bandwidth_gbs)),
            // A backward pass may take no time, and hide nothing then.
            ("--backward-ms", Some(self.backward_ms).filter(|ms| *ms != 0.0)),
            ("--scatter-gbs", self.scatter_gbs),
            ("--gather-gbs", self.gather_gbs),
            ("--memory-gbs", self.memory_gbs),
        ];
        for (flag, value) in given {
            let right = value.is_none_or(|value| value > 0.0 && value.is_finite());
            let found = value.unwrap_or_default();
            ensure!(right, "{flag}: expected a number above 0, found {found}");
        }
        let link = |gbs: f64| Link {
            alpha_seconds: self.latency_us * 1e-6,
            beta_bytes_per_second: gbs * 1e9,
        };
        let model = if self.measure {
            CostModel::from(self.measured()?)
        } else {
            CostModel {
                scatter: self.scatter_gbs.map(link),
                gather: self.gather_gbs.map(link),
                memory_bytes_per_second: self.memory_gbs.map(|gbs| gbs * 1e9),
                ..CostModel::from(link(self.bandwidth_gbs))
            }
        };
        Ok(CostModel {
            backward_seconds: self.backward_ms * 1e-3,
            streams: options.streams(self.topology()?),
            ..model
        })
    }

    /// Rank 0 of the world that was asked for, or the only rank.
    pub(crate) fn topology(&self) -> anyhow::Result<Topology> {
        let by_calls = Topology::new(0, self.world.unwrap_or(1))?;
        let reach = match self.engine {
            Some(Engine::Thread | Engine::Processes) => Reach::SharedMemory,
            _ => Reach::Calls,
        };
        Ok(Topology { reach, ..by_calls })
    }

    fn measured(&self) -> anyhow::Result<Costs> {
        let world = self.world.unwrap_or(1);
        ensure!(
            world <= MOST_MEASURED,
            "--measure: expected a world of at most {MOST_MEASURED}, found {world}; give \
             --latency-us and --bandwidth-gbs"
        );
        let ranks = Ranks::new(Some(world), Watch::default());
        let costs = Engine::Thread.run(&ranks, |comm| measure(comm))?;
        costs.context("rank 0 has measured nothing")
    }
}
