//! Step of a rank: the plan, the state, the backend and the calls that it works with.

use fusestep_launch::Backend;

use crate::error::{PlanError, Result};
use crate::plan::value::Plan;
use crate::run::comms::calls::Comms;
use crate::run::memory::state::State;

/// Plan, state, backend and calls of a rank's step.
pub(crate) struct RankStep<'a, 'c> {
    pub(crate) plan: &'a Plan,
    pub(crate) state: &'a mut State,
    pub(crate) backend: &'a dyn Backend,
    pub(crate) comms: &'a mut Comms<'c>,
}

pub(crate) fn check_comms(plan: &Plan, state: &State, comms: &Comms<'_>) -> Result<()> {
    state.check_plan(plan)?;
    let (expected, found) = (plan.topology(), (comms.rank(), comms.world()));
    if (expected.rank, expected.world) != found {
        return Err(PlanError::Topology {
            expected: expected.to_string(),
            found: format!("rank {} of {}", found.0, found.1),
        });
    }
    let (group, found) = (plan.shard_group, comms.group_size());
    if group == found {
        return Ok(());
    }
    Err(PlanError::Topology {
        expected: format!(
            "calls within shard groups of {group} ranks; make them by `Comms::in_groups`"
        ),
        found: format!("groups of {found}"),
    })
}
