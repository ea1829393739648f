//! Flags of worlds and what calls cost there.

use anyhow::{Context, ensure};
use clap::Args;
use fusestep::{Chosen, StepOptions};
use fusestep_collective::{Costs, Link, measure};
use fusestep_planner::{CostModel, MAX_WORLD, Reach, Topology};

use crate::engine::{Engine, Ranks, Watch};
use crate::options::{number, whole};

/// Most threads between which a link is measured.
const MOST_MEASURED: usize = 16;

/// Microseconds of a call where nobody has measured it.
const LATENCY_US: f64 = 20.0;

/// Gigabytes of an all-reduce in a second where nobody has measured it.
const BANDWIDTH_GBS: f64 = 10.0;

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
    /// --engine` measures it [default: this machine's figures; 20 without any, or beside another
    /// of these flags]
    #[arg(long, value_name = "US", requires = "world", value_parser = number)]
    pub(crate) latency_us: Option<f64>,
    /// Gigabytes of a buffer that an all-reduce gets through in a second, as `fusestep check
    /// --engine` measures them [default: this machine's figures; 10 without any, or beside another
    /// of these flags]
    #[arg(long, value_name = "GB/S", requires = "world", value_parser = number)]
    pub(crate) bandwidth_gbs: Option<f64>,
    /// Gigabytes of a buffer that a reduce-scatter gets through in a second [default: twice an
    /// all-reduce's]
    #[arg(long, value_name = "GB/S", requires = "world", value_parser = number)]
    pub(crate) scatter_gbs: Option<f64>,
    /// Gigabytes of a buffer that an all-gather gets through in a second [default: twice an
    /// all-reduce's]
    #[arg(long, value_name = "GB/S", requires = "world", value_parser = number)]
    pub(crate) gather_gbs: Option<f64>,
    /// Gigabytes that a rank reads and writes in a second when it copies; its own copies and its
    /// update are predicted then
    #[arg(long, value_name = "GB/S", requires = "world", value_parser = number)]
    pub(crate) memory_gbs: Option<f64>,
    /// Measure all these costs between ranks that are threads of this machine
    #[arg(long, requires = "world", conflicts_with_all = ["latency_us", "bandwidth_gbs", "scatter_gbs", "gather_gbs", "memory_gbs"])]
    pub(crate) measure: bool,
    /// Milliseconds of one backward pass, behind which calls are hidden unless --comm-streams is 0
    #[arg(long, value_name = "MS", default_value_t = 0.0, requires = "world", value_parser = number)]
    pub(crate) backward_ms: f64,
}

impl WorldArgs {
    /// The cost model from which the step's time is predicted.
    ///
    /// # Errors
    /// Values that are no positive numbers; more ranks to measure between than a machine has room
    /// for.
    pub(crate) fn cost_model(
        &self,
        options: &StepOptions,
        chosen: &Chosen,
    ) -> anyhow::Result<CostModel> {
        let given = [
            ("--latency-us", self.latency_us),
            ("--bandwidth-gbs", self.bandwidth_gbs),
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
            alpha_seconds: self.latency_us.unwrap_or(LATENCY_US) * 1e-6,
            beta_bytes_per_second: gbs * 1e9,
        };
        let topology = self.topology()?;
        let rates = [self.bandwidth_gbs, self.scatter_gbs, self.gather_gbs, self.memory_gbs];
        let is_given = self.latency_us.is_some() || rates.iter().any(Option::is_some);
        let figures = options.figures.as_ref().filter(|_| !is_given);
        let model = if self.measure {
            CostModel::from(self.measured()?)
        } else if let Some(world) = figures.and_then(|figures| figures.world(topology)) {
            world.model()
        } else {
            CostModel {
                scatter: self.scatter_gbs.map(link),
                gather: self.gather_gbs.map(link),
                memory_bytes_per_second: self.memory_gbs.map(|gbs| gbs * 1e9),
                ..CostModel::from(link(self.bandwidth_gbs.unwrap_or(BANDWIDTH_GBS)))
            }
        };
        Ok(CostModel {
            backward_seconds: self.backward_ms * 1e-3,
            streams: chosen.options.streams(topology),
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
