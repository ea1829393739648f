//! Steps on resident tables in every way there is.
use super::cpu;
use fusestep_cuda::CudaBackend;
use fusestep_launch::{Backend, Memory};
use fusestep_planner::{
    ClipByGlobalNorm, LossScale, LossScaling, Optimizer, Plan, PlanError, Planner, RunAlone,
    RunImage, ScalePolicy, State, TableKind,
};
use fusestep_tensor::{DType, Role};
use fusestep_testkit::{Case, outcome};

/// The bits of the naive plan on the host, and those of the resident one on `backend`.
pub(crate) fn same_bits_of(
    rule: Optimizer,
    passes: &dyn Fn(Planner) -> Planner,
    case: &Case,
    backend: &CudaBackend,
) {
    let expected =
        outcome(&passes(Planner::new(rule).naive()).plan(&case.params).unwrap(), case, &cpu());
    let planner = passes(Planner::new(rule)).limits(backend.limits()).table(TableKind::Resident);
    let plan = planner.plan(&case.params).unwrap();
    let found = outcome(&plan, case, backend);
    let first = found.iter().zip(&expected).position(|(a, b)| a != b);
    let length = expected.len();
    assert!(found == expected, "first difference at byte {first:?} of {length}: {plan}");
}

/// Gradients divided by a loss scale and clipped to a norm that those of every case exceed: their
/// factor is then no power of two, and rounded.
pub(crate) fn scaled(planner: Planner) -> Planner {
    let policy = ScalePolicy { growth_interval: 2, ..ScalePolicy::default() };
    let scale = LossScale::with_policy(4.0, policy).unwrap();
    planner.with(LossScaling::from(scale)).with(ClipByGlobalNorm::new(0.01))
}

pub(crate) fn allocate(plan: &Plan, case: &Case, backend: &dyn Backend) -> State {
    let mut state = plan.allocate(backend).unwrap();
    for (index, param) in case.params.iter().enumerate() {
        let bytes = case.param_bytes(index);
        state.write(backend, Role::Param, &param.name, &bytes).unwrap();
    }
    state
}

pub(crate) fn write_grads(state: &mut State, case: &Case, step: u64, backend: &dyn Backend) {
    for (index, param) in case.params.iter().enumerate() {
        let dtype = state.dtype(Role::Grad, &param.name).unwrap();
        let bytes = case.grad_bytes_as(index, step, dtype);
        state.write(backend, Role::Grad, &param.name, &bytes).unwrap();
    }
}

pub(crate) fn read_all(state: &State, case: &Case, backend: &dyn Backend) -> Vec<u8> {
    let mut all = Vec::new();
    for param in &case.params {
        for role in state.roles(&param.name).unwrap() {
            let dtype = state.dtype(role, &param.name).unwrap();
            let mut bytes = vec![0; role.entries(param.numel()) as usize * dtype.len_bytes()];
            state.read(backend, role, &param.name, &mut bytes).unwrap();
            all.extend(bytes);
        }
    }
    all
}

/// Steps with the learning rate of a schedule, where some gradients overflow. Returns all bits, the
/// step and the loss scale.
pub(crate) fn train(
    rule: Optimizer,
    table: TableKind,
    way: WayOfStep,
    backend: &dyn Backend,
) -> (Vec<u8>, [u64; 3]) {
    let case = Case::new([70, 3, 0, 130], DType::F32).with_groups();
    let planner = scaled(Planner::new(rule)).table(table).limits(backend.limits());
    let plan = planner.plan(&case.params).unwrap();
    let mut state = allocate(&plan, &case, backend);
    let graph = match way {
        WayOfStep::Replayed => Some(RunAlone::of(&plan, &mut state, backend).capture().unwrap()),
        _ => None,
    };
    for step in 1..=8u64 {
        write_grads(&mut state, &case, step, backend);
        if step == 3 || step == 6 {
            let bytes = f32::INFINITY.to_le_bytes().repeat(3);
            state.write(backend, Role::Grad, "tensor.1", &bytes).unwrap();
        }
        state.set_lr(0.01 / step as f64).unwrap();
        match (way, &graph) {
            (WayOfStep::Replayed, Some(graph)) => {
                RunAlone::of(&plan, &mut state, backend).replay(graph).unwrap()
            }
            (WayOfStep::Enqueued, _) => RunAlone::of(&plan, &mut state, backend).enqueue().unwrap(),
            _ => drop(RunAlone::of(&plan, &mut state, backend).step_all().unwrap()),
        }
    }
    if way != WayOfStep::Run {
        assert_eq!(state.step(), 0, "the host has not asked");
        let error = RunImage::describe_saved(&state).unwrap_err();
        assert_eq!(error, PlanError::Unsettled { pending: 8 });
        state.settle(backend).unwrap();
    }
    let reports = state.grad_reports(backend).unwrap().unwrap();
    let mut bits = read_all(&state, &case, backend);
    bits.extend(reports.iter().flat_map(|report| report.norm.to_le_bytes()));
    let scale = state.loss_scale().unwrap().scale() as u64;
    (bits, [state.step(), state.skipped(), scale])
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WayOfStep {
    Run,
    Enqueued,
    Replayed,
}
