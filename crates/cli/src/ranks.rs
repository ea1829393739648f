//! Flags of the step of many ranks, spelled the same in each subcommand.

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::str::FromStr;

use anyhow::{Context, ensure};
use clap::Args;
use fusestep_collective::{Communicator, Costs, Link, measure};
use fusestep_planner::{
    Comms, CostModel, FuseAllReduce, FuseReduceIntoUpdate, GradientAccumulation, LocalSgd,
    MAX_WORLD, Planner, Reach, ReducedWhen, Shard, Topology, UpdateInBackward, ZeroStage,
};

use crate::engine::{Engine, Ranks, Watch};

/// Bytes of a MiB.
const MIB: f64 = 1_048_576.0;

/// Most threads between which a link is measured.
const MOST_MEASURED: usize = 16;

/// Most ranks that are run as threads or processes of one machine.
pub(crate) const MOST_RANKS: u64 = 1_024;

/// Most micro-steps of an update.
const MOST_MICRO_STEPS: u64 = 1_000_000;

/// Most communication streams of a rank, each a thread of its own.
const MOST_STREAMS: u64 = 64;

/// Reads a number from `LEAST` to `MOST`, and names both otherwise.
pub(crate) fn whole<T: FromStr, const LEAST: u64, const MOST: u64>(
    text: &str,
) -> Result<T, String> {
    let number = text.parse::<u64>().ok();
    let number = number.filter(|number| (LEAST..=MOST).contains(number));
    number
        .and_then(|_| text.parse().ok())
        .ok_or_else(|| format!("expected a number from {LEAST} to {MOST}"))
}

/// What ranks share out and how they talk.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct RankArgs {
    /// What ranks share out: 1 optimizer state, 2 gradients too, 3 parameters too
    #[arg(
        long,
        value_name = "0|1|2|3",
        default_value_t = 0,
        value_parser = clap::value_parser!(u8).range(0..=3)
    )]
    pub(crate) zero: u8,
    /// Share out among every this many consecutive ranks, in place of all; gradients are averaged
    /// within each group, then across
    #[arg(long, value_name = "N", value_parser = whole::<NonZeroUsize, 1, { u64::MAX }>)]
    pub(crate) shard_group: Option<NonZeroUsize>,
    /// Most MiB of gradients that one call reduces [default: 25]
    #[arg(long, value_name = "MIB")]
    pub(crate) bucket_cap_mib: Option<f64>,
    /// Reduce buckets on this many communication streams while gradients are still being given; 0:
    /// in the step [default: 2; 0 with --naive, and where ranks see each other's memory]
    #[arg(long, value_name = "N", alias = "rings", value_parser = whole::<usize, 0, MOST_STREAMS>)]
    pub(crate) comm_streams: Option<usize>,
    /// Reduce, update and gather one after the other, also where ranks see each other's memory and
    /// could do it in one pass
    #[arg(long = "apart")]
    pub(crate) separate: bool,
    /// Reduce and update a bucket as soon as its gradients are there, and not in the step: whoever
    /// computes them promises to read none of the bucket's parameters any more
    #[arg(long)]
    pub(crate) update_in_backward: bool,
    /// Add the gradients of this many batches before each update
    #[arg(
        long,
        value_name = "K",
        alias = "gradient-merge",
        value_parser = whole::<usize, 1, MOST_MICRO_STEPS>
    )]
    pub(crate) accumulate: Option<usize>,
    /// Reduce gradients across ranks in every batch that is added, which takes less memory and
    /// more calls; between several ranks it sums in another order, so results differ by rounding
    #[arg(long, alias = "merge-reduce-each", requires = "accumulate")]
    pub(crate) reduce_each: bool,
    /// Average parameters every this many steps in place of gradients every step
    #[arg(long, value_name = "K", value_parser = whole::<NonZeroU64, 1, { u64::MAX }>)]
    pub(crate) local_sgd: Option<NonZeroU64>,
    /// Let that number follow the loss
    #[arg(long, requires = "local_sgd")]
    pub(crate) adaptive: bool,
}

impl RankArgs {
    /// Whether any of the flags asks for the step of many ranks.
    pub(crate) fn any(&self) -> bool {
        self.zero > 0
            || self.shard_group.is_some()
            || self.bucket_cap_mib.is_some()
            || self.comm_streams.is_some()
            || self.update_in_backward
            || self.accumulate.is_some()
            || self.local_sgd.is_some()
    }

    /// Refuses to reduce apart what is not reduced: on one rank, which is what there is without the
    /// flag that `what` names.
    pub(crate) fn require_several(&self, ranks: Option<usize>, what: &str) -> anyhow::Result<()> {
        let found = match ranks {
            Some(2..) => return Ok(()),
            Some(count) => format!("expected {what} of 2 or more, found {count}"),
            None => format!("expected {what} too, found no such flag"),
        };
        ensure!(!self.separate, "--apart: {found}; one rank has nothing to reduce");
        Ok(())
    }

    /// On how many communication streams buckets are reduced: where ranks see each other's memory
    /// none, since there the reduction is part of the update and has nothing to hide behind.
    pub(crate) fn streams(&self, naive: bool, topology: Topology) -> usize {
        let default = match topology.reach {
            Reach::Calls if !naive => Comms::DEFAULT_STREAMS,
            Reach::Calls | Reach::SharedMemory => 0,
        };
        self.comm_streams.unwrap_or(default)
    }

    /// What the steps of a rank make their calls with; all ranks call it.
    ///
    /// # Errors
    /// A world that is no multiple of a shard group; no thread for a stream.
    pub(crate) fn comms<'a>(
        &self,
        comm: &'a mut dyn Communicator,
        naive: bool,
    ) -> anyhow::Result<Comms<'a>> {
        let streams = self.streams(naive, Topology::of(comm));
        Ok(match self.shard_group {
            Some(group) => Comms::in_groups(comm, group, streams)?,
            None => Comms::with_streams(comm, streams)?.reducing_when_full(),
        })
    }

    /// The planner with the passes asked for; a naive one reduces tensor by tensor.
    ///
    /// # Errors
    /// A cap that is no positive number.
    pub(crate) fn passes(
        &self,
        mut planner: Planner,
        naive: bool,
        topology: Topology,
    ) -> anyhow::Result<Planner> {
        let cap_bytes = match self.bucket_cap_mib {
            None => FuseAllReduce::DEFAULT_CAP_BYTES,
            Some(mib) => {
                ensure!(
                    mib > 0.0 && mib.is_finite(),
                    "--bucket-cap-mib: expected a number above 0, found {mib}"
                );
                (mib * MIB) as u64
            }
        };
        // One rank reduces nothing; notes that say so would only be in the way.
        if !naive && topology.world > 1 {
            planner = planner.with(FuseAllReduce::of_bytes(cap_bytes));
            if self.streams(naive, topology) == 0 && !self.separate {
                planner = planner.with(FuseReduceIntoUpdate);
            }
        }
        if self.update_in_backward {
            planner = planner.with(UpdateInBackward::of_bytes(cap_bytes));
        }
        let every = self.accumulate.and_then(|every| u32::try_from(every).ok());
        if let Some(every) = every.and_then(NonZeroU32::new) {
            let reduced =
                if self.reduce_each { ReducedWhen::PerMicroStep } else { ReducedWhen::PerWindow };
            planner = planner.with(GradientAccumulation::every(every).reduced(reduced));
        }
        if let Some(every) = self.local_sgd {
            let rule = LocalSgd::every(every);
            planner = planner.with(if self.adaptive { rule.adaptive() } else { rule });
        }
        let zero = ZeroStage::of(self.zero).unwrap_or_default();
        if zero == ZeroStage::None {
            ensure!(
                self.shard_group.is_none(),
                "--shard-group: expected --zero 1, 2 or 3, found 0; without it nothing is shared \
                 out"
            );
            return Ok(planner);
        }
        let shard = Shard::new(zero);
        Ok(planner.with(match self.shard_group {
            Some(group) => shard.group(group),
            None => shard,
        }))
    }
}

/// The world that `plan` plans for.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct WorldArgs {
    /// Number of ranks
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, { MAX_WORLD as u64 }>)]
    pub(crate) world: Option<usize>,
    /// What will carry the calls: ranks of `thread` and `processes` see each other's memory, which
    /// those of an unnamed engine do not
    #[arg(long, value_enum, requires = "world")]
    pub(crate) engine: Option<Engine>,
    #[command(flatten)]
    pub(crate) ranks: RankArgs,
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
    /// Measure all of these between ranks that are threads of this machine
    #[arg(long, requires = "world", conflicts_with_all = ["latency_us", "bandwidth_gbs", "scatter_gbs", "gather_gbs", "memory_gbs"])]
    pub(crate) measure: bool,
    /// Milliseconds of one backward pass, behind which calls are hidden unless --comm-streams is 0
    #[arg(long, value_name = "MS", default_value_t = 0.0, requires = "world")]
    pub(crate) backward_ms: f64,
}

impl WorldArgs {
    /// What the step's time is predicted from.
    ///
    /// # Errors
    /// Values that are no positive numbers; more ranks to measure between than a machine has room
    /// for.
    pub(crate) fn cost_model(&self, naive: bool) -> anyhow::Result<CostModel> {
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
            comm_streams: self.ranks.streams(naive, self.topology()?),
            ..model
        })
    }

    /// Rank 0 of the world asked for, or the only one.
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
