//! A step of several ranks on devices, recorded once and enqueued by one call of the driver.

use std::marker::PhantomData;

use fusestep_collective::{Operation, ReduceOp};
use fusestep_launch::{Backend, Buffer};
use fusestep_tensor::DType;

use crate::arena::keeps_segments;
use crate::comms::Comms;
use crate::enqueue::not_capturable;
use crate::{Plan, Result, Stage, State, StepGraph, device_trust, enqueue, reduce, step, table};

/// A step recorded by [`Plan::capture_on`], of which every rank has one. It works on the
/// communicator's memory, which therefore outlives it:
///
/// ```compile_fail,E0597
/// # fn program(plan: fusestep_planner::Plan, mut state: fusestep_planner::State,
/// #     backend: &dyn fusestep_launch::Backend) {
/// use fusestep_collective::Solo;
/// use fusestep_planner::Comms;
///
/// let graph;
/// {
///     let mut comm = Solo::new();
///     let mut comms = Comms::direct(&mut comm);
///     graph = plan.capture_on(&mut state, backend, &mut comms).unwrap();
/// }
/// drop(graph);
/// # }
/// ```
#[derive(Debug)]
pub struct RankGraph<'a> {
    pub(crate) graph: StepGraph,
    /// What ranks add up to hear that all have come so far.
    token: Box<dyn Buffer>,
    communicator: PhantomData<&'a ()>,
}

pub(crate) fn capture_on<'a>(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    comms: &mut Comms<'a>,
) -> Result<RankGraph<'a>> {
    step::check_comms(plan, state, comms)?;
    state.check_between_steps("capture_on")?;
    enqueue::check_capturable(state)?;
    if plan.topology.world > 1 {
        check_recorded_calls(plan, state, backend, comms)?;
    }
    let token = backend.allocate(size_of::<f64>())?;
    comms.set_plan(plan.hash());
    state.settle(backend)?;
    table::prepare(plan, state, backend)?;
    // A recording cannot wait for what is written to tables.
    device_trust::build_tables(plan, state, backend)?;
    for (update, stage) in plan.optimize_stages().enumerate() {
        reduce::with_gradients(plan, state, stage.bucket, |state| {
            table::build_table(plan, state, (stage, update), backend)
        })?;
    }
    let calls = (plan.topology.world > 1).then_some(&mut *comms);
    let graph = enqueue::record(plan, state, backend, calls);
    // Nothing has run: what counts as reduced is to be reduced still.
    state.arena.settle(keeps_segments(plan));
    state.arena.clear();
    comms.finish_on_device()?;
    Ok(RankGraph { graph: graph?, token, communicator: PhantomData })
}

impl RankGraph<'_> {
    /// Waits until all ranks have come so far.
    pub(crate) fn meet(&mut self, backend: &dyn Backend, comms: &mut Comms<'_>) -> Result<()> {
        backend.hand_over(self.token.as_mut())?;
        let call = (Operation::AllReduce(ReduceOp::Max), DType::F64, None);
        let all = 0..self.token.len_bytes();
        comms.on_device(&mut self.token, all, call)?;
        comms.finish_on_device()?;
        Ok(backend.take_back(self.token.as_mut())?)
    }
}

/// Refuses calls that a graph cannot have.
fn check_recorded_calls(
    plan: &Plan,
    state: &State,
    backend: &dyn Backend,
    comms: &Comms<'_>,
) -> Result<()> {
    let against = if plan.micro_steps() > 1 {
        "it adds up micro-steps"
    } else if !plan.reduces() {
        "ranks update on their own, and average every few steps"
    } else if plan.shard_group < plan.topology.world {
        "shards lie in groups of ranks"
    } else if !comms.is_on_device_of(backend) {
        "its calls are made on the host"
    } else if state.norm.is_some() && state.exchange.norm_on_device.is_none()
        || plan.stages.contains(&Stage::Trust) && state.exchange.trust_on_device.is_none()
    {
        "norms are formed on the host"
    } else if comms.has_streams() {
        "communication streams make its calls; take `Comms::direct`"
    } else {
        return Ok(());
    };
    Err(not_capturable(against))
}
