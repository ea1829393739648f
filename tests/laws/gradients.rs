//! Identities of clipping and loss scaling, for every update rule.

use fusestep_fused_adam::Adam;
use fusestep_launch::Backend;
use fusestep_planner::{
    ClipByGlobalNorm, LossScaling, Optimizer, Plan, Planner, RunAlone, State, StepReport,
};
use fusestep_tensor::{DType, Role};
use fusestep_testkit::{Case, EDGE_NUMELS, backends, check_bits, element_rules, outcome};

use crate::cpu;

/// Dtypes, empty tensors and chunks in one case.
fn mixed(numels: &[u64]) -> Case {
    let mut case = Case::new(numels.iter().copied(), DType::F32).with_groups();
    for param in case.params.iter_mut().skip(2).step_by(3) {
        param.dtype = DType::F64;
    }
    case
}

#[test]
fn clipping_and_scaling_have_the_same_bits_everywhere() {
    for rule in element_rules() {
        clipped_alike(rule, &[0, 1, 17, 1023, 1025, 0]);
    }
    // Chunks, and limits smaller than they are, once: every rule has the same stage before it.
    clipped_alike(Optimizer::Adam(Adam::default()), &EDGE_NUMELS);
}

fn clipped_alike(rule: Optimizer, numels: &[u64]) {
    let case = mixed(numels);
    let unclipped = check_bits(rule, &case, &|planner| planner);
    let clipped = check_bits(rule, &case, &|planner| {
        let planner = planner.with(ClipByGlobalNorm::new(0.03125));
        planner.with(LossScaling::fixed(4.0))
    });
    let differs = clipped[..unclipped.len()] != unclipped;
    assert!(differs, "{rule}: nothing was clipped");
}

#[test]
fn a_large_max_norm_is_no_clipping() {
    for rule in element_rules() {
        let case = mixed(&[0, 1, 17, 1023, 65_537, 0, 1025]);
        let run = |planner: Planner| outcome(&planner.plan(&case.params).unwrap(), &case, &cpu());
        let plain = run(Planner::new(rule));
        let clipped = run(Planner::new(rule).with(ClipByGlobalNorm::new(1e30)));
        assert!(clipped[..plain.len()] == plain);
    }
}

/// Writes a step's gradients, each element through `change`, and runs the step.
pub(crate) fn step(
    (plan, state, backend): (&Plan, &mut State, &dyn Backend),
    (case, step): (&Case, u64),
    change: &dyn Fn(usize, usize, f64) -> f64,
) -> StepReport {
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
        state.write(backend, Role::Grad, &param.name, &bytes).unwrap();
    }
    RunAlone::of(plan, state, backend).step_all().unwrap()
}

/// All tensors but the gradients.
fn contents(case: &Case, state: &State, backend: &dyn Backend) -> Vec<u8> {
    let mut all = Vec::new();
    for param in &case.params {
        let mut roles = state.roles(&param.name).unwrap();
        roles.retain(|&role| role != Role::Grad);
        for role in roles {
            let mut bytes = vec![0; param.numel() as usize * param.dtype.len_bytes()];
            state.read(backend, role, &param.name, &mut bytes).unwrap();
            all.extend(bytes);
        }
    }
    all
}

pub(crate) fn started(case: &Case, planner: &Planner, backend: &dyn Backend) -> (Plan, State) {
    let plan = planner.plan(&case.params).unwrap();
    let mut state = plan.allocate(backend).unwrap();
    for (index, param) in case.params.iter().enumerate() {
        let bytes = case.param_bytes(index);
        state.write(backend, Role::Param, &param.name, &bytes).unwrap();
    }
    (plan, state)
}

#[test]
fn scaled_gradients_with_the_scale_taken_out_are_unscaled_gradients() {
    for rule in element_rules() {
        let case = mixed(&[5, 0, 1000, 65_537, 77]);
        let backend = cpu();
        let clip = || Planner::new(rule).with(ClipByGlobalNorm::new(0.25));
        let (plan, mut state) = started(&case, &clip(), &backend);
        for k in 1..=case.steps {
            step((&plan, &mut state, &backend), (&case, k), &|_, _, g| g);
        }
        let (expected, norms) = (contents(&case, &state, &backend), state.grad_reports(&backend));
        for scale in [2.0f64, 1024.0, 65_536.0] {
            let planner = clip().with(LossScaling::fixed(scale));
            let (plan, mut state) = started(&case, &planner, &backend);
            for k in 1..=case.steps {
                step((&plan, &mut state, &backend), (&case, k), &|_, _, g| g * scale);
            }
            assert!(contents(&case, &state, &backend) == expected, "scale {scale}");
            assert_eq!(state.grad_reports(&backend), norms, "scale {scale}");
        }
    }
}

#[test]
fn clipping_in_the_update_is_clipping_the_gradients_first() {
    for rule in element_rules() {
        let case = Case::new([5, 0, 1000, 65_537, 77], DType::F32);
        let backend = cpu();
        let planner = Planner::new(rule).with(ClipByGlobalNorm::new(0.25));
        let (plan, mut state) = started(&case, &planner, &backend);
        let (plain, mut by_hand) = started(&case, &Planner::new(rule), &backend);
        for k in 1..=case.steps {
            let report = step((&plan, &mut state, &backend), (&case, k), &|_, _, g| g);
            let factor = (0.25 / (report.grad_norm.unwrap() + 1e-6)) as f32;
            assert!(factor < 1.0);
            let clip = |_, _, g: f64| f64::from(g as f32 * factor);
            step((&plain, &mut by_hand, &backend), (&case, k), &clip);
        }
        assert!(contents(&case, &state, &backend) == contents(&case, &by_hand, &backend));
    }
}

#[test]
fn a_skipped_step_leaves_every_bit_and_every_counter() {
    for (name, backend) in backends() {
        for rule in element_rules() {
            skip(rule, backend.as_ref(), &format!("{name}, {rule}"));
        }
    }
}

fn skip(rule: Optimizer, backend: &dyn Backend, name: &str) {
    let case = mixed(&[5, 0, 1000, 70_000, 77, 1]);
    let planner = Planner::new(rule).with(LossScaling::dynamic());
    let planner = planner.limits(backend.limits());
    let (plan, mut state) = started(&case, &planner, backend);
    let scaled = |_, _, g| g * 65_536.0;
    step((&plan, &mut state, backend), (&case, 1), &scaled);
    let before = contents(&case, &state, backend);
    for (skipped, (tensor, element)) in
        [(0, 0), (2, 999), (3, 65_536), (3, 69_999), (5, 0)].into_iter().enumerate()
    {
        let bad = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY][skipped % 3];
        let spoiled = |index, at, g| {
            if (index, at) == (tensor, element) { bad } else { g }
        };
        let report = step((&plan, &mut state, backend), (&case, 2), &spoiled);
        assert!(report.skipped && report.non_finite == 1, "{name}: {report:?}");
        assert_eq!((report.step, report.elements, state.step()), (1, 0, 1), "{name}");
        let scale = 65_536.0 / f64::from(2u32 << skipped);
        assert_eq!(report.loss_scale, Some(scale), "{name}");
        assert_eq!(state.skipped(), skipped as u64 + 1, "{name}");
        assert!(contents(&case, &state, backend) == before, "{name}");
    }
    // The next good step is the second one, with its bias corrections.
    let rescaled = |_, _, g| g * 2048.0;
    step((&plan, &mut state, backend), (&case, 2), &rescaled);
    let (plain, mut expected) = started(&case, &Planner::new(rule), backend);
    for k in 1..=2 {
        step((&plain, &mut expected, backend), (&case, k), &|_, _, g| g);
    }
    let same = contents(&case, &state, backend) == contents(&case, &expected, backend);
    assert!(same && state.step() == 2, "{name}");
}
