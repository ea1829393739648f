//! Identities that must hold bit for bit.

use std::num::NonZeroUsize;

use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::{Adam, Objective, SecondMoment, WeightDecay};
use fusestep_launch::LaunchLimits;
use fusestep_planner::{Optimizer, Planner};
use fusestep_tensor::{DType, Role};
use fusestep_testkit::{Case, EDGE_NUMELS, Gradients, check, outcome};

fn adam(weight_decay: WeightDecay) -> Adam {
    Adam {
        lr: 1e-2,
        weight_decay,
        ..Adam::default()
    }
}

fn cpu() -> CpuBackend {
    CpuBackend::new(NonZeroUsize::new(2).unwrap()).unwrap()
}

#[test]
fn any_plan_cap_thread_count_and_simd_level_gives_the_bits_of_the_naive_plan() {
    for dtype in [DType::F32, DType::F64] {
        let case = Case::new(EDGE_NUMELS, dtype).with_hyper_classes();
        for weight_decay in [WeightDecay::Decoupled(0.01), WeightDecay::L2(0.01)] {
            check(Optimizer::Adam(adam(weight_decay)), &case);
        }
    }
}

#[test]
fn amsgrad_and_maximize_keep_the_law() {
    let case = Case::new([0, 1, 17, 513, 70_001], DType::F32).with_hyper_classes();
    let configured = Adam {
        second_moment: SecondMoment::Largest,
        objective: Objective::Maximize,
        ..adam(WeightDecay::L2(0.1))
    };
    check(Optimizer::Adam(configured), &case);
}

#[test]
fn extreme_gradients_and_eps_0_keep_the_law() {
    let case = Case::new([1, 33, 1000, 65_537], DType::F32).with_gradients(Gradients::Extreme);
    check(
        Optimizer::Adam(Adam {
            eps: 0.0,
            ..Adam::default()
        }),
        &case,
    );
}

#[test]
fn two_hundred_small_tensors_cross_the_caps() {
    let case = Case::new((0..200).map(|i| i % 7 * 30), DType::F32).with_hyper_classes();
    check(Optimizer::Adam(Adam::default()), &case);
}

#[test]
fn mixed_dtypes_share_a_plan() {
    let mut case = Case::new([5, 1000, 0, 77, 300], DType::F32);
    case.params[1].dtype = DType::F64;
    case.params[4].dtype = DType::F64;
    check(Optimizer::Adam(Adam::default()), &case);
}

#[test]
fn decoupled_decay_of_0_is_adam_without_decay() {
    let case = Case::new(EDGE_NUMELS, DType::F32);
    let run = |weight_decay| {
        let planner = Planner::new(Optimizer::Adam(adam(weight_decay)));
        outcome(&planner.plan(&case.params).unwrap(), &case, &cpu())
    };
    assert!(run(WeightDecay::Decoupled(0.0)) == run(WeightDecay::L2(0.0)));
}

#[test]
fn learning_rate_0_leaves_parameters_as_they_are() {
    let case = Case::new([1, 100], DType::F32);
    let optimizer = Optimizer::Adam(Adam {
        lr: 0.0,
        ..Adam::default()
    });
    let plan = Planner::new(optimizer).plan(&case.params).unwrap();
    let backend = cpu();
    let mut state = plan.allocate(&backend).unwrap();
    state
        .view_mut::<f32>(Role::Param, "tensor.1")
        .unwrap()
        .fill(0.3);
    state.grad_mut::<f32>("tensor.1").unwrap().fill(5.0);
    plan.run(&mut state, &backend).unwrap();
    assert!(
        state
            .param::<f32>("tensor.1")
            .unwrap()
            .iter()
            .all(|&p| p == 0.3)
    );
}

#[test]
fn a_parameter_without_a_gradient_keeps_its_bits_and_its_step() {
    let case = Case::new([64, 1000, 3], DType::F32);
    let plan = Planner::new(Optimizer::Adam(Adam::default()))
        .plan(&case.params)
        .unwrap();
    let backend = cpu();
    let mut state = plan.allocate(&backend).unwrap();
    for name in ["tensor.0", "tensor.1", "tensor.2"] {
        state.view_mut::<f32>(Role::Param, name).unwrap().fill(1.0);
        state.grad_mut::<f32>(name).unwrap().fill(0.5);
    }
    state.set_absent("tensor.1").unwrap();
    let report = plan.run(&mut state, &backend).unwrap();
    assert_eq!((report.absent, report.elements), (1, 67));
    assert!(
        state
            .param::<f32>("tensor.1")
            .unwrap()
            .iter()
            .all(|&p| p == 1.0)
    );
    assert_eq!(
        (state.step_of("tensor.0"), state.step_of("tensor.1")),
        (Ok(1), Ok(0))
    );
    // Its next step is its first, with the first step's bias correction: the bits tensor.0 got one step before.
    let first = state.param::<f32>("tensor.0").unwrap()[0];
    plan.run(&mut state, &backend).unwrap();
    assert_eq!(state.param::<f32>("tensor.1").unwrap()[7], first);
    assert_eq!(
        (state.step_of("tensor.0"), state.step_of("tensor.1")),
        (Ok(2), Ok(1))
    );
}

#[test]
fn permuting_tensors_changes_no_bit_of_any() {
    let case = Case::new([300, 5, 70_000], DType::F32);
    let plan = Planner::new(Optimizer::Adam(Adam::default()))
        .plan(&case.params)
        .unwrap();
    let mut turned = case.params.clone();
    turned.rotate_left(1);
    let turned_plan = Planner::new(Optimizer::Adam(Adam::default()))
        .limits(LaunchLimits::with_argument_bytes(400))
        .plan(&turned)
        .unwrap();
    let backend = cpu();
    let run = |plan: &fusestep_planner::Plan| {
        let mut state = plan.allocate(&backend).unwrap();
        for (index, param) in case.params.iter().enumerate() {
            state
                .write(&backend, Role::Param, &param.name, &case.param_bytes(index))
                .unwrap();
            state
                .write(
                    &backend,
                    Role::Grad,
                    &param.name,
                    &case.grad_bytes(index, 1),
                )
                .unwrap();
        }
        plan.run(&mut state, &backend).unwrap();
        let names = case
            .params
            .iter()
            .map(|p| state.param::<f32>(&p.name).unwrap().to_vec());
        names.collect::<Vec<_>>()
    };
    assert_eq!(run(&plan), run(&turned_plan));
}
