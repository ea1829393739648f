//! Work that `fusestep bench --ranks` times on every rank: whole steps, and their parts alone.

use std::time::{Duration, Instant};

use fusestep_coalesce::HostMemory;
use fusestep_collective::{
    Buffers, Call, CollectiveError, Collectives, Communicator, Operation, ReduceOp,
};
use fusestep_cpu::CpuBackend;
use fusestep_planner::{Comms, Part, Plan, Reduced, Run, Stage, State, ZeroStage};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};
use half::{bf16, f16};

use crate::bench::subject::{Subject, filled};
use crate::ceiling::Ceiling;

/// The value of every element of a gradient.
const GRADIENT: f64 = 0.01;

/// Work that is timed in turn.
pub(crate) trait Work {
    /// Does the work once, on all ranks at once, and says how long this rank took. Preparations are
    /// off the clock.
    fn run(&mut self, comms: &mut Comms<'_>) -> anyhow::Result<Duration>;
}

/// Times one piece of work, which all ranks begin at once.
fn timed(
    comms: &mut Comms<'_>,
    work: impl FnOnce(&mut Comms<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<Duration> {
    comms.communicator().barrier()?;
    let start = Instant::now();
    work(comms)?;
    Ok(start.elapsed())
}

/// The part of the model that this rank updates, as parameters of their own.
pub(crate) fn own_params(plan: &Plan) -> Vec<ParamDesc> {
    let mut own = Vec::new();
    for spec in plan.storages() {
        for (tensor, &member) in spec.members.iter().enumerate() {
            let range = spec.layout.range(tensor);
            let param = &plan.params()[member as usize];
            for Part { elements, .. } in spec.own_parts(range.clone()) {
                if let Ok(shape) = Shape::new([elements.end - elements.start])
                    && !elements.is_empty()
                {
                    let name = format!("{}#{}", param.name, elements.start - range.start);
                    own.push(ParamDesc { name, shape, ..param.clone() });
                }
            }
        }
    }
    own
}

/// Whole steps of a plan.
pub(crate) struct Step<'a> {
    plan: &'a Plan,
    backend: &'a CpuBackend,
    state: State,
    /// Most bytes of gradients that a step has copied.
    pub(crate) copied_bytes: u64,
}

impl<'a> Step<'a> {
    pub(crate) fn new(
        plan: &'a Plan,
        backend: &'a CpuBackend,
        comm: &mut dyn Communicator,
    ) -> anyhow::Result<Self> {
        let mut state = plan.allocate_on(backend, comm)?;
        for param in plan.params() {
            state.write(backend, Role::Param, &param.name, &filled(param, 0.1)?)?;
        }
        Ok(Self { plan, backend, state, copied_bytes: 0 })
    }
}

impl Step<'_> {
    /// Whether the call that gives a bucket's last gradient reduces the bucket, as in programs: a
    /// rank then never has the gradients of all buckets. Streams would reduce off the clock.
    fn gives_when_full(&self, comms: &Comms<'_>) -> bool {
        self.plan.zero() >= ZeroStage::Two && !comms.has_streams()
    }

    /// Writes a gradient through its view.
    fn fill(&mut self, at: usize) -> anyhow::Result<()> {
        let (state, name) = (&mut self.state, self.plan.params()[at].name.as_str());
        match self.plan.grad_dtype(at) {
            DType::F64 => state.grad_mut(name)?.fill(GRADIENT),
            DType::F16 => state.grad_mut(name)?.fill(f16::from_f64(GRADIENT)),
            DType::BF16 => state.grad_mut(name)?.fill(bf16::from_f64(GRADIENT)),
            _ => state.grad_mut(name)?.fill(GRADIENT as f32),
        }
        Ok(())
    }
}

impl Work for Step<'_> {
    fn run(&mut self, comms: &mut Comms<'_>) -> anyhow::Result<Duration> {
        let gives = self.gives_when_full(comms);
        let mut spent = Duration::ZERO;
        // In the order in which a backward pass gives them.
        for at in (0..self.plan.params().len()).rev() {
            self.fill(at)?;
            if gives {
                let name = self.plan.params()[at].name.as_str();
                spent += timed(comms, |comms| {
                    let mut run = Run::of(self.plan, &mut self.state, self.backend, comms);
                    Ok(run.give_view(name)?)
                })?;
            }
        }
        spent += timed(comms, |comms| {
            let report = Run::of(self.plan, &mut self.state, self.backend, comms).step()?;
            self.copied_bytes = self.copied_bytes.max(report.gradient_bytes_copied);
            Ok(())
        })?;
        Ok(spent)
    }
}

/// One operation on a bucket of a plan, with the memory for it.
pub(crate) struct BucketCall {
    operation: Operation,
    dtype: DType,
    counts: Option<Vec<usize>>,
    memory: HostMemory,
}

/// The calls that reduce gradients, or that gather parameters.
pub(crate) fn calls_of(
    plan: &Plan,
    comm: &mut dyn Communicator,
    role: Role,
) -> Result<Vec<BucketCall>, CollectiveError> {
    let calls = plan.stages().iter().filter_map(|stage| match (stage, role) {
        (Stage::Reduce(reduce), Role::Grad) => Some(match reduce.result {
            Reduced::Whole => (reduce.bucket, Operation::AllReduce(ReduceOp::Average)),
            Reduced::Part => (reduce.bucket, Operation::ReduceScatter(ReduceOp::Average)),
        }),
        (Stage::Gather(gather), Role::Param) => Some((gather.bucket, Operation::AllGather)),
        _ => None,
    });
    let mut all = Vec::new();
    for (index, operation) in calls {
        let bucket = &plan.buckets()[index];
        let lists = &plan.storages()[bucket.storage].lists;
        let list = lists.iter().find(|list| list.role == role);
        let dtype = list.map_or(DType::F32, |list| list.dtype);
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
    Ok(all)
}

impl Work for Vec<BucketCall> {
    fn run(&mut self, comms: &mut Comms<'_>) -> anyhow::Result<Duration> {
        timed(comms, |comms| {
            for call in self {
                comms.communicator().execute(Call {
                    operation: call.operation,
                    dtype: call.dtype,
                    counts: call.counts.as_deref(),
                    buffers: Buffers::InPlace(call.memory.bytes_mut()),
                })?;
            }
            Ok(())
        })
    }
}

/// The update of one rank by itself.
impl Work for Subject<'_> {
    fn run(&mut self, comms: &mut Comms<'_>) -> anyhow::Result<Duration> {
        timed(comms, |comms| {
            Subject::run(self)?;
            until_all_have(comms)
        })
    }
}

/// The stream of one prefetch distance.
pub(crate) struct Streamed<'a> {
    pub(crate) ceiling: Ceiling<'a>,
    pub(crate) index: usize,
}

impl Work for Streamed<'_> {
    fn run(&mut self, comms: &mut Comms<'_>) -> anyhow::Result<Duration> {
        timed(comms, |comms| {
            self.ceiling.stream(self.index);
            until_all_have(comms)
        })
    }
}

/// Waits for the last rank, as whole steps do. Without that, each rank of several on one core would
/// tell only its own time.
fn until_all_have(comms: &mut Comms<'_>) -> anyhow::Result<()> {
    Ok(comms.communicator().barrier()?)
}
