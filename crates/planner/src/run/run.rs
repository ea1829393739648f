//! A run: a plan with its memory, its backend and its calls.

#![expect(clippy::module_inception, reason = "a type is looked for in the file of its name")]

use fusestep_launch::Backend;

use crate::error::{PlanError, Result};
use crate::plan::value::Plan;
use crate::run::comms::calls::Comms;
use crate::run::memory::state::State;

/// A plan with its memory, its backend and its calls: what a step of a rank needs, together.
///
/// It is four references, made where a step is made or kept for many steps. Of one rank or of many
/// it is the same. [`RunAlone`](crate::RunAlone) is for plans of one rank that need no calls.
///
/// ```
/// use std::num::NonZeroUsize;
///
/// use fusestep_cpu::CpuBackend;
/// use fusestep_fused_adam::Adam;
/// use fusestep_planner::{Comms, Planner, Run};
/// use fusestep_tensor::{DType, ParamDesc, Shape};
///
/// let params = [ParamDesc::new("w", Shape::new([2])?, DType::F32)];
/// let plan = Planner::new(Adam::default().into()).plan(&params)?;
/// let backend = CpuBackend::new(NonZeroUsize::MIN);
/// let mut state = plan.allocate(&backend)?;
/// let mut comms = Comms::alone();
/// let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
/// run.push_grad("w", bytemuck::cast_slice(&[1.0f32, -1.0]))?;
/// let update = run.step()?.update.unwrap();
/// assert_eq!((update.step, update.elements), (1, 2));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Run<'r, 'c> {
    pub(crate) plan: &'r Plan,
    pub(crate) state: &'r mut State,
    pub(crate) backend: &'r dyn Backend,
    pub(crate) comms: &'r mut Comms<'c>,
}

impl std::fmt::Debug for Run<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Run")
            .field("topology", &self.plan.topology())
            .field("step", &self.state.step())
            .field("backend", &self.backend.name())
            .finish_non_exhaustive()
    }
}

impl<'r, 'c> Run<'r, 'c> {
    /// A run of `plan`. The plan has made `state` on `backend` ([`Plan::allocate`],
    /// [`Plan::allocate_on`]), and `comms` are this rank's calls.
    ///
    /// Nothing is checked here: a method that makes a step refuses another plan's state and calls
    /// of another topology.
    pub fn of(
        plan: &'r Plan,
        state: &'r mut State,
        backend: &'r dyn Backend,
        comms: &'r mut Comms<'c>,
    ) -> Self {
        Self { plan, state, backend, comms }
    }

    /// The plan of every step.
    pub fn plan(&self) -> &'r Plan {
        self.plan
    }

    /// The memory of this rank.
    pub fn state(&self) -> &State {
        self.state
    }

    /// The memory of this rank, to write gradients and parameters, and to change rates and rules.
    pub fn state_mut(&mut self) -> &mut State {
        self.state
    }

    /// The backend that steps run on.
    pub fn backend(&self) -> &'r dyn Backend {
        self.backend
    }

    /// The calls of this rank, counted.
    pub fn comms(&self) -> &Comms<'c> {
        self.comms
    }

    /// The calls of this rank, for calls of the program's own.
    pub fn comms_mut(&mut self) -> &mut Comms<'c> {
        self.comms
    }

    /// Refuses the state of another plan, and calls of another rank, world or group.
    pub(crate) fn check(&self) -> Result<()> {
        self.state.check_plan(self.plan)?;
        let (expected, found) = (self.plan.topology(), (self.comms.rank(), self.comms.world()));
        if (expected.rank, expected.world) != found {
            return Err(PlanError::Topology {
                expected: expected.to_string(),
                found: format!("rank {} of {}", found.0, found.1),
            });
        }
        let (group, found) = (self.plan.shard_group, self.comms.group_size());
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
}
