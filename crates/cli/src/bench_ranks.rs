//! `fusestep bench --ranks`: whole steps of many ranks, beside their parts alone and the memory
//! bandwidth, all in turn in one run.

use fusestep::StepOptions;
use fusestep_collective::{Collectives, Communicator, ReduceOp};
use fusestep_cpu::CpuBackend;
use fusestep_launch::LaunchLimits;
use fusestep_planner::{Comms, Plan, Topology};
use fusestep_simd::PREFETCH_DISTANCES;
use fusestep_tensor::{ParamDesc, Role, counted};
use indicatif::ProgressBar;
use serde::Serialize;

use crate::bench::args::{BenchArgs, dtypes};
use crate::bench::subject::Subject;
use crate::bench_parts::{BucketCall, Step, Streamed, Work, calls_of, own_params};
use crate::ceiling::{Ceiling, Share};
use crate::options::name_of;
use crate::output::{duration, progress, show};
use crate::planning::{agreed, planner};
use crate::timer::{MIN_SAMPLE_NS, Timer};

/// Most bytes that the ceiling's arrays have on all ranks together. Ceilings of longer steps are
/// scaled from this size.
const MOST_CEILING_BYTES: u64 = 1 << 30;

/// Most calls of a sample.
const MOST_CALLS: u32 = 1 << 12;

/// The result that `--json` prints. Times are those of the slowest rank, the best of all rounds.
#[derive(Debug, Serialize)]
struct Summary {
    parameters: usize,
    elements: u64,
    dtype: String,
    optimizer: &'static str,
    ranks: usize,
    engine: String,
    zero: u8,
    /// Threads of each rank.
    threads: usize,
    /// A whole step, from gradients that lie in their views to updated parameters. From ZeRO stage
    /// 2 on the calls that give them reduce full buckets, and count.
    ns_per_step: f64,
    /// Time of the communicator alone to reduce the buckets of gradients.
    reduce_ns: f64,
    /// Time of the updates alone, of all ranks at once.
    update_ns: f64,
    /// Time of the communicator alone to gather the parameters.
    gather_ns: f64,
    /// Bytes that all ranks together read and write for each element of the model.
    bytes_per_element: u64,
    /// Time of all ranks at once to stream as many bytes.
    ceiling_ns: f64,
    share_of_ceiling: f64,
    /// Bytes of gradients that a step copies from one place to another.
    gradient_bytes_copied: u64,
}

/// Times steps of ranks and prints what rank 0 has found.
pub(crate) fn run(
    args: &BenchArgs,
    options: &StepOptions,
    params: &[ParamDesc],
) -> anyhow::Result<()> {
    let figures = args.figures.known()?.figures(0.0);
    let options = &StepOptions { figures, ..options.clone() };
    let found = args
        .collective
        .engine
        .unwrap_or_default()
        .run(&args.collective.ranks, |comm| measure(args, options, params, comm))?;
    found.map_or(Ok(()), |summary| show(args.json, &summary))
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "{} on {}, {} of {}; {} ({}) of {}, zero stage {}",
            self.optimizer,
            counted(self.parameters as u64, "parameter"),
            counted(self.elements, "element"),
            self.dtype,
            counted(self.ranks as u64, "rank"),
            self.engine,
            counted(self.threads as u64, "thread"),
            self.zero
        )?;
        let parts = self.reduce_ns + self.update_ns + self.gather_ns;
        let rows = [
            ("step", self.ns_per_step),
            ("reduce alone", self.reduce_ns),
            ("update alone", self.update_ns),
            ("gather alone", self.gather_ns),
            ("all parts alone", parts),
            ("memory bandwidth", self.ceiling_ns),
        ];
        for (what, ns) in rows {
            writeln!(f, "  {what:<18} {:>10}", duration(ns))?;
        }
        writeln!(
            f,
            "{} an element, {} of gradients copied; share of the memory bandwidth: {}",
            counted(self.bytes_per_element, "byte"),
            counted(self.gradient_bytes_copied, "byte"),
            Share(self.share_of_ceiling)
        )
    }
}

/// Times work by the slowest rank; all ranks call it, with the same work.
fn sample(timer: &mut Timer, comms: &mut Comms<'_>, work: &mut dyn Work) -> anyhow::Result<()> {
    // All ranks have timed as much, so all of them agree on this call, too.
    if timer.is_cold() {
        work.run(comms)?;
    }
    loop {
        let mut nanoseconds = 0.0;
        for _ in 0..timer.calls {
            nanoseconds += work.run(comms)?.as_nanos() as f64;
        }
        // All see the same time, so all agree on whether it was long enough.
        let mut slowest = [nanoseconds];
        comms.communicator().all_reduce(&mut slowest, ReduceOp::Max)?;
        if slowest[0] >= MIN_SAMPLE_NS || timer.calls >= MOST_CALLS {
            timer.best = timer.best.min(slowest[0] / f64::from(timer.calls));
            return Ok(());
        }
        timer.calls *= 2;
    }
}

/// The plans whose steps and parts are timed.
struct Plans {
    whole: Plan,
    /// The plan without stages that do several things at once.
    separate: Plan,
    /// The plan of this rank's part of the model, alone.
    own: Plan,
}

impl Plans {
    fn new(
        options: &StepOptions,
        params: &[ParamDesc],
        topology: Topology,
        limits: LaunchLimits,
    ) -> anyhow::Result<Self> {
        let plan_of = |options: &StepOptions| -> anyhow::Result<Plan> {
            Ok(planner(options, params, topology, limits)?.plan_for(params, topology)?)
        };
        let separate = plan_of(&options.in_parts())?;
        let own = own_params(&separate);
        let alone = planner(&options.borrowing(), &own, Topology::SOLO, limits)?;
        Ok(Self { whole: plan_of(options)?, own: alone.plan(&own)?, separate })
    }
}

fn measure(
    args: &BenchArgs,
    options: &StepOptions,
    params: &[ParamDesc],
    comm: &mut dyn Communicator,
) -> anyhow::Result<Summary> {
    let topology = Topology::of(comm);
    let of_rank = args.threads()?.get().div_ceil(topology.world);
    let limits = args.settings.limits();
    let backend = CpuBackend::new(of_rank.try_into()?).with_limits(limits);
    let chosen = agreed(options, params, limits, comm)?;
    let options = &chosen.options;
    let plans = Plans::new(options, params, topology, limits)?;
    let plan = &plans.whole;
    let mut step = Step::new(plan, &backend, comm)?;
    let mut reduce = calls_of(&plans.separate, comm, Role::Grad)?;
    let mut gather = calls_of(&plans.separate, comm, Role::Param)?;
    let mut update = Subject::new(&plans.own, &backend)?;
    let bytes = plan.bytes_per_element() * plan.elements() / topology.world as u64;
    let most = MOST_CEILING_BYTES / topology.world as u64;
    let mut stream =
        Streamed { ceiling: Ceiling::new(&backend, &plans.own, bytes.min(most))?, index: 0 };
    let mut comms = options.comms(comm)?;
    let [mut whole, mut reduced, mut updated, mut gathered] = [(); 4].map(|()| Timer::new());
    let mut streams = PREFETCH_DISTANCES.map(|_| Timer::new());
    let is_first = topology.rank == 0;
    let bar = if is_first { progress(args.rounds as u64, "rounds") } else { ProgressBar::hidden() };
    for _ in 0..args.rounds {
        // The step is timed as often as streams are, or the ceiling would have more tries at a
        // quiet moment.
        for (index, timer) in streams.iter_mut().enumerate() {
            sample(&mut whole, &mut comms, &mut step)?;
            stream.index = index;
            sample(timer, &mut comms, &mut stream)?;
        }
        sample(&mut reduced, &mut comms, &mut reduce)?;
        sample(&mut updated, &mut comms, &mut update)?;
        sample(&mut gathered, &mut comms, &mut gather)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    let best = streams.iter().map(|timer| timer.best);
    let scale = bytes as f64 / stream.ceiling.len_bytes() as f64;
    let ceiling_ns = scale * best.fold(f64::INFINITY, f64::min);
    // A part that the plan has not takes no time, whatever the clock says.
    let of_calls =
        |timer: Timer, calls: &[BucketCall]| if calls.is_empty() { 0.0 } else { timer.best };
    Ok(Summary {
        parameters: params.len(),
        elements: plan.elements(),
        dtype: dtypes(args, params),
        optimizer: options.rule.name(),
        ranks: topology.world,
        engine: name_of(args.collective.engine.unwrap_or_default()),
        zero: plan.zero().number(),
        threads: backend.pool().threads(),
        ns_per_step: whole.best,
        reduce_ns: of_calls(reduced, &reduce),
        update_ns: updated.best,
        gather_ns: of_calls(gathered, &gather),
        bytes_per_element: plan.bytes_per_element(),
        ceiling_ns,
        share_of_ceiling: ceiling_ns / whole.best,
        gradient_bytes_copied: step.copied_bytes,
    })
}
