//! Trains a case by any plan and keeps everything that each rank ends with.

use std::num::NonZeroUsize;

use fusestep_collective::{Communicator, Options, Solo, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_planner::{Comms, MicroStepReport, Plan, Planner, Run, State, Topology};
use fusestep_tensor::Role;

use crate::run::{Case, whole_params};

/// What one rank ends with.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Trained {
    pub(crate) params: Vec<Vec<u8>>,
    /// For each parameter its roles and their bytes, of state that the rank has whole.
    pub(crate) state: Vec<Vec<(Role, Vec<u8>)>>,
    /// Of each micro-step.
    pub(crate) reports: Vec<MicroStepReport>,
    /// Loss scale after each micro-step.
    pub(crate) scales: Vec<Option<f64>>,
}

/// The parameters, and each one's state by role.
type Bits<'a> = (&'a [Vec<u8>], &'a [Vec<(Role, Vec<u8>)>]);

impl Trained {
    /// Parameters and state, without times.
    pub(crate) fn bits(&self) -> Bits<'_> {
        (&self.params, &self.state)
    }
}

/// Every rank's end of a run by `planner` on the values of `case`, whose own passes are not asked.
pub(crate) fn train(case: &Case, planner: &Planner) -> Vec<Trained> {
    on_ranks(case.world, |comm| rank(case, planner, comm))
}

/// What every rank returns.
pub(crate) fn on_ranks<R: Send>(
    world: usize,
    body: impl Fn(&mut dyn Communicator) -> R + Sync,
) -> Vec<R> {
    if world == 1 {
        return vec![body(&mut Solo::new())];
    }
    let outcomes = run_ranks(world, &Options::default(), |mut comm| body(&mut comm));
    let outcomes = outcomes.unwrap().into_iter();
    outcomes
        .map(|outcome| outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        .collect()
}

pub(crate) fn backend() -> CpuBackend {
    CpuBackend::new(NonZeroUsize::MIN)
}

/// A state with the first values of a case.
pub(crate) fn start(case: &Case, plan: &Plan, backend: &CpuBackend) -> State {
    let mut state = plan.allocate(backend).unwrap();
    for (param, desc) in plan.params().iter().enumerate() {
        let values = case.first_values(param);
        state.write(backend, Role::Param, &desc.name, &values).unwrap();
    }
    state
}

/// Gives the gradients of one micro-step.
pub(crate) fn push(case: &Case, run: &mut Run<'_, '_>, step: u64) {
    let plan = run.plan();
    let rank = plan.topology().rank;
    for param in (0..plan.params().len()).rev() {
        if case.lacks_gradient(rank, step, param) {
            continue;
        }
        let (name, bytes) = (&plan.params()[param].name, case.gradient(rank, step, param));
        run.push_grad(name, &bytes).unwrap();
    }
}

fn rank(case: &Case, planner: &Planner, comm: &mut dyn Communicator) -> Trained {
    let plan = planner.plan_for(&case.params(), Topology::of(comm)).unwrap();
    let backend = backend();
    let mut comms = Comms::with_streams(comm, case.streams).unwrap();
    let mut state = start(case, &plan, &backend);
    let (mut reports, mut scales) = (Vec::new(), Vec::new());
    for step in 0..case.steps * u64::from(case.merge) {
        let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
        push(case, &mut run, step);
        reports.push(run.step().unwrap());
        scales.push(state.loss_scale().map(|scale| scale.scale()));
    }
    let params = whole_params(&mut Run::of(&plan, &mut state, &backend, &mut comms));
    Trained {
        state: plan
            .params()
            .iter()
            .map(|desc| state_of(&state, &backend, &desc.name, desc.numel()))
            .collect(),
        params,
        reports,
        scales,
    }
}

fn state_of(state: &State, backend: &CpuBackend, name: &str, numel: u64) -> Vec<(Role, Vec<u8>)> {
    let roles = state.roles(name).unwrap().into_iter();
    let kept = roles.filter(|role| role.is_state());
    let read = |role| {
        let width = state.dtype(role, name).unwrap().len_bytes();
        let mut bytes = vec![0; numel as usize * width];
        state.read(backend, role, name, &mut bytes).ok()?;
        Some((role, bytes))
    };
    kept.filter_map(read).collect()
}
