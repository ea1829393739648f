//! `fusestep verify`: whether steps of a model's shapes have the same bits at any number of ranks.

pub(crate) mod args;
mod drawn;
mod started;
mod summary;

use std::num::NonZeroUsize;
use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use fusestep::{Session, StepOptions};
use fusestep_collective::{Collectives, Communicator, ReduceOp};
use fusestep_cpu::CpuBackend;
use fusestep_launch::LaunchLimits;
use fusestep_planner::{Plan, Topology};
use fusestep_tensor::ParamDesc;

use self::args::VerifyArgs;
use self::drawn::{Drawn, Place, room};
use self::summary::{Ended, Summary, one_hash, rank_order_hashes};
use crate::engine::{Engine, Ranks, Watch};
use crate::given_model::read_given;
use crate::inputs::dtype_names;
use crate::options::{name_of, threads};
use crate::output::{print, print_json};
use crate::planning::told;
use crate::values::params_hash;

/// Steps that every rank makes, at every stage.
struct Asked<'a> {
    options: &'a StepOptions,
    limits: LaunchLimits,
    params: &'a [ParamDesc],
    stages: &'a [u8],
    steps: usize,
    drawn: Drawn,
    /// Threads of all ranks together.
    threads: NonZeroUsize,
}

/// Runs every world on every engine, a row of the table after the other, and compares.
pub(crate) fn run(args: &VerifyArgs) -> anyhow::Result<()> {
    let mut params = read_given(&args.model, args.dtype)?.params;
    args.optimizer.check(&args.settings, &params)?;
    let options = args.settings.of_model(args.optimizer.rule()?, &mut params)?;
    let worlds = args.worlds(&options)?;
    let stages = args.stages(&options, &worlds)?;
    let asked = Asked {
        options: &options,
        limits: args.settings.limits(),
        params: &params,
        stages: &stages,
        steps: args.steps,
        drawn: Drawn { seed: args.seed },
        threads: threads(args.threads)?,
    };
    if let Some(path) = &args.results {
        return asked.as_process(path);
    }
    let mut summary = Summary {
        parameters: params.len(),
        elements: params.iter().map(ParamDesc::numel).sum(),
        dtype: dtype_names(&params, args.dtype),
        optimizer: options.rule.name(),
        lanes: options.lanes.unwrap_or_default(),
        micro_batches: options.micro_batches(),
        steps: args.steps,
        seed: args.seed,
        params_hash: None,
        rank_order_hashes: 0,
        runs: Vec::new(),
    };
    let engines = args.engines()?;
    let show = |text: String| if args.json { Ok(()) } else { print(&text) };
    show(summary.head())?;
    for engine in engines {
        for world in &worlds {
            let runs = match engine {
                Engine::Processes => started::runs(*world)?,
                engine => asked.on_threads(*engine, *world)?,
            };
            show(runs.iter().map(Ended::to_string).collect())?;
            summary.runs.extend(runs);
        }
    }
    summary.rank_order_hashes = rank_order_hashes(&summary.runs);
    let hash = one_hash(&summary.runs, args.expect.as_deref()).map(str::to_owned);
    summary.params_hash = hash.as_ref().ok().cloned();
    if args.json {
        print_json(&summary)?;
    }
    show(summary.end(&hash?))
}

/// Steps of one run.
struct Timed {
    params_hash: String,
    ns_per_step: f64,
    peak_sums: usize,
    memory_bytes: u64,
}

impl Asked<'_> {
    /// All stages on a world of threads.
    fn on_threads(&self, engine: Engine, world: usize) -> anyhow::Result<Vec<Ended>> {
        let ranks = Ranks::new(Some(world), Watch::default());
        let ended = engine.run(&ranks, |comm| self.stages(engine, comm))?;
        ended.context("rank 0 has ended without a result")
    }

    /// All stages as one process of a world; rank 0 writes the runs.
    fn as_process(&self, path: &Path) -> anyhow::Result<()> {
        let (engine, ranks) = (Engine::Processes, Ranks::new(None, Watch::default()));
        match engine.run(&ranks, |comm| self.stages(engine, comm))? {
            Some(runs) => started::write(path, &runs),
            None => Ok(()),
        }
    }

    /// Trains at every stage, with lanes and in rank order.
    fn stages(&self, engine: Engine, comm: &mut dyn Communicator) -> anyhow::Result<Vec<Ended>> {
        let world = comm.world_size();
        let each = self.stages.iter().map(|&zero| {
            let options = StepOptions { zero, ..self.options.clone() };
            let with_lanes = self.train(&options, comm)?;
            let without = options.in_rank_order(world);
            let without = without.filter(|options| options.check(world).is_ok());
            let beside = without.map(|options| self.train(&options, comm)).transpose()?;
            let ns_per_step = with_lanes.ns_per_step;
            Ok(Ended {
                world,
                zero,
                engine: name_of(engine),
                params_hash: with_lanes.params_hash,
                ns_per_step,
                rank_order_ns_per_step: beside.as_ref().map(|run| run.ns_per_step),
                times_rank_order: beside.as_ref().map(|run| ns_per_step / run.ns_per_step),
                rank_order_hash: beside.map(|run| run.params_hash),
                peak_sums: with_lanes.peak_sums,
                memory_bytes: with_lanes.memory_bytes,
            })
        });
        each.collect()
    }

    /// Trains all steps as one rank of `comm`.
    fn train(&self, options: &StepOptions, comm: &mut dyn Communicator) -> anyhow::Result<Timed> {
        let of_rank = self.threads.get().div_ceil(comm.world_size());
        let backend = CpuBackend::new(of_rank.try_into()?).with_limits(self.limits);
        let session = Session::on(options, self.params, Box::new(backend), comm);
        let mut session = session.map_err(told)?;
        for (number, param) in self.params.iter().enumerate() {
            session.write_param(&param.name, &self.drawn.first(param, number)?)?;
        }
        session.meet()?;
        let gradients: Result<Vec<Vec<u8>>, _> = self.params.iter().map(room).collect();
        let (mut gradients, mut times) = (gradients?, Vec::new());
        for step in 0..self.steps {
            times.push(self.step(&mut session, step, &mut gradients)?);
        }
        session.compare_parameters()?;
        // The slowest rank's times, and the most that a rank keeps.
        times.push(session.plan().memory_bytes() as f64);
        session.communicator().all_reduce(&mut times, ReduceOp::Max)?;
        let memory_bytes = times.pop().unwrap_or_default() as u64;
        Ok(Timed {
            params_hash: params_hash(&mut session)?,
            ns_per_step: times.into_iter().fold(f64::INFINITY, f64::min),
            peak_sums: peak_sums(session.plan()),
            memory_bytes,
        })
    }

    /// Makes one step with all micro-batches of this rank; returns its time without that in which
    /// `gradients` are drawn.
    fn step(
        &self,
        session: &mut Session<'_>,
        step: usize,
        gradients: &mut [Vec<u8>],
    ) -> anyhow::Result<f64> {
        let Topology { rank, .. } = session.plan().topology();
        let own = u64::from(session.plan().micro_steps());
        let before = step as u64 * self.options.micro_batches();
        let mut nanoseconds = 0.0;
        for number in 0..own {
            session.begin_step()?;
            let in_rank_order = rank as u64 * own + number;
            let micro_batch = before + session.state().micro_batch().unwrap_or(in_rank_order);
            let scale = session.loss_scale();
            for (at, bytes) in gradients.iter_mut().enumerate() {
                let place = Place { micro_batch, param: at, params: self.params.len() };
                self.drawn.gradient(place, self.params[at].dtype, scale, bytes);
            }
            // Ranks meet in their last micro-step, and none waits there for gradients of another.
            if number + 1 == own {
                meet(session)?;
            }
            let begun = Instant::now();
            // The last layer's gradients come first, as a backward pass finds them.
            for (param, bytes) in self.params.iter().zip(&*gradients).rev() {
                session.push_grad_bytes(&param.name, bytes)?;
            }
            session.step()?;
            nanoseconds += begun.elapsed().as_nanos() as f64;
        }
        Ok(nanoseconds)
    }
}

/// Waits for all ranks within a step. The call belongs to the plan, also on ranks that have made no
/// micro-step of it yet.
fn meet(session: &mut Session<'_>) -> anyhow::Result<()> {
    let plan_hash = session.plan().hash();
    session.run().comms_mut().set_plan(plan_hash);
    Ok(session.communicator().barrier()?)
}

/// Most sums of one gradient that a rank keeps at once: the gradient itself is one.
fn peak_sums(plan: &Plan) -> usize {
    (0..plan.topology().world).map(|rank| plan.lane_slots(rank)).max().unwrap_or_default().max(1)
}
