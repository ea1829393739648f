//! A run of one rank, whose steps make no calls.

use fusestep_launch::Backend;
use fusestep_tensor::Role;

use crate::error::{PlanError, Result};
use crate::plan::settings::TableKind;
use crate::plan::value::Plan;
use crate::run::clock::{Begun, StepPart};
use crate::run::executor::{Executor, Lender};
use crate::run::graph::{AloneCall, StepGraph};
use crate::run::memory::state::State;
use crate::run::report::StepReport;
use crate::run::run::Run;
use crate::run::stages::optimize;
use crate::run::{graph, step};

/// A plan of one rank with its memory and its backend: steps that take every gradient as it lies,
/// and make no calls.
///
/// It is three references, made where a step is made. A plan that adds up micro-steps, or whose
/// gradients are pushed, is run by [`Run`].
///
/// ```
/// use std::num::NonZeroUsize;
///
/// use fusestep_cpu::CpuBackend;
/// use fusestep_fused_adam::Adam;
/// use fusestep_planner::{Planner, RunAlone};
/// use fusestep_tensor::{DType, ParamDesc, Shape};
///
/// let params = [ParamDesc::new("w", Shape::new([2])?, DType::F32)];
/// let plan = Planner::new(Adam::default().into()).plan(&params)?;
/// let backend = CpuBackend::new(NonZeroUsize::MIN);
/// let mut state = plan.allocate(&backend)?;
/// state.grad_mut::<f32>("w")?.copy_from_slice(&[1.0, -1.0]);
/// let report = RunAlone::of(&plan, &mut state, &backend).step_all()?;
/// assert_eq!((report.step, report.launches), (1, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct RunAlone<'r> {
    pub(crate) plan: &'r Plan,
    pub(crate) state: &'r mut State,
    pub(crate) backend: &'r dyn Backend,
}

impl std::fmt::Debug for RunAlone<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunAlone")
            .field("step", &self.state.step())
            .field("backend", &self.backend.name())
            .finish_non_exhaustive()
    }
}

impl Run<'_, '_> {
    /// A run without these calls, for steps that a plan of one rank makes by itself.
    pub fn alone(&mut self) -> RunAlone<'_> {
        RunAlone::of(self.plan, self.state, self.backend)
    }
}

impl<'r> RunAlone<'r> {
    /// A run of `plan`, which has made `state` on `backend` ([`Plan::allocate`]). Steps refuse the
    /// state of another plan, and a plan of several ranks.
    pub fn of(plan: &'r Plan, state: &'r mut State, backend: &'r dyn Backend) -> Self {
        Self { plan, state, backend }
    }

    /// Runs one step on a state that keeps parameters and gradients: every gradient counts as it
    /// lies there, but for those of [`State::set_without_gradient`].
    ///
    /// Allocates nothing while the same tensors take part as in the step before.
    ///
    /// # Errors
    /// [`PlanError::ForeignState`], [`PlanError::NoSuchList`] if the plan's tensors are borrowed;
    /// nothing has been written then. [`PlanError::Backend`] if the device fails half-way; the
    /// state refuses further steps then ([`PlanError::Poisoned`]).
    /// # Cost
    /// [`Plan::traffic_bytes`] of memory traffic in [`Plan::launches`] launches.
    pub fn step_all(&mut self) -> Result<StepReport> {
        if self.plan.tensors.are_borrowed() {
            return Err(PlanError::NoSuchList {
                role: Role::Param,
                name: self.plan.params.first().map_or(String::new(), |p| p.name.clone()),
                hint: "its tensors are borrowed; use `step_borrowed`",
            });
        }
        let begun = self.state.clock.begin(StepPart::Rest);
        let done = step::run_stages(self.plan, self.state, Executor::Backend(self.backend));
        end(self.state, begun);
        done
    }

    /// Runs one step on parameters and gradients that `lender` lends, on the lender's backend.
    ///
    /// # Errors
    /// As [`RunAlone::step_all`].
    pub fn step_borrowed(&mut self, lender: &mut dyn Lender) -> Result<StepReport> {
        let begun = self.state.clock.begin(StepPart::Rest);
        let done = step::run_stages(self.plan, self.state, Executor::Lender(lender));
        end(self.state, begun);
        done
    }

    /// Enqueues one step and, but for two cases, waits for nothing.
    ///
    /// [`State::step`], the loss scale and the count of skipped steps are as before until
    /// [`State::settle`] reads what the device has decided. Without a stage that reads the
    /// gradients nothing is left to read.
    ///
    /// In a plan that reads gradients, a step in which parameters have no gradient is waited for.
    /// The next step's table depends on whether this one was skipped. While a schedule still
    /// changes the rate, the step before this one is waited for.
    ///
    /// # Errors
    /// As [`RunAlone::step_all`]; [`PlanError::NotCapturable`] for a plan that reads gradients and
    /// whose tables are in arguments. The host has to know such a step before it can write the next
    /// one's tables.
    /// # Cost
    /// Launches whose arguments are equal at every step, on a device: nothing of the host's work
    /// grows with the tensors.
    pub fn enqueue(&mut self) -> Result<()> {
        let (plan, backend) = (self.plan, self.backend);
        let state = &mut *self.state;
        graph::check(plan, state, AloneCall::Enqueue)?;
        if state.norm.is_some() && state.tables.kind != TableKind::Resident {
            return Err(graph::not_capturable("its tables are in arguments"));
        }
        if !optimize::prepare(plan, state, backend)? {
            return self.step_all().map(|_| ());
        }
        let mut report = StepReport::default();
        let mut executor = Executor::Backend(backend);
        let done = step::each_stage(plan, state, &mut executor, None, &mut report);
        state.or_poison(done)?;
        graph::count_enqueued(state, backend)
    }

    /// Records a step as a graph; the step is not run. Every [`RunAlone::replay`] is then one call
    /// of the driver.
    ///
    /// # Errors
    /// [`PlanError::NotCapturable`] if the tables are in arguments or parameters are without
    /// gradient; [`PlanError::Backend`] on a backend that records no launches.
    pub fn capture(&mut self) -> Result<StepGraph> {
        graph::check(self.plan, self.state, AloneCall::Capture)?;
        graph::check_capturable(self.state)?;
        optimize::prepare(self.plan, self.state, self.backend)?;
        graph::record(self.plan, self.state, self.backend, None)
    }

    /// Enqueues the recorded step once more, as [`RunAlone::enqueue`] would. A learning rate set
    /// since is written first.
    ///
    /// # Errors
    /// [`PlanError::StaleGraph`] if the state's tables have been built anew since, because
    /// parameters were without gradient, the rule was changed, or steps were set or loaded; as
    /// [`RunAlone::step_all`].
    pub fn replay(&mut self, graph: &StepGraph) -> Result<()> {
        graph::check(self.plan, self.state, AloneCall::Replay)?;
        graph::replay_recorded(self.state, self.backend, graph)
    }
}

/// Ends a step by the clock of its state.
pub(crate) fn end(state: &mut State, begun: Begun) {
    state.clock.end(begun);
    state.clock.end_update();
}
