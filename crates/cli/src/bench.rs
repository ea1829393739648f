//! `fusestep bench`: a step's time beside the naive plan's and the memory bandwidth, all measured
//! in turn in one run.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::{Args, Id, ValueEnum};
use fusestep::StepOptions;
use fusestep_coalesce::{CoalesceError, zeroed_bytes};
use fusestep_cpu::CpuBackend;
use fusestep_launch::{LaunchLimits, Precision};
use fusestep_planner::{Plan, State, TableKind, Topology};
use fusestep_simd::PREFETCH_DISTANCES;
use fusestep_tensor::{DType, ParamDesc, Role, counted};
use half::{bf16, f16};
use serde::Serialize;

use crate::bench_collective::{self, CollectiveArgs};
use crate::bench_ranks;
use crate::ceiling::Ceiling;
use crate::engine::Engine;
use crate::inputs::read_model;
use crate::options::{param_dtype, parse_threads, pool, threads};
use crate::output::{duration, show};
use crate::peers::{self, CandlePair, CandleTimes};
use crate::ranks::whole;
use crate::rules::OptimizerArgs;
use crate::settings::{self, Settings, ids_of_ranks, planner};
use crate::timer::Timer;

/// Most rounds.
const MOST_ROUNDS: u64 = 1_000_000;

/// Headings in the help, for flags that only some of the timed steps know.
const OF_COLLECTIVES: &str = "Options of --collective, without a model";
const OF_ALL_RANKS: &str =
    "Options of ranks, with --ranks or --engine: of their steps and of --collective";
const OF_STEPS_OF_RANKS: &str =
    "Options of steps of ranks, 2 without --ranks; not with --collective";
const OF_ONE_PROCESS: &str =
    "Options of steps of one process, without --ranks and other options of ranks";

/// Groups the flags of `bench` in its help by what they go together with.
pub(crate) fn with_headings(command: clap::Command) -> clap::Command {
    let command = headed(command, ids::<CollectiveArgs>(), OF_ALL_RANKS);
    let command = headed(command, ["collective", "sizes"].map(Id::from).into(), OF_COLLECTIVES);
    let command = headed(command, ids_of_ranks::<settings::Bench>(), OF_STEPS_OF_RANKS);
    let command = headed(command, ids::<peers::PeerArgs>(), OF_ONE_PROCESS);
    headed(command, [Id::from("peer")].into(), OF_ONE_PROCESS)
}

fn ids<A: Args>() -> Vec<Id> {
    let command = A::augment_args(clap::Command::new("flags"));
    command.get_arguments().map(|arg| arg.get_id().clone()).collect()
}

fn headed(command: clap::Command, flags: Vec<Id>, heading: &'static str) -> clap::Command {
    let put = |command: clap::Command, flag| command.mut_arg(flag, |arg| arg.help_heading(heading));
    flags.into_iter().fold(command, put)
}

/// Flags of `bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// A model (.safetensors, or the .safetensors.index.json of several files), or its shapes
    /// (.json)
    #[arg(required_unless_present = "collective", conflicts_with = "collective")]
    pub(crate) model: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) collective: CollectiveArgs,
    #[command(flatten)]
    pub(crate) optimizer: OptimizerArgs,
    #[command(flatten)]
    pub(crate) settings: Settings<settings::Bench>,
    /// Threads, of all ranks together, 256 at most [default: RAYON_NUM_THREADS, which is held to
    /// the same; all processors if it is not set, empty or 0]
    #[arg(long, value_parser = parse_threads)]
    threads: Option<NonZeroUsize>,
    /// Element type of shapes that state none [default: f32]
    #[arg(long, value_parser = param_dtype())]
    pub(crate) dtype: Option<DType>,
    /// Rounds; each times everything in turn, and the best of each counts
    #[arg(long, value_name = "N", default_value = "5", value_parser = whole::<usize, 1, MOST_ROUNDS>)]
    pub(crate) rounds: usize,
    /// Also time another implementation on the same shapes, and ours in its place
    #[arg(long, value_enum)]
    peer: Option<Peer>,
    #[command(flatten)]
    pub(crate) peers: peers::PeerArgs,
    /// Print the numbers as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

impl BenchArgs {
    /// The engine that carries calls between ranks, if there are any.
    pub(crate) fn engine(&self) -> Option<Engine> {
        let calls = self.collective.collective.is_some() || self.of_ranks();
        calls.then(|| self.collective.engine.unwrap_or_default())
    }

    /// Whether steps of many ranks are timed.
    fn of_ranks(&self) -> bool {
        let CollectiveArgs { ranks, engine, .. } = &self.collective;
        let asked = ranks.ranks.is_some() || ranks.meet() || engine.is_some();
        asked || self.settings.asks_for_ranks()
    }

    /// Refuses flags that the timed steps do not know.
    fn check(&self) -> anyhow::Result<()> {
        if self.of_ranks() {
            if let Some(count) = self.collective.ranks.ranks {
                self.settings.require_several(Some(count), "--ranks")?;
            }
            ensure!(
                self.peer.is_none() && !self.peers.peers,
                "--peer, --peers: expected no flag of ranks beside them, such as --ranks, \
                 --engine and --zero, found one"
            );
            return Ok(());
        }
        self.collective.ranks.require_none("--ranks or --collective")
    }

    /// The threads asked for, or all of the machine.
    pub(crate) fn threads(&self) -> anyhow::Result<NonZeroUsize> {
        threads(self.threads)
    }
}

/// Implementations to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Peer {
    /// candle_nn::AdamW, beside fusestep_candle::AdamW on variables of the same shapes
    Candle,
}

/// The result that `--json` prints. Times are the best of all rounds.
#[derive(Debug, Serialize)]
struct BenchSummary {
    parameters: usize,
    elements: u64,
    /// Dtypes of the parameters.
    dtype: String,
    optimizer: &'static str,
    simd: &'static str,
    threads: usize,
    launches: usize,
    naive_launches: usize,
    ns_per_step: f64,
    naive_ns_per_step: f64,
    /// Time of the rule on parameters and state of f32, in the same run; absent if these were asked
    /// for.
    #[serde(skip_serializing_if = "Option::is_none")]
    f32_ns_per_step: Option<f64>,
    /// This step's time over that of the f32 step.
    #[serde(skip_serializing_if = "Option::is_none")]
    times_f32_step: Option<f64>,
    /// Memory traffic of a step.
    bytes_per_step: u64,
    gb_per_s: f64,
    /// The best bandwidth of a stream of as many bytes in this run.
    ceiling_gb_per_s: f64,
    ceiling_prefetch_bytes: usize,
    /// Arrays that the ceiling's stream reads and writes: as many as the step has lists.
    ceiling_reads: usize,
    ceiling_writes: usize,
    share_of_ceiling: f64,
    #[serde(flatten)]
    candle: Option<CandleTimes>,
}

pub(crate) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    if let Some(collective) = args.collective.collective {
        return bench_collective::run(&args.collective, collective, args.json);
    }
    args.check()?;
    let model =
        args.model.as_deref().context("a model, which the flags require without a collective")?;
    let mut params = read_model(model, args.dtype)?.params;
    args.optimizer.require_excluded(args.settings.exclude())?;
    let rule = args.optimizer.rule()?;
    let options = args.settings.of_model(rule, &mut params)?;
    if args.peer.is_some() {
        peers::plain_adamw(args, rule, "--peer candle")?;
    }
    if args.of_ranks() {
        return bench_ranks::run(args, &options, &params);
    }
    if args.peers.peers {
        return peers::run(args, &options, &params);
    }
    bench_one(args, &options, &params)
}

/// Times a step of one rank.
fn bench_one(args: &BenchArgs, options: &StepOptions, params: &[ParamDesc]) -> anyhow::Result<()> {
    let (rule, limits) = (options.rule, args.settings.limits());
    let backend = CpuBackend::in_pool(pool(args.threads)?).with_limits(limits);
    let plans = Plans::new(options, params, limits)?;
    let plan = &plans.fused;
    let mut ours = Subject::new(plan, &backend)?;
    let mut unfused = Subject::new(&plans.naive, &backend)?;
    let wide = plans.wide.as_ref();
    let mut f32_step = wide.map(|wide| Subject::new(wide, &backend)).transpose()?;
    let mut ceiling = Ceiling::new(&backend, plan, plan.traffic_bytes())?;
    let pair = |Peer::Candle| CandlePair::new(params, rule, args.threads);
    let mut candle = args.peer.map(pair).transpose()?;
    for _ in 0..args.rounds {
        // The step is timed as often as streams are, or the ceiling would have more tries at a
        // quiet moment.
        for stream in 0..PREFETCH_DISTANCES.len() {
            for subject in [&mut ours, &mut unfused].into_iter().chain(&mut f32_step) {
                subject.sample()?;
            }
            ceiling.sample(stream);
        }
        if let Some(candle) = &mut candle {
            candle.sample()?;
        }
    }

    let traffic = plan.traffic_bytes();
    let (ceiling_prefetch_bytes, ceiling_gb_per_s) = ceiling.best();
    let gb_per_s = traffic as f64 / ours.timer.best;
    let summary = BenchSummary {
        parameters: params.len(),
        elements: plan.elements(),
        dtype: dtypes(args, params),
        optimizer: rule.name(),
        simd: backend.level().name(),
        threads: backend.pool().threads(),
        launches: plan.host_launches(),
        naive_launches: plans.naive.host_launches(),
        ns_per_step: ours.timer.best,
        naive_ns_per_step: unfused.timer.best,
        f32_ns_per_step: f32_step.as_ref().map(|subject| subject.timer.best),
        times_f32_step: f32_step.map(|subject| ours.timer.best / subject.timer.best),
        bytes_per_step: traffic,
        gb_per_s,
        ceiling_gb_per_s,
        ceiling_prefetch_bytes,
        ceiling_reads: ceiling.reads(),
        ceiling_writes: ceiling.writes(),
        share_of_ceiling: gb_per_s / ceiling_gb_per_s,
        candle: candle.map(CandlePair::times),
    };
    show(args.json, &summary)
}

impl std::fmt::Display for BenchSummary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "{} on {}, {} elements of {}; {}, {}",
            self.optimizer,
            counted(self.parameters as u64, "parameter"),
            self.elements,
            self.dtype,
            counted(self.threads as u64, "thread"),
            self.simd
        )?;
        let mut row = |what: &str, ns: f64, more: String| {
            writeln!(f, "  {what:<22} {:>10}  {more}", duration(ns))
        };
        let launches =
            format!("{:.1} GB/s, {}", self.gb_per_s, counted(self.launches as u64, "launch"));
        row("step", self.ns_per_step, launches)?;
        let launches = counted(self.naive_launches as u64, "launch");
        row("naive plan", self.naive_ns_per_step, launches)?;
        if let (Some(ns), Some(times)) = (self.f32_ns_per_step, self.times_f32_step) {
            row("same with all in f32", ns, format!("{times:.3} of its time"))?;
        }
        let ceiling_ns = self.bytes_per_step as f64 / self.ceiling_gb_per_s;
        let gb = format!(
            "{:.1} GB/s, {} and {}",
            self.ceiling_gb_per_s,
            counted(self.ceiling_reads as u64, "read"),
            counted(self.ceiling_writes as u64, "write")
        );
        row("memory bandwidth", ceiling_ns, gb)?;
        if let Some(candle) = &self.candle {
            row("candle's AdamW", candle.candle_ns_per_step, String::new())?;
            let faster = format!("{:.1} times faster", candle.times_faster_than_candle);
            row("ours in its place", candle.candle_adapter_ns_per_step, faster)?;
        }
        writeln!(f, "share of ceiling: {:.3}", self.share_of_ceiling)
    }
}

/// A plan with its state.
pub(crate) struct Subject<'a> {
    plan: &'a Plan,
    backend: &'a CpuBackend,
    state: State,
    pub(crate) timer: Timer,
}

impl<'a> Subject<'a> {
    pub(crate) fn new(plan: &'a Plan, backend: &'a CpuBackend) -> anyhow::Result<Self> {
        let mut state = plan.allocate(backend)?;
        for param in plan.params() {
            for (role, value) in [(Role::Param, 0.1), (Role::Grad, 0.01)] {
                let bytes = filled(param, value)?;
                state.write(backend, role, &param.name, &bytes)?;
            }
        }
        Ok(Self { plan, backend, state, timer: Timer::new() })
    }

    pub(crate) fn run(&mut self) -> anyhow::Result<()> {
        self.plan.run(&mut self.state, self.backend)?;
        Ok(())
    }

    pub(crate) fn sample(&mut self) -> anyhow::Result<()> {
        let (plan, state, backend) = (self.plan, &mut self.state, self.backend);
        self.timer.sample(|| plan.run(state, backend).map(drop)).map_err(Into::into)
    }
}

/// The plans that take turns.
struct Plans {
    fused: Plan,
    naive: Plan,
    /// The plan with all in f32, to show what 16 bits save; `None` if that was asked for.
    wide: Option<Plan>,
}

impl Plans {
    fn new(
        options: &StepOptions,
        params: &[ParamDesc],
        limits: LaunchLimits,
    ) -> anyhow::Result<Self> {
        let planned = |options: &StepOptions, params: &[ParamDesc]| -> anyhow::Result<Plan> {
            Ok(planner(options, params, Topology::SOLO, limits)?.plan(params)?)
        };
        let fused = planned(options, params)?;
        let of_launches = StepOptions { tables: TableKind::default(), ..options.clone() };
        let naive = planned(&StepOptions { naive: true, ..of_launches.clone() }, params)?;
        let compared = fused.precision(DType::F32) != Precision::default()
            || params.iter().any(|param| param.dtype != DType::F32);
        let wide = if compared {
            let in_f32 = params.iter().cloned();
            let in_f32 = in_f32.map(|param| ParamDesc { dtype: DType::F32, ..param });
            let options = StepOptions {
                naive: false,
                precision: Precision::default(),
                precision_of: Vec::new(),
                ..of_launches
            };
            Some(planned(&options, &in_f32.collect::<Vec<_>>())?)
        } else {
            None
        };
        Ok(Self { fused, naive, wide })
    }
}

/// The names of the parameters' dtypes; without parameters, the dtype that they would have.
pub(crate) fn dtypes(args: &BenchArgs, params: &[ParamDesc]) -> String {
    let mut names: Vec<&str> = params.iter().map(|param| param.dtype.name()).collect();
    names.sort_unstable();
    names.dedup();
    if names.is_empty() {
        args.dtype.unwrap_or(DType::F32).name().to_owned()
    } else {
        names.join(" and ")
    }
}

/// A parameter's bytes, every element `value`.
pub(crate) fn filled(param: &ParamDesc, value: f64) -> Result<Vec<u8>, CoalesceError> {
    let mut bytes = zeroed_bytes(param.numel() as usize * param.dtype.len_bytes())?;
    let element: &[u8] = match param.dtype {
        DType::F64 => &value.to_le_bytes(),
        DType::F16 => &f16::from_f64(value).to_le_bytes(),
        DType::BF16 => &bf16::from_f64(value).to_le_bytes(),
        _ => &(value as f32).to_le_bytes(),
    };
    for place in bytes.chunks_exact_mut(element.len()) {
        place.copy_from_slice(element);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use clap::{Arg, FromArgMatches};

    use super::*;

    fn parser() -> clap::Command {
        with_headings(BenchArgs::augment_args(clap::Command::new("bench")))
    }

    /// Whether `bench` takes these flags together.
    fn takes(args: &[String]) -> bool {
        let all = ["bench"].into_iter().chain(args.iter().map(String::as_str));
        let matches = parser().try_get_matches_from(all);
        let args = matches.and_then(|matches| BenchArgs::from_arg_matches(&matches));
        args.is_ok_and(|args| args.collective.collective.is_some() || args.check().is_ok())
    }

    /// The flag with a value that it takes, and the flags that it asks for.
    fn given(arg: &Arg) -> Vec<String> {
        let own = format!("--{}", arg.get_long().unwrap());
        let possible = arg.get_possible_values().into_iter().next();
        let other = match arg.get_id().as_str() {
            "sizes" => "4KiB",
            "schedule" => "constant",
            "lr_scale" | "weight_decay_of" => "w=1",
            "trust_of" => "w=plain",
            _ => "1",
        };
        let value = possible.map_or(other.to_owned(), |value| value.get_name().to_owned());
        let mut all = vec![own.clone()];
        all.extend(arg.get_action().takes_values().then_some(value));
        let with: &[&str] = match arg.get_id().as_str() {
            "python" | "report" | "svg" => &["--peers"],
            "meet" => &["--rank", "1"],
            "rank" | "gpu" => &["--meet", "folder", "--rank", "1"],
            _ => &[],
        };
        let with = with.chunks(if with == ["--peers"] { 1 } else { 2 });
        let with = with.filter(|flag| flag[0] != own).flatten();
        all.extend(with.map(|&text| text.to_owned()));
        all
    }

    #[test]
    fn the_help_lists_each_flag_where_it_is_taken() {
        for arg in parser().get_arguments().filter(|arg| arg.get_long().is_some()) {
            let given = given(arg);
            let beside = |more: &[&str]| {
                let more = more.iter().map(|&text| text.to_owned());
                takes(&more.chain(given.iter().cloned()).collect::<Vec<_>>())
            };
            let ranks = if arg.get_id() == "ranks" { &[][..] } else { &["--ranks", "2"] };
            let of_collective: &[&str] = match arg.get_id().as_str() {
                "collective" => &[],
                _ => &["--collective", "all-reduce"],
            };
            let found = (
                beside(&["model.json"]),
                beside(&[&["model.json"], ranks].concat()),
                beside(of_collective),
            );
            let expected = match arg.get_help_heading() {
                _ if arg.is_hide_set() => (false, false, false),
                Some(OF_COLLECTIVES) => (false, false, true),
                Some(settings::HEADING) => (true, true, false),
                Some(OF_ALL_RANKS) => (found.0, true, true),
                Some(OF_STEPS_OF_RANKS) => (true, true, false),
                Some(OF_ONE_PROCESS) => (true, false, found.2),
                // Those of a model's step; threads, rounds and --json of collectives, too.
                None => (true, true, found.2),
                heading => panic!("{heading:?}"),
            };
            assert_eq!(found, expected, "{given:?} under {:?}", arg.get_help_heading());
        }
    }
}
