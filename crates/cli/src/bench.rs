//! `fusestep bench`: a step's time beside the naive plan's and the memory bandwidth, all measured
//! in turn in one run.

pub(crate) mod args;
pub(crate) mod subject;

use anyhow::Context;
use fusestep::StepOptions;
use fusestep_cpu::CpuBackend;
use fusestep_launch::{LaunchLimits, Precision};
use fusestep_planner::{Plan, TableKind, Topology};
use fusestep_simd::PREFETCH_DISTANCES;
use fusestep_tensor::{DType, ParamDesc, counted};
use serde::Serialize;

use self::args::{BenchArgs, Peer, dtypes};
use self::subject::Subject;
use crate::ceiling::{Ceiling, Share};
use crate::given_model::read_given;
use crate::options::pool;
use crate::output::{detail, duration, progress, show};
use crate::peers::{self, CandlePair, CandleTimes};
use crate::planning::planner;
use crate::{bench_collective, bench_ranks};

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
    let mut params = read_given(model, args.dtype)?.params;
    args.optimizer.check(&args.settings, &params)?;
    let rule = args.optimizer.rule()?;
    let options = args.settings.of_model(rule, &mut params)?;
    if args.peer.is_some() {
        peers::plain_adamw(args, rule, "--peer candle", &[])?;
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
    let bar = progress(args.rounds as u64, "rounds");
    for round in 1..=args.rounds {
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
        bar.inc(1);
        detail(&format!("round {round}: {} a step at best", duration(ours.timer.best)));
    }
    bar.finish_and_clear();

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
            "{} on {}, {} of {}; {}, {}",
            self.optimizer,
            counted(self.parameters as u64, "parameter"),
            counted(self.elements, "element"),
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
        writeln!(f, "share of the memory bandwidth: {}", Share(self.share_of_ceiling))
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
