//! Steps that nobody waits for: enqueued one by one, or recorded and enqueued by one call.

use fusestep_launch::{Backend, BackendError, Graph};

use crate::comms::Comms;
use crate::run::Executor;
use crate::{Plan, PlanError, Result, State, StepReport, TableKind, run, table};

/// A step recorded by [`Plan::capture`]; keeps the memory that it runs on.
#[derive(Debug)]
pub struct StepGraph {
    graph: Box<dyn Graph>,
    /// Of the tables that it runs on.
    generation: u64,
}

pub(crate) fn record(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    mut comms: Option<&mut Comms<'_>>,
) -> Result<StepGraph> {
    let mut stopped = None;
    let graph = backend.capture(&mut || {
        let mut executor = Executor::Backend(backend);
        let (comms, mut report) = (comms.as_deref_mut(), StepReport::default());
        let done = run::each_stage(plan, state, &mut executor, comms, &mut report);
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
pub(crate) fn check(
    plan: &Plan,
    state: &State,
    (what, instead): (&'static str, &str),
) -> Result<()> {
    state.check_plan(plan)?;
    state.check_between_steps(what)?;
    if plan.topology.world == 1 {
        return Ok(());
    }
    Err(PlanError::Topology {
        expected: format!("a plan of one rank for `{what}`"),
        found: format!("{} ranks; use `{instead}`", plan.topology.world),
    })
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
    table::publish_lr(state, backend)?;
    state.or_poison(graph.graph.launch())?;
    count_enqueued(state, backend)
}

pub(crate) fn count_enqueued(state: &mut State, backend: &dyn Backend) -> Result<()> {
    if state.norm.is_none() {
        state.advance();
        return Ok(());
    }
    state.tables.pending += 1;
    if state.without_gradient_count > 0 {
        match table::read_applied(state, backend)? {
            0 => state.forget_without_gradient(),
            _ => state.advance(),
        }
    }
    Ok(())
}

/// Refuses to record a step that hangs on what the host does.
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
