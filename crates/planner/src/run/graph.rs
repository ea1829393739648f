//! Steps that the host does not wait for: enqueued one by one, or recorded and enqueued by one
//! call.

use std::marker::PhantomData;

use fusestep_collective::{Operation, ReduceOp};
use fusestep_launch::{Backend, BackendError, Buffer, Graph};
use fusestep_tensor::DType;

use crate::error::{PlanError, Result};
use crate::plan::segments::keeps_segments;
use crate::plan::settings::TableKind;
use crate::plan::stage::Stage;
use crate::plan::value::Plan;
use crate::run::comms::bytes::CallKind;
use crate::run::comms::calls::Comms;
use crate::run::executor::Executor;
use crate::run::memory::device;
use crate::run::memory::segment_state::Given;
use crate::run::memory::state;
use crate::run::memory::state::State;
use crate::run::report::StepReport;
use crate::run::run::Run;
use crate::run::stages::{device_trust, optimize, reduce};
use crate::run::step;

/// A step recorded by [`crate::RunAlone::capture`]; keeps the memory that it runs on.
#[derive(Debug)]
pub struct StepGraph {
    graph: Box<dyn Graph>,
    /// Generation of the tables that the graph runs on.
    generation: u64,
}

pub(crate) fn record(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    mut comms: Option<&mut Comms<'_>>,
) -> Result<StepGraph> {
    let device = backend.device().ok_or_else(|| BackendError::Unavailable {
        backend: backend.name(),
        reason: "launches cannot be recorded here; run the steps one by one".to_owned(),
    })?;
    let mut stopped = None;
    let graph = device.capture(&mut || {
        let mut executor = Executor::Backend(backend);
        let (comms, mut report) = (comms.as_deref_mut(), StepReport::default());
        let done = step::each_stage(plan, state, &mut executor, comms, &mut report);
        done.map_err(|error| match error {
            PlanError::Backend(error) => error,
            other => {
                let reason = other.to_string();
                stopped = Some(other);
                BackendError::Unavailable { backend: backend.name(), reason }
            }
        })
    });
    let graph = graph.map_err(|error| stopped.unwrap_or(error.into()))?;
    Ok(StepGraph { graph, generation: state.tables.generation })
}

/// Refuses another plan than the state's, a step under way, and plans of several ranks, for which
/// there is something else.
pub(crate) fn check(plan: &Plan, state: &State, call: AloneCall) -> Result<()> {
    state.check_plan(plan)?;
    state.check_between_steps(call.name())?;
    if plan.topology.world == 1 {
        return Ok(());
    }
    Err(PlanError::Topology {
        expected: format!("a plan of one rank for `RunAlone::{}`", call.name()),
        found: format!("{} ranks; use `{}`", plan.topology.world, call.of_ranks()),
    })
}

/// Calls for plans of one rank that the host does not wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AloneCall {
    Enqueue,
    Capture,
    Replay,
}

impl AloneCall {
    fn name(self) -> &'static str {
        match self {
            Self::Enqueue => "enqueue",
            Self::Capture => "capture",
            Self::Replay => "replay",
        }
    }

    /// Name of the call that takes its place in a plan of several ranks.
    fn of_ranks(self) -> &'static str {
        match self {
            Self::Enqueue => "Run::step",
            Self::Capture => "Run::capture",
            Self::Replay => "Run::replay",
        }
    }
}

pub(crate) fn replay_recorded(
    state: &mut State,
    backend: &dyn Backend,
    graph: &StepGraph,
) -> Result<()> {
    let built_anew = state.tables.generation != graph.generation;
    if built_anew || state.schedule.stale || state.without_gradient_count > 0 {
        return Err(PlanError::StaleGraph);
    }
    optimize::publish_lr(state, backend)?;
    state.or_poison(graph.graph.launch())?;
    count_enqueued(state, backend)
}

pub(crate) fn count_enqueued(state: &mut State, backend: &dyn Backend) -> Result<()> {
    state.params_version += 1;
    if state.norm.is_none() {
        state.advance();
        return Ok(());
    }
    state.tables.pending += 1;
    if state.without_gradient_count > 0 {
        match state::read_applied(state, backend)? {
            0 => state.forget_without_gradient(),
            _ => state.advance(),
        }
    }
    Ok(())
}

/// Refuses to record a step that depends on work of the host.
pub(crate) fn check_capturable(state: &State) -> Result<()> {
    if state.tables.kind != TableKind::Resident {
        return Err(not_capturable("its tables are in arguments"));
    }
    if state.without_gradient_count > 0 {
        return Err(not_capturable("parameters are without gradient in the next step"));
    }
    Ok(())
}

pub(crate) fn not_capturable(found: &'static str) -> PlanError {
    PlanError::NotCapturable { found }
}

/// A step recorded by [`Run::capture`], of which every rank has one. It works on the
/// communicator's memory, which therefore outlives it:
///
/// ```compile_fail,E0597
/// # fn program(plan: fusestep_planner::Plan, mut state: fusestep_planner::State,
/// #     backend: &dyn fusestep_launch::Backend) {
/// use fusestep_collective::Solo;
/// use fusestep_planner::{Comms, Run};
///
/// let graph;
/// {
///     let mut comm = Solo::new();
///     let mut comms = Comms::direct(&mut comm);
///     graph = Run::of(&plan, &mut state, backend, &mut comms).capture().unwrap();
/// }
/// drop(graph);
/// # }
/// ```
#[derive(Debug)]
pub struct RankGraph<'a> {
    graph: StepGraph,
    /// Value that ranks add up, so that each knows that all have come so far.
    token: Box<dyn Buffer>,
    communicator: PhantomData<&'a ()>,
}

pub(crate) fn capture<'c>(run: &mut Run<'_, 'c>) -> Result<RankGraph<'c>> {
    run.check()?;
    run.state.check_between_steps("capture")?;
    check_capturable(run.state)?;
    if run.plan.topology.world > 1 {
        check_recorded_calls(run)?;
    }
    let backend = run.backend;
    let Run { plan, state, comms, .. } = run;
    let token = backend.allocate(size_of::<f64>())?;
    comms.set_plan(plan.hash());
    state.settle(backend)?;
    optimize::prepare(plan, state, backend)?;
    // A recording cannot wait for what is written to tables.
    if let Some(device) = backend.device() {
        device_trust::build_tables(plan, state, device)?;
    }
    for (update, stage) in plan.optimize_stages().enumerate() {
        reduce::with_gradients(plan, state, stage.bucket, |state| {
            optimize::build_table(plan, state, stage, update, backend)
        })?;
    }
    let calls = (plan.topology.world > 1).then_some(&mut **comms);
    let graph = record(plan, state, backend, calls);
    // Nothing has run: what counts as reduced is to be reduced still.
    state.arena.settle(keeps_segments(plan));
    state.arena.clear();
    comms.finish_on_device()?;
    Ok(RankGraph { graph: graph?, token, communicator: PhantomData })
}

pub(crate) fn replay(run: &mut Run<'_, '_>, graph: &RankGraph<'_>) -> Result<()> {
    run.check()?;
    run.state.check_between_steps("replay")?;
    run.comms.check()?;
    for param in 0..run.plan.params.len() {
        if run.state.arena.now[param] == Given::Viewed {
            run.state.take_view_back(run.backend, param)?;
        }
    }
    run.state.arena.clear();
    replay_recorded(run.state, run.backend, &graph.graph)
}

pub(crate) fn settle(run: &mut Run<'_, '_>, graph: &mut RankGraph<'_>) -> Result<()> {
    run.check()?;
    if run.plan.topology.world > 1 {
        run.comms.set_plan(run.plan.hash());
        graph.meet(run.backend, run.comms)?;
    }
    run.state.settle(run.backend)
}

impl RankGraph<'_> {
    /// Waits until all ranks have come so far.
    fn meet(&mut self, backend: &dyn Backend, comms: &mut Comms<'_>) -> Result<()> {
        device::hand_over(backend, self.token.as_mut())?;
        let kind = CallKind::even(Operation::AllReduce(ReduceOp::Max), DType::F64);
        let all = 0..self.token.len_bytes();
        comms.on_device(&mut self.token, all, kind)?;
        comms.finish_on_device()?;
        Ok(device::take_back(backend, self.token.as_mut())?)
    }
}

/// Refuses calls that a graph cannot have.
fn check_recorded_calls(run: &Run<'_, '_>) -> Result<()> {
    let Run { plan, state, backend, comms } = run;
    let against = if plan.micro_steps() > 1 {
        "it adds up micro-steps"
    } else if !plan.reduces() {
        "ranks update on their own, and average every few steps"
    } else if plan.shard_group < plan.topology.world {
        "shards lie in groups of ranks"
    } else if comms.device_of(*backend).is_none() {
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
