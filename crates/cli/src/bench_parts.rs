//! Work that `fusestep bench --ranks` times on every rank: whole steps, and their parts alone.

use fusestep_coalesce::HostMemory;
use fusestep_collective::{
    Buffers, Call, CollectiveError, Collectives, Communicator, Operation, ReduceOp,
};
use fusestep_cpu::CpuBackend;
use fusestep_planner::{Comms, Part, Plan, Reduced, Run, Stage, State};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};
use half::{bf16, f16};

use crate::bench::subject::{Subject, filled};
use crate::ceiling::Ceiling;

/// The value of every element of a gradient.
const GRADIENT: f64 = 0.01;

/// Work that is timed in turn.
pub(crate) trait Work {
    /// Prepares every call, off the clock.
    fn prepare(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    /// Does the work that is timed, on all ranks at once.
    fn call(&mut self, comms: &mut Comms<'_>) -> anyhow::Result<()>;
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

impl Work for Step<'_> {
    /// Gives all gradients.
    fn prepare(&mut self) -> anyhow::Result<()> {
        for (at, param) in self.plan.params().iter().enumerate() {
            let (state, name) = (&mut self.state, param.name.as_str());
            match self.plan.grad_dtype(at) {
                DType::F64 => state.grad_mut(name)?.fill(GRADIENT),
                DType::F16 => state.grad_mut(name)?.fill(f16::from_f64(GRADIENT)),
                DType::BF16 => state.grad_mut(name)?.fill(bf16::from_f64(GRADIENT)),
                _ => state.grad_mut(name)?.fill(GRADIENT as f32),
            }
        }
        Ok(())
    }

    fn call(&mut self, comms: &mut Comms<'_>) -> anyhow::Result<()> {
        let report = Run::of(self.plan, &mut self.state, self.backend, comms).step()?;
        self.copied_bytes = self.copied_bytes.max(report.gradient_bytes_copied);
        Ok(())
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
    fn call(&mut self, comms: &mut Comms<'_>) -> anyhow::Result<()> {
        for call in self {
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

/// The update of one rank by itself.
impl Work for Subject<'_> {
    fn call(&mut self, comms: &mut Comms<'_>) -> anyhow::Result<()> {
        self.run()?;
        until_all_have(comms)
    }
}

/// The stream of one prefetch distance.
pub(crate) struct Streamed<'a> {
    pub(crate) ceiling: Ceiling<'a>,
    pub(crate) index: usize,
}

impl Work for Streamed<'_> {
    fn call(&mut self, comms: &mut Comms<'_>) -> anyhow::Result<()> {
        self.ceiling.stream(self.index);
        until_all_have(comms)
    }
}

/// Waits for the last rank, as whole steps do. Without that, each rank of several on one core would
/// tell only its own time.
fn until_all_have(comms: &mut Comms<'_>) -> anyhow::Result<()> {
    Ok(comms.communicator().barrier()?)
}
