//! Identities that must hold bit for bit.

use std::num::NonZeroUsize;

use fusestep_adagrad::Adagrad;
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::{Adam, SecondMoment};
use fusestep_fused_sgd::{Nesterov, Sgd};
use fusestep_launch::{Backend, LaunchLimits, Objective, WeightDecay};
use fusestep_lion::Lion;
use fusestep_planner::{ClipByGlobalNorm, LossScaling, Optimizer, Plan, Planner, State};
use fusestep_tensor::{DType, Role};
use fusestep_testkit::{Case, EDGE_NUMELS, Gradients, backends, check, check_bits, outcome};

fn adam(weight_decay: WeightDecay) -> Adam {
    Adam {
        lr: 1e-2,
        weight_decay,
        ..Adam::default()
    }
}

/// Every update rule, with all that changes its arithmetic: what each law runs through.
fn rules() -> Vec<Optimizer> {
    let momentum = Sgd {
        lr: 1e-2,
        weight_decay: WeightDecay::L2(0.01),
        ..Sgd::with_momentum()
    };
    vec![
        adam(WeightDecay::Decoupled(0.01)).into(),
        adam(WeightDecay::L2(0.01)).into(),
        Sgd {
            momentum: 0.0,
            rescale: 0.125,
            ..momentum
        }
        .into(),
        Sgd {
            dampening: 0.25,
            weight_decay: WeightDecay::Decoupled(0.1),
            ..momentum
        }
        .into(),
        Sgd {
            nesterov: Nesterov::Nesterov,
            objective: Objective::Maximize,
            ..momentum
        }
        .into(),
        Lion {
            lr: 1e-3,
            weight_decay: 0.1,
            ..Lion::default()
        }
        .into(),
        Adagrad {
            lr_decay: 0.1,
            initial_sum: 1e-3,
            weight_decay: 0.01,
            ..Adagrad::default()
        }
        .into(),
    ]
}

fn cpu() -> CpuBackend {
    CpuBackend::new(NonZeroUsize::new(2).unwrap()).unwrap()
}

#[test]
fn any_plan_cap_thread_count_and_simd_level_gives_the_bits_of_the_naive_plan() {
    for dtype in [DType::F32, DType::F64] {
        let case = Case::new(EDGE_NUMELS, dtype).with_hyper_classes();
        for rule in rules() {
            check(rule, &case);
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
    let case = Case::new([1, 33, 1000, 5003], DType::F32).with_gradients(Gradients::Extreme);
    let without_eps = [
        Optimizer::Adam(Adam {
            eps: 0.0,
            ..Adam::default()
        }),
        Optimizer::Adagrad(Adagrad {
            eps: 0.0,
            ..Adagrad::default()
        }),
    ];
    for rule in rules().into_iter().chain(without_eps) {
        check(rule, &case);
    }
}

#[test]
fn two_hundred_small_tensors_cross_the_caps() {
    let case = Case::new((0..200).map(|i| i % 7 * 30), DType::F32).with_hyper_classes();
    for rule in rules() {
        check(rule, &case);
    }
}

#[test]
fn mixed_dtypes_share_a_plan() {
    let mut case = Case::new([5, 1000, 0, 77, 300], DType::F32);
    case.params[1].dtype = DType::F64;
    case.params[4].dtype = DType::F64;
    for rule in rules() {
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
        bits(
            Sgd {
                weight_decay,
                ..momentum
            },
            &case,
        )
    };
    assert!(run(WeightDecay::Decoupled(0.0)) == run(WeightDecay::L2(0.0)));
}

#[test]
fn rescaling_by_a_power_of_two_is_a_larger_learning_rate_without_momentum() {
    let case = Case::new(EDGE_NUMELS, DType::F32);
    let run = |lr, rescale| {
        bits(
            Sgd {
                lr,
                rescale,
                ..Sgd::default()
            },
            &case,
        )
    };
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
            for (role, bytes) in [
                (Role::Param, case.param_bytes(index)),
                (Role::Grad, case.grad_bytes(index, 1)),
            ] {
                state.write(&backend, role, &param.name, &bytes).unwrap();
            }
        }
        plan.run(&mut state, &backend).unwrap();
        let names = case.params.iter().map(|param| &param.name);
        names
            .map(|n| state.param::<f32>(n).unwrap().to_vec())
            .collect::<Vec<_>>()
    };
    let expected = params(Sgd::default());
    for dampening in [0.0, 0.5, 0.9] {
        let momentum = Sgd {
            dampening,
            ..Sgd::with_momentum()
        };
        assert_eq!(params(momentum), expected, "dampening {dampening}");
    }
}

#[test]
fn learning_rate_0_leaves_parameters_as_they_are() {
    let case = Case::new([1, 100], DType::F32);
    for rule in rules() {
        let plan = Planner::new(rule.with_lr(0.0)).plan(&case.params).unwrap();
        let backend = cpu();
        let mut state = plan.allocate(&backend).unwrap();
        let param = state.view_mut::<f32>(Role::Param, "tensor.1");
        param.unwrap().fill(0.3);
        state.grad_mut::<f32>("tensor.1").unwrap().fill(5.0);
        plan.run(&mut state, &backend).unwrap();
        let param = state.param::<f32>("tensor.1").unwrap();
        assert!(param.iter().all(|&p| p == 0.3), "{rule}");
    }
}

#[test]
fn a_parameter_without_a_gradient_keeps_its_bits_and_its_step() {
    for rule in rules() {
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
    state.set_absent("tensor.1").unwrap();
    let report = plan.run(&mut state, &backend).unwrap();
    assert_eq!((report.absent, report.elements), (1, 67));
    let kept = state.param::<f32>("tensor.1").unwrap();
    assert!(kept.iter().all(|&p| p == 1.0), "{rule}");
    assert_eq!(
        (state.step_of("tensor.0"), state.step_of("tensor.1")),
        (Ok(1), Ok(0))
    );
    // Its next step is its first, with the first step's bias correction, dampening and initial sum: the bits tensor.0 got one
    // step before.
    let first = state.param::<f32>("tensor.0").unwrap()[0];
    plan.run(&mut state, &backend).unwrap();
    assert_eq!(state.param::<f32>("tensor.1").unwrap()[7], first, "{rule}");
    assert_eq!(
        (state.step_of("tensor.0"), state.step_of("tensor.1")),
        (Ok(2), Ok(1))
    );
}

#[test]
fn permuting_tensors_changes_no_bit_of_any() {
    for rule in rules() {
        permuted_tensors_have_the_same_bits(rule);
    }
}

fn permuted_tensors_have_the_same_bits(rule: Optimizer) {
    let case = Case::new([300, 5, 70_000], DType::F32);
    let plan = Planner::new(rule).plan(&case.params).unwrap();
    let mut turned = case.params.clone();
    turned.rotate_left(1);
    let turned_plan = Planner::new(rule)
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
    assert_eq!(run(&plan), run(&turned_plan), "{rule}");
}

/// Dtypes, empty tensors and chunks in one case.
fn mixed(numels: &[u64]) -> Case {
    let mut case = Case::new(numels.iter().copied(), DType::F32).with_hyper_classes();
    for param in case.params.iter_mut().skip(2).step_by(3) {
        param.dtype = DType::F64;
    }
    case
}

fn adamw() -> Optimizer {
    Optimizer::Adam(adam(WeightDecay::Decoupled(0.01)))
}

#[test]
fn clipping_and_scaling_have_the_same_bits_everywhere() {
    let case = mixed(&EDGE_NUMELS);
    let unclipped = check_bits(adamw(), &case, &|planner| planner);
    let clipped = check_bits(adamw(), &case, &|planner| {
        let planner = planner.with(ClipByGlobalNorm::new(0.125));
        planner.with(LossScaling::fixed(4.0))
    });
    assert!(
        clipped[..unclipped.len()] != unclipped,
        "nothing was clipped"
    );
}

#[test]
fn a_large_max_norm_is_no_clipping() {
    let case = mixed(&EDGE_NUMELS);
    let run = |planner: Planner| outcome(&planner.plan(&case.params).unwrap(), &case, &cpu());
    let plain = run(Planner::new(adamw()));
    let clipped = run(Planner::new(adamw()).with(ClipByGlobalNorm::new(1e30)));
    assert!(clipped[..plain.len()] == plain);
}

/// Writes a step's gradients, each element through `change`, and runs the step.
fn step(
    (plan, state, backend): (&Plan, &mut State, &dyn Backend),
    (case, step): (&Case, u64),
    change: &dyn Fn(usize, usize, f64) -> f64,
) -> fusestep_planner::StepReport {
    for (index, param) in case.params.iter().enumerate() {
        let mut bytes = case.grad_bytes(index, step);
        match param.dtype {
            DType::F64 => {
                let mut values: Vec<f64> = bytemuck::pod_collect_to_vec(&bytes);
                for (at, value) in values.iter_mut().enumerate() {
                    *value = change(index, at, *value);
                }
                bytes = bytemuck::pod_collect_to_vec(&values);
            }
            _ => {
                let mut values: Vec<f32> = bytemuck::pod_collect_to_vec(&bytes);
                for (at, value) in values.iter_mut().enumerate() {
                    *value = change(index, at, f64::from(*value)) as f32;
                }
                bytes = bytemuck::pod_collect_to_vec(&values);
            }
        }
        state
            .write(backend, Role::Grad, &param.name, &bytes)
            .unwrap();
    }
    plan.run(state, backend).unwrap()
}

/// All tensors but the gradients.
fn contents(case: &Case, state: &State, backend: &dyn Backend) -> Vec<u8> {
    let mut all = Vec::new();
    for param in &case.params {
        for role in [Role::Param, Role::Moment1, Role::Moment2] {
            let mut bytes = vec![0; param.numel() as usize * param.dtype.len_bytes()];
            state.read(backend, role, &param.name, &mut bytes).unwrap();
            all.extend(bytes);
        }
    }
    all
}

fn started(case: &Case, planner: &Planner, backend: &dyn Backend) -> (Plan, State) {
    let plan = planner.plan(&case.params).unwrap();
    let mut state = plan.allocate(backend).unwrap();
    for (index, param) in case.params.iter().enumerate() {
        let bytes = case.param_bytes(index);
        state
            .write(backend, Role::Param, &param.name, &bytes)
            .unwrap();
    }
    (plan, state)
}

#[test]
fn scaled_gradients_with_the_scale_taken_out_are_unscaled_gradients() {
    let case = mixed(&[5, 0, 1000, 65_537, 77]);
    let backend = cpu();
    let clip = || Planner::new(adamw()).with(ClipByGlobalNorm::new(0.25));
    let (plan, mut state) = started(&case, &clip(), &backend);
    for k in 1..=case.steps {
        step((&plan, &mut state, &backend), (&case, k), &|_, _, g| g);
    }
    let (expected, norms) = (
        contents(&case, &state, &backend),
        state.grad_norms(&backend),
    );
    for scale in [2.0f64, 1024.0, 65_536.0] {
        let planner = clip().with(LossScaling::fixed(scale));
        let (plan, mut state) = started(&case, &planner, &backend);
        for k in 1..=case.steps {
            step((&plan, &mut state, &backend), (&case, k), &|_, _, g| {
                g * scale
            });
        }
        assert!(
            contents(&case, &state, &backend) == expected,
            "scale {scale}"
        );
        assert_eq!(state.grad_norms(&backend), norms, "scale {scale}");
    }
}

#[test]
fn clipping_in_the_update_is_clipping_the_gradients_first() {
    let case = Case::new([5, 0, 1000, 65_537, 77], DType::F32);
    let backend = cpu();
    let planner = Planner::new(adamw()).with(ClipByGlobalNorm::new(0.25));
    let (plan, mut state) = started(&case, &planner, &backend);
    let (plain, mut by_hand) = started(&case, &Planner::new(adamw()), &backend);
    for k in 1..=case.steps {
        let report = step((&plan, &mut state, &backend), (&case, k), &|_, _, g| g);
        let factor = (0.25 / (report.grad_norm.unwrap() + 1e-6)) as f32;
        assert!(factor < 1.0);
        let clip = |_, _, g: f64| f64::from(g as f32 * factor);
        step((&plain, &mut by_hand, &backend), (&case, k), &clip);
    }
    assert!(contents(&case, &state, &backend) == contents(&case, &by_hand, &backend));
}

#[test]
fn a_skipped_step_leaves_every_bit_and_every_counter() {
    let case = mixed(&[5, 0, 1000, 70_000, 77, 1]);
    for (name, backend) in backends() {
        let backend = backend.as_ref();
        let planner = Planner::new(adamw()).with(LossScaling::dynamic());
        let planner = planner.limits(backend.limits());
        let (plan, mut state) = started(&case, &planner, backend);
        let scaled = |_, _, g| g * 65_536.0;
        step((&plan, &mut state, backend), (&case, 1), &scaled);
        let before = contents(&case, &state, backend);
        for (skipped, (tensor, element)) in [(0, 0), (2, 999), (3, 65_536), (3, 69_999), (5, 0)]
            .into_iter()
            .enumerate()
        {
            let bad = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY][skipped % 3];
            let spoiled = |index, at, g| {
                if (index, at) == (tensor, element) {
                    bad
                } else {
                    g
                }
            };
            let report = step((&plan, &mut state, backend), (&case, 2), &spoiled);
            assert!(
                report.skipped && report.non_finite == 1,
                "{name}: {report:?}"
            );
            assert_eq!(
                (report.step, report.elements, state.step()),
                (1, 0, 1),
                "{name}"
            );
            let scale = 65_536.0 / f64::from(2u32 << skipped);
            assert_eq!(report.loss_scale, Some(scale), "{name}");
            assert_eq!(state.skipped(), skipped as u64 + 1, "{name}");
            assert!(contents(&case, &state, backend) == before, "{name}");
        }
        // The next good step is the second one, with its bias corrections.
        let rescaled = |_, _, g| g * 2048.0;
        step((&plan, &mut state, backend), (&case, 2), &rescaled);
        let (plain, mut expected) = started(&case, &Planner::new(adamw()), backend);
        for k in 1..=2 {
            step((&plain, &mut expected, backend), (&case, k), &|_, _, g| g);
        }
        let same = contents(&case, &state, backend) == contents(&case, &expected, backend);
        assert!(same && state.step() == 2, "{name}");
    }
}
