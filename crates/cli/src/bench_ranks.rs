//! `fusestep bench --ranks`: whole steps of many ranks, beside their parts alone and the memory bandwidth, all in turn in one run.

use std::time::Instant;

use anyhow::ensure;
use fusestep_coalesce::HostMemory;
use fusestep_collective::{
    Buffers, Call, CollectiveError, Collectives, Communicator, Operation, ReduceOp,
};
use fusestep_cpu::CpuBackend;
use fusestep_planner::{
    Comms, GatheredLists, Optimizer, Plan, Planner, Reduced, Stage, State, StorageSpec, Topology,
    ZeroStage,
};
use fusestep_simd::PREFETCH_DISTANCES;
use fusestep_tensor::{DType, ParamDesc, Role, Shape};
use half::{bf16, f16};
use serde::Serialize;

use crate::bench::{BenchArgs, filled};
use crate::ceiling::Ceiling;
use crate::output::{duration, print, print_json};
use crate::ranks::{Fused, MOST_RANKS, RankArgs};
use crate::timer::MIN_SAMPLE_NS;

/// Most bytes that the ceiling's arrays have on all ranks together; longer steps are scaled from them.
const MOST_CEILING_BYTES: u64 = 1 << 30;

/// Most calls of a sample.
const MOST_CALLS: u32 = 1 << 12;

/// What every gradient is.
const GRADIENT: f64 = 0.01;

/// What `--json` prints. Times are those of the slowest rank, the best of all rounds.
#[derive(Debug, Serialize)]
struct Summary {
    parameters: usize,
    elements: u64,
    dtype: &'static str,
    optimizer: &'static str,
    ranks: usize,
    engine: &'static str,
    zero: u8,
    /// Threads of each rank.
    threads: usize,
    /// A whole step, from gradients that lie in their views to updated parameters.
    ns_per_step: f64,
    /// The same buckets reduced by the communicator alone.
    reduce_ns: f64,
    /// The updates alone, of all ranks at once.
    update_ns: f64,
    /// The parameters gathered by the communicator alone.
    gather_ns: f64,
    /// Bytes that all ranks together read and write for each element of the model.
    bytes_per_element: u64,
    /// As many bytes streamed by all ranks at once.
    ceiling_ns: f64,
    share_of_ceiling: f64,
    /// Bytes of gradients that a step copies from one place to another.
    gradient_bytes_copied: u64,
}

/// Times steps of ranks and prints what rank 0 has found.
pub(crate) fn run(args: &BenchArgs, rule: Optimizer, params: &[ParamDesc]) -> anyhow::Result<()> {
    let ranks = &args.rank_args;
    ensure!(
        ranks.accumulate.is_none() && ranks.local_sgd.is_none() && ranks.shard_group.is_none(),
        "--accumulate, --local-sgd, --shard-group: expected none of them, found one; whole steps of all ranks are timed"
    );
    let count = args.collective.ranks.count();
    ensure!(
        count <= MOST_RANKS,
        "--ranks: expected at most {MOST_RANKS}, found {count}"
    );
    let engine = args.collective.engine;
    let found = engine.run(&args.collective.ranks, |comm| {
        measure(args, rule, params, comm)
    })?;
    let Some(summary) = found else {
        return Ok(());
    };
    if args.json {
        return print_json(&summary);
    }
    print(&summary.to_string())
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "{} on {} parameters, {} elements of {}; {} ranks ({}) of {} threads, zero stage {}",
            self.optimizer,
            self.parameters,
            self.elements,
            self.dtype,
            self.ranks,
            self.engine,
            self.threads,
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
            "{} bytes an element, {} bytes of gradients copied; share of ceiling: {:.3}",
            self.bytes_per_element, self.gradient_bytes_copied, self.share_of_ceiling
        )
    }
}

/// What is timed in turn.
trait Work {
    /// What comes before every call, off the clock.
    fn prepare(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    /// What is timed, on all ranks at once.
    fn call(&mut self, comms: &mut Comms<'_>) -> anyhow::Result<()>;
}

/// The best time of the slowest rank so far.
struct RankTimer {
    best: f64,
    /// Calls of one sample, so that it lasts long enough.
    calls: u32,
}

impl RankTimer {
    fn new() -> Self {
        Self {
            best: f64::INFINITY,
            calls: 1,
        }
    }

    /// All ranks call it, with the same work.
    fn sample(&mut self, comms: &mut Comms<'_>, work: &mut dyn Work) -> anyhow::Result<()> {
        loop {
            let mut nanoseconds = 0.0;
            for _ in 0..self.calls {
                work.prepare()?;
                comms.communicator().barrier()?;
                let start = Instant::now();
                work.call(comms)?;
                nanoseconds += start.elapsed().as_nanos() as f64;
            }
            // All see the same time, so all agree on whether it was long enough.
            let mut slowest = [nanoseconds];
            comms
                .communicator()
                .all_reduce(&mut slowest, ReduceOp::Max)?;
            if slowest[0] >= MIN_SAMPLE_NS || self.calls >= MOST_CALLS {
                self.best = self.best.min(slowest[0] / f64::from(self.calls));
                return Ok(());
            }
            self.calls *= 2;
        }
    }
}

fn measure(
    args: &BenchArgs,
    rule: Optimizer,
    params: &[ParamDesc],
    comm: &mut dyn Communicator,
) -> anyhow::Result<Summary> {
    let topology = Topology::of(comm);
    let of_rank = args.threads().get().div_ceil(topology.world);
    let backend = CpuBackend::new(of_rank.try_into()?)?.with_limits(args.planning.limits());
    let fused = Fused::from(args.planning.naive);
    let local = || -> Planner {
        let planner = args.planning.planner(rule, args.planning.limits());
        args.gradients
            .passes(args.precision.planner(planner, params))
    };
    let plan_of = |ranks: &RankArgs| -> anyhow::Result<Plan> {
        let planner = ranks.passes(local(), fused, topology)?;
        Ok(planner.plan_for(params, topology)?)
    };
    let plan = plan_of(&args.rank_args)?;
    let apart = plan_of(&RankArgs {
        apart: true,
        ..args.rank_args
    })?;
    let own = local().plan(&own_params(&apart))?;
    let mut step = Step::new(&plan, &backend, comm)?;
    let mut reduce = Calls::reducing(&apart, comm)?;
    let mut gather = Calls::gathering(&apart, comm)?;
    let mut update = Update::new(&own, &backend)?;
    let bytes = plan.bytes_per_element() * plan.elements() / topology.world as u64;
    let most = MOST_CEILING_BYTES / topology.world as u64;
    let mut stream = Streamed {
        ceiling: Ceiling::new(&backend, &own, bytes.min(most))?,
        index: 0,
    };
    let mut comms = args.rank_args.comms(comm, fused)?;
    let [mut whole, mut reduced, mut updated, mut gathered] = [(); 4].map(|()| RankTimer::new());
    let mut streams = PREFETCH_DISTANCES.map(|_| RankTimer::new());
    for _ in 0..args.rounds.get() {
        for (index, timer) in streams.iter_mut().enumerate() {
            whole.sample(&mut comms, &mut step)?;
            stream.index = index;
            timer.sample(&mut comms, &mut stream)?;
        }
        reduced.sample(&mut comms, &mut reduce)?;
        updated.sample(&mut comms, &mut update)?;
        gathered.sample(&mut comms, &mut gather)?;
    }
    let best = streams.iter().map(|timer| timer.best);
    let scale = bytes as f64 / stream.ceiling.len_bytes() as f64;
    let ceiling_ns = scale * best.fold(f64::INFINITY, f64::min);
    Ok(Summary {
        parameters: params.len(),
        elements: plan.elements(),
        dtype: DType::from(args.dtype).name(),
        optimizer: rule.name(),
        ranks: topology.world,
        engine: args.collective.engine.name(),
        zero: plan.zero().number(),
        threads: backend.team().threads(),
        ns_per_step: whole.best,
        reduce_ns: reduced.best,
        update_ns: updated.best,
        gather_ns: gathered.best,
        bytes_per_element: plan.bytes_per_element(),
        ceiling_ns,
        share_of_ceiling: ceiling_ns / whole.best,
        gradient_bytes_copied: step.copied_bytes,
    })
}

/// What this rank updates, as parameters of their own.
fn own_params(plan: &Plan) -> Vec<ParamDesc> {
    let mut own = Vec::new();
    for spec in plan.storages() {
        for (tensor, &member) in spec.members.iter().enumerate() {
            let range = spec.layout.range(tensor);
            for part in &spec.shard {
                let start = part.elements.start.max(range.start);
                let end = part.elements.end.min(range.end);
                let param = &plan.params()[member as usize];
                if let Some(numel) = end.checked_sub(start).filter(|&numel| numel > 0)
                    && let Ok(shape) = Shape::new([numel])
                {
                    own.push(ParamDesc {
                        name: format!("{}#{}", param.name, start - range.start),
                        shape,
                        ..param.clone()
                    });
                }
            }
        }
    }
    own
}

/// Whole steps of a plan.
struct Step<'a> {
    plan: &'a Plan,
    backend: &'a CpuBackend,
    state: State,
    filled: bool,
    copied_bytes: u64,
}

impl<'a> Step<'a> {
    fn new(
        plan: &'a Plan,
        backend: &'a CpuBackend,
        comm: &mut dyn Communicator,
    ) -> anyhow::Result<Self> {
        let mut state = plan.allocate_on(backend, comm)?;
        for param in plan.params() {
            state.write(backend, Role::Param, &param.name, &filled(param, 0.1))?;
        }
        Ok(Self {
            plan,
            backend,
            state,
            filled: false,
            copied_bytes: 0,
        })
    }
}

impl Work for Step<'_> {
    /// Gives all gradients. They lie where they are, unless the stage gives their memory back.
    fn prepare(&mut self) -> anyhow::Result<()> {
        let fill = !self.filled || self.plan.zero() >= ZeroStage::Two;
        for param in self.plan.params() {
            let (state, name) = (&mut self.state, param.name.as_str());
            match param.dtype {
                DType::F64 => fill_if(fill, state.grad_mut(name)?, GRADIENT),
                DType::F16 => fill_if(fill, state.grad_mut(name)?, f16::from_f64(GRADIENT)),
                DType::BF16 => fill_if(fill, state.grad_mut(name)?, bf16::from_f64(GRADIENT)),
                _ => fill_if(fill, state.grad_mut(name)?, GRADIENT as f32),
            }
        }
        self.filled = true;
        Ok(())
    }

    fn call(&mut self, comms: &mut Comms<'_>) -> anyhow::Result<()> {
        let report = self.plan.step(&mut self.state, self.backend, comms)?;
        self.copied_bytes = self.copied_bytes.max(report.gradient_bytes_copied);
        Ok(())
    }
}

fn fill_if<T: Copy>(fill: bool, view: &mut [T], value: T) {
    if fill {
        view.fill(value);
    }
}

/// One operation on each bucket of a plan.
struct Calls {
    all: Vec<BucketCall>,
}

struct BucketCall {
    operation: Operation,
    dtype: DType,
    counts: Option<Vec<usize>>,
    memory: HostMemory,
}

impl Calls {
    /// The calls that reduce gradients.
    fn reducing(plan: &Plan, comm: &mut dyn Communicator) -> Result<Self, CollectiveError> {
        let reduces = plan.stages().iter().filter_map(|stage| match stage {
            Stage::Reduce(reduce) => Some((reduce.bucket, reduce.result)),
            _ => None,
        });
        let calls = reduces.map(|(bucket, result)| {
            let operation = match result {
                Reduced::Whole => Operation::AllReduce(ReduceOp::Average),
                Reduced::Part => Operation::ReduceScatter(ReduceOp::Average),
            };
            (bucket, operation)
        });
        Self::on_buckets(plan, comm, Role::Grad, calls)
    }

    /// The calls that gather parameters.
    fn gathering(plan: &Plan, comm: &mut dyn Communicator) -> Result<Self, CollectiveError> {
        let gathers = plan.stages().iter().filter_map(|stage| match stage {
            Stage::Gather(gather) if gather.lists == GatheredLists::Params => Some(gather.bucket),
            _ => None,
        });
        let calls = gathers.map(|bucket| (bucket, Operation::AllGather));
        Self::on_buckets(plan, comm, Role::Param, calls)
    }

    fn on_buckets(
        plan: &Plan,
        comm: &mut dyn Communicator,
        role: Role,
        calls: impl Iterator<Item = (usize, Operation)>,
    ) -> Result<Self, CollectiveError> {
        let mut all = Vec::new();
        for (index, operation) in calls {
            let bucket = &plan.buckets()[index];
            let dtype = dtype_of(&plan.storages()[bucket.storage], role);
            let mut memory = comm.allocate(bucket.numel() as usize * dtype.len_bytes())?;
            // Touched once, because untouched pages would all be the same page of zeros.
            memory.bytes_mut().fill(0);
            let whole = matches!(operation, Operation::AllReduce(_));
            all.push(BucketCall {
                operation,
                dtype,
                counts: (!whole).then(|| bucket.counts()),
                memory,
            });
        }
        Ok(Self { all })
    }
}

fn dtype_of(spec: &StorageSpec, role: Role) -> DType {
    let list = spec.lists.iter().find(|list| list.role == role);
    list.map_or(DType::F32, |list| list.dtype)
}

impl Work for Calls {
    fn call(&mut self, comms: &mut Comms<'_>) -> anyhow::Result<()> {
        for call in &mut self.all {
            comms.communicator().execute(Call {
                operation: call.operation,
                dtype: call.dtype,
                counts: call.counts.as_deref(),
                buffers: Buffers::InPlace(call.memory.bytes_mut()),
            })?;
        }
        Ok(())
    }
}

/// The update of one rank, alone.
struct Update<'a> {
    plan: &'a Plan,
    backend: &'a CpuBackend,
    state: State,
}

impl<'a> Update<'a> {
    fn new(plan: &'a Plan, backend: &'a CpuBackend) -> anyhow::Result<Self> {
        let mut state = plan.allocate(backend)?;
        for param in plan.params() {
            for (role, value) in [(Role::Param, 0.1), (Role::Grad, GRADIENT)] {
                state.write(backend, role, &param.name, &filled(param, value))?;
            }
        }
        Ok(Self {
            plan,
            backend,
            state,
        })
    }
}

impl Work for Update<'_> {
    fn call(&mut self, _: &mut Comms<'_>) -> anyhow::Result<()> {
        self.plan.run(&mut self.state, self.backend)?;
        Ok(())
    }
}

/// The stream of one prefetch distance.
struct Streamed<'a> {
    ceiling: Ceiling<'a>,
    index: usize,
}

impl Work for Streamed<'_> {
    fn call(&mut self, _: &mut Comms<'_>) -> anyhow::Result<()> {
        self.ceiling.stream(self.index);
        Ok(())
    }
}
