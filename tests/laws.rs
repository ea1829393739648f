//! Identities that must hold bit for bit.

use std::num::NonZeroUsize;

use fusestep_adagrad::Adagrad;
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_launch::{LaunchLimits, WeightDecay};
use fusestep_planner::{Optimizer, Planner, RunAlone};
use fusestep_tensor::{DType, Role};
use fusestep_testkit::{Case, EDGE_NUMELS, Gradients, check, element_rules, outcome};

#[path = "laws/gradients.rs"]
mod gradients;
#[path = "laws/settings.rs"]
mod settings;
#[path = "laws/updates.rs"]
mod updates;

fn adam(weight_decay: WeightDecay) -> Adam {
    Adam { lr: 1e-2, weight_decay, ..Adam::default() }
}

fn cpu() -> CpuBackend {
    CpuBackend::new(NonZeroUsize::new(2).unwrap())
}

#[test]
fn any_plan_cap_thread_count_and_simd_level_gives_the_bits_of_the_naive_plan() {
    for dtype in [DType::F32, DType::F64] {
        let case = Case::new(EDGE_NUMELS, dtype).with_groups();
        for rule in element_rules() {
            check(rule, &case);
        }
    }
}

#[test]
fn extreme_gradients_and_eps_0_keep_the_law() {
    let case = Case::new([1, 33, 1000, 5003], DType::F32).with_gradients(Gradients::Extreme);
    let without_eps = [
        Optimizer::Adam(Adam { eps: 0.0, ..Adam::default() }),
        Optimizer::Adagrad(Adagrad { eps: 0.0, ..Adagrad::default() }),
    ];
    for rule in element_rules().into_iter().chain(without_eps) {
        check(rule, &case);
    }
}

#[test]
fn two_hundred_small_tensors_cross_the_caps() {
    let case = Case::new((0..200).map(|i| i % 7 * 30), DType::F32).with_groups();
    for rule in element_rules() {
        check(rule, &case);
    }
}

#[test]
fn mixed_dtypes_share_a_plan() {
    let mut case = Case::new([5, 1000, 0, 77, 300], DType::F32);
    case.params[1].dtype = DType::F64;
    case.params[4].dtype = DType::F64;
    for rule in element_rules() {
        check(rule, &case);
    }
}

/// The bits of a rule on a case.
fn bits(rule: impl Into<Optimizer>, case: &Case) -> Vec<u8> {
    let plan = Planner::new(rule.into()).plan(&case.params).unwrap();
    outcome(&plan, case, &cpu())
}

#[test]
fn decoupled_decay_of_0_is_no_decay() {
    let case = Case::new(EDGE_NUMELS, DType::F32);
    let run = |weight_decay| bits(adam(weight_decay), &case);
    assert!(run(WeightDecay::Decoupled(0.0)) == run(WeightDecay::L2(0.0)));
    let run = |weight_decay| {
        let momentum = Sgd::with_momentum();
        bits(Sgd { weight_decay, ..momentum }, &case)
    };
    assert!(run(WeightDecay::Decoupled(0.0)) == run(WeightDecay::L2(0.0)));
}

#[test]
fn rescaling_by_a_power_of_two_is_a_larger_learning_rate_without_momentum() {
    let case = Case::new(EDGE_NUMELS, DType::F32);
    let run = |lr, rescale| bits(Sgd { lr, rescale, ..Sgd::default() }, &case);
    assert!(run(0.25, 0.125) == run(0.03125, 1.0));
}

#[test]
fn the_first_step_of_momentum_is_that_of_sgd_whatever_the_dampening() {
    let mut case = Case::new([1, 17, 1000], DType::F32);
    case.steps = 1;
    let params = |rule: Sgd| {
        let plan = Planner::new(rule.into()).plan(&case.params).unwrap();
        let (backend, mut state) = (cpu(), plan.allocate(&cpu()).unwrap());
        for (index, param) in case.params.iter().enumerate() {
            for (role, bytes) in
                [(Role::Param, case.param_bytes(index)), (Role::Grad, case.grad_bytes(index, 1))]
            {
                state.write(&backend, role, &param.name, &bytes).unwrap();
            }
        }
        RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
        let names = case.params.iter().map(|param| &param.name);
        names.map(|n| state.param::<f32>(n).unwrap().to_vec()).collect::<Vec<_>>()
    };
    let expected = params(Sgd::default());
    for dampening in [0.0, 0.5, 0.9] {
        let momentum = Sgd { dampening, ..Sgd::with_momentum() };
        assert_eq!(params(momentum), expected, "dampening {dampening}");
    }
}

#[test]
fn learning_rate_0_leaves_parameters_as_they_are() {
    let case = Case::new([1, 100], DType::F32);
    for rule in element_rules() {
        let plan = Planner::new(rule.with_lr(0.0)).plan(&case.params).unwrap();
        let backend = cpu();
        let mut state = plan.allocate(&backend).unwrap();
        let param = state.view_mut::<f32>(Role::Param, "tensor.1");
        param.unwrap().fill(0.3);
        state.grad_mut::<f32>("tensor.1").unwrap().fill(5.0);
        RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
        let param = state.param::<f32>("tensor.1").unwrap();
        assert!(param.iter().all(|&p| p == 0.3), "{rule}");
    }
}

#[test]
fn a_parameter_without_a_gradient_keeps_its_bits_and_its_step() {
    for rule in element_rules() {
        a_parameter_without_a_gradient_is_left_out(rule);
    }
}

fn a_parameter_without_a_gradient_is_left_out(rule: Optimizer) {
    let case = Case::new([64, 1000, 3], DType::F32);
    let plan = Planner::new(rule).plan(&case.params).unwrap();
    let backend = cpu();
    let mut state = plan.allocate(&backend).unwrap();
    for name in ["tensor.0", "tensor.1", "tensor.2"] {
        state.view_mut::<f32>(Role::Param, name).unwrap().fill(1.0);
        state.grad_mut::<f32>(name).unwrap().fill(0.5);
    }
    state.set_without_gradient("tensor.1").unwrap();
    let report = RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
    assert_eq!((report.without_gradient, report.elements), (1, 67));
    let kept = state.param::<f32>("tensor.1").unwrap();
    assert!(kept.iter().all(|&p| p == 1.0), "{rule}");
    assert_eq!((state.step_of("tensor.0"), state.step_of("tensor.1")), (Ok(1), Ok(0)));
    // Its next step is its first, with the first step's bias correction, dampening and initial sum:
    // the bits tensor.0 got one step before.
    let first = state.param::<f32>("tensor.0").unwrap()[0];
    RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
    assert_eq!(state.param::<f32>("tensor.1").unwrap()[7], first, "{rule}");
    assert_eq!((state.step_of("tensor.0"), state.step_of("tensor.1")), (Ok(2), Ok(1)));
}

#[test]
fn permuting_tensors_changes_no_bit_of_any() {
    for rule in element_rules() {
        permuted_tensors_have_the_same_bits(rule);
    }
}

fn permuted_tensors_have_the_same_bits(rule: Optimizer) {
    let case = Case::new([300, 5, 70_000], DType::F32);
    let plan = Planner::new(rule).plan(&case.params).unwrap();
    let mut turned = case.params.clone();
    turned.rotate_left(1);
    let turned_plan =
        Planner::new(rule).limits(LaunchLimits::with_argument_bytes(400)).plan(&turned).unwrap();
    let backend = cpu();
    let run = |plan: &fusestep_planner::Plan| {
        let mut state = plan.allocate(&backend).unwrap();
        for (index, param) in case.params.iter().enumerate() {
            state.write(&backend, Role::Param, &param.name, &case.param_bytes(index)).unwrap();
            state.write(&backend, Role::Grad, &param.name, &case.grad_bytes(index, 1)).unwrap();
        }
        RunAlone::of(plan, &mut state, &backend).step_all().unwrap();
        let names = case.params.iter().map(|p| state.param::<f32>(&p.name).unwrap().to_vec());
        names.collect::<Vec<_>>()
    };
    assert_eq!(run(&plan), run(&turned_plan), "{rule}");
}
