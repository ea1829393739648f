//! Norms of updates: measuring changes no bit, and what is measured is what changed.

use fusestep_elementwise::square_sum;
use fusestep_fused_adam::Adam;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{Backend, LaunchLimits, Master, Precision, Rounding, StateDType, tree_sum};
use fusestep_planner::{LossScaling, Optimizer, Planner, RunAlone, State, StepReport, UpdateNorms};
use fusestep_simd::Level;
use fusestep_simd::join_bf16;
use fusestep_tensor::{DType, Role};
use fusestep_testkit::{Case, EDGE_NUMELS, Gradients, backends, check_bits, outcome, rules};
use half::{bf16, f16};

use crate::cpu;
use crate::gradients::{started, step};

const NEAREST: Rounding = Rounding::Nearest;
const RANDOM: Rounding = Rounding::Stochastic { seed: 3 };

/// Every way to keep a parameter, and both widths of state.
fn formats() -> Vec<(DType, Precision)> {
    let of =
        |master, state, rounding| Precision { master, state, rounding, ..Precision::default() };
    let (own, state16) = (StateDType::Compute, StateDType::Bf16);
    vec![
        (DType::F64, Precision::default()),
        (DType::F32, of(Master::None, own, NEAREST)),
        (DType::F32, of(Master::None, state16, RANDOM)),
        (DType::F16, of(Master::None, own, NEAREST)),
        (DType::F16, of(Master::F32, own, NEAREST)),
        (DType::BF16, of(Master::None, own, RANDOM)),
        (DType::BF16, of(Master::None, state16, NEAREST)),
        (DType::BF16, of(Master::F32, state16, RANDOM)),
        (DType::BF16, of(Master::Remainder, own, NEAREST)),
        (DType::BF16, of(Master::Remainder, state16, RANDOM)),
    ]
}

/// Runs a case everywhere, measured and not: parameters and state must be the same, and so must the
/// norms.
fn measured_alike(rule: Optimizer, precision: Precision, case: &Case) {
    let planner = |planner: Planner| planner.precision(precision);
    let plain = planner(Planner::new(rule)).plan(&case.params).unwrap();
    let plain = outcome(&plain, case, &cpu());
    let measured = check_bits(rule, case, &|own| planner(own).with(UpdateNorms));
    assert!(measured[..plain.len()] == plain, "{rule}, {precision}: measuring changed a bit");
    let norms = case.steps as usize * (1 + case.params.len()) * size_of::<f64>();
    assert_eq!(measured.len(), plain.len() + norms, "{rule}, {precision}");
}

#[test]
fn measuring_changes_no_bit_and_norms_are_the_same_everywhere() {
    for rule in rules() {
        let numels = [0, 1, 15, 17, 1023, 1024, 1025, 5000, 65_537, 0];
        measured_alike(rule, Precision::default(), &Case::new(numels, DType::F32));
    }
    let case = Case::new(EDGE_NUMELS, DType::F32).with_groups();
    measured_alike(Adam::default().into(), Precision::default(), &case);
    let extreme = Case::new([1, 33, 3000], DType::F32).with_gradients(Gradients::Extreme);
    for rule in [Adam::default().into(), Lars::default().into()] {
        measured_alike(rule, Precision::default(), &extreme);
    }
}

#[test]
fn norms_are_the_same_everywhere_in_every_format() {
    for (dtype, precision) in formats() {
        for rule in [Adam::default().into(), Lars::default().into()] {
            let case = Case::new([0, 1, 17, 2047, 65_600], dtype);
            measured_alike(rule, precision, &case);
        }
    }
}

/// The values of a parameter that updates start from: its master where it has one.
fn values(state: &State, backend: &dyn Backend, name: &str, numel: u64) -> Vec<f64> {
    let read = |role| {
        let width = state.dtype(role, name).unwrap().len_bytes();
        let mut bytes = vec![0; numel as usize * width];
        state.read(backend, role, name, &mut bytes).unwrap();
        bytes
    };
    let roles = state.roles(name).unwrap();
    let role = if roles.contains(&Role::Master) { Role::Master } else { Role::Param };
    let bytes = read(role);
    if roles.contains(&Role::Remainder) {
        let params: Vec<u16> = bytemuck::pod_collect_to_vec(&bytes);
        let remainders: Vec<u16> = bytemuck::pod_collect_to_vec(&read(Role::Remainder));
        let both = params.iter().zip(&remainders);
        return both.map(|(&p, &r)| f64::from(join_bf16(p, r))).collect();
    }
    let wide = |width: usize, of: &dyn Fn(&[u8]) -> f64| bytes.chunks(width).map(of).collect();
    match state.dtype(role, name).unwrap() {
        DType::F64 => wide(8, &|b| bytemuck::pod_read_unaligned(b)),
        DType::F16 => wide(2, &|b| bytemuck::pod_read_unaligned::<f16>(b).to_f64()),
        DType::BF16 => wide(2, &|b| bytemuck::pod_read_unaligned::<bf16>(b).to_f64()),
        _ => wide(4, &|b| bytemuck::pod_read_unaligned::<f32>(b).into()),
    }
}

fn all_values(case: &Case, state: &State, backend: &dyn Backend) -> Vec<Vec<f64>> {
    let params = case.params.iter();
    let of = params.map(|param| values(state, backend, &param.name, param.numel()));
    of.collect()
}

/// Requires of every parameter the norm of what changed, and of the report that of all.
fn are_of_the_change(
    state: &State,
    backend: &dyn Backend,
    report: &StepReport,
    (before, after): (&[Vec<f64>], &[Vec<f64>]),
    name: &str,
) {
    let mut sums = Vec::new();
    let norms = state.update_norms(backend).unwrap().unwrap();
    for ((norm, before), after) in norms.iter().zip(before).zip(after) {
        let change: Vec<f64> = before.iter().zip(after).map(|(b, a)| a - b).collect();
        let sum = square_sum::<f64, f64>(Level::PORTABLE, &change).sum;
        assert_eq!(norm.to_bits(), sum.sqrt().to_bits(), "{name}");
        sums.push(sum);
    }
    let total = tree_sum(sums.len(), |param| sums[param]);
    assert_eq!(report.update_norm, Some(total.sqrt()), "{name}");
}

#[test]
fn a_norm_is_that_of_what_changed() {
    for (name, backend) in backends() {
        let backend = backend.as_ref();
        for (dtype, precision) in formats() {
            for rule in [Adam::default().into(), Lamb::default().into()] {
                let name = format!("{name}, {rule}, {dtype}, {precision}");
                let case = Case::new([3, 0, 1000, 70_001, 1], dtype);
                let planner = Planner::new(rule).precision(precision).with(UpdateNorms);
                let (plan, mut state) = started(&case, &planner, backend);
                let mut before = all_values(&case, &state, backend);
                let at_rest = state.update_norms(backend).unwrap();
                assert_eq!(at_rest, Some(vec![0.0; 5]), "{name}");
                for k in 1..=2 {
                    for (index, param) in case.params.iter().enumerate() {
                        let bytes = case.grad_bytes(index, k);
                        state.write(backend, Role::Grad, &param.name, &bytes).unwrap();
                    }
                    let report = RunAlone::of(&plan, &mut state, backend).step_all().unwrap();
                    let after = all_values(&case, &state, backend);
                    are_of_the_change(&state, backend, &report, (&before, &after), &name);
                    before = after;
                }
            }
        }
    }
}

#[test]
fn what_took_no_part_did_not_move() {
    for (name, backend) in backends() {
        let backend = backend.as_ref();
        for rule in rules() {
            let case = Case::new([700, 5, 66_000, 3], DType::F32);
            let planner = Planner::new(rule).with(UpdateNorms);
            let (plan, mut state) = started(&case, &planner, backend);
            step((&plan, &mut state, backend), (&case, 1), &|_, _, g| g);
            let all = state.update_norms(backend).unwrap().unwrap();
            assert!(all.iter().all(|&norm| norm > 0.0), "{name}, {rule}");
            state.set_without_gradient("tensor.2").unwrap();
            let before = all_values(&case, &state, backend);
            let report = step((&plan, &mut state, backend), (&case, 2), &|_, _, g| g);
            let after = all_values(&case, &state, backend);
            are_of_the_change(&state, backend, &report, (&before, &after), &name);
            let norms = state.update_norms(backend).unwrap().unwrap();
            assert!(norms[2] == 0.0 && norms[1] > 0.0, "{name}, {rule}");
        }
    }
}

#[test]
fn a_skipped_step_moves_nothing() {
    for (name, backend) in backends() {
        let backend = backend.as_ref();
        for rule in rules() {
            let case = Case::new([700, 0, 66_000, 3], DType::F32);
            let planner = Planner::new(rule).with(UpdateNorms);
            let (plan, mut state) = started(&case, &planner.with(LossScaling::dynamic()), backend);
            let good = step((&plan, &mut state, backend), (&case, 1), &|_, _, g| g);
            assert!(good.update_norm > Some(0.0), "{name}, {rule}");
            let spoil = |index, at, g| {
                if (index, at) == (2, 65_540) { f64::NAN } else { g }
            };
            let report = step((&plan, &mut state, backend), (&case, 2), &spoil);
            assert_eq!(
                (report.skipped, report.update_norm, state.update_norms(backend).unwrap()),
                (true, Some(0.0), Some(vec![0.0; 4])),
                "{name}, {rule}"
            );
        }
    }
}

/// LARS and LAMB leave a tensor as it is if its norm is not finite, and go on with the others.
#[test]
fn a_tensor_that_its_rule_skips_did_not_move() {
    for (name, backend) in backends() {
        let backend = backend.as_ref();
        for rule in [Lars::default().into(), Lamb::default().into()] {
            let case = Case::new([700, 66_000, 3], DType::F32);
            let planner = Planner::new(rule).with(UpdateNorms);
            let (plan, mut state) = started(&case, &planner, backend);
            step((&plan, &mut state, backend), (&case, 1), &|_, _, g| g);
            let spoil = |index, _, g| if index == 1 { f64::INFINITY } else { g };
            let report = step((&plan, &mut state, backend), (&case, 2), &spoil);
            let norms = state.update_norms(backend).unwrap().unwrap();
            let moved = norms[0] > 0.0 && norms[2] > 0.0;
            assert!(norms[1] == 0.0 && moved, "{name}, {rule}: {norms:?}");
            let total = norms.iter().map(|norm| norm * norm).sum::<f64>().sqrt();
            let near = (report.update_norm.unwrap() / total - 1.0).abs() < 1e-12;
            assert!(near, "{name}, {rule}");
            assert_eq!(backend.take_skipped().unwrap(), 1, "{name}, {rule}");
        }
    }
}

#[test]
fn many_tensors_have_a_norm_each() {
    let case = Case { steps: 1, ..Case::new((0..10_000).map(|i| i % 5), DType::F32) };
    let limits = LaunchLimits::with_argument_bytes(4096);
    let run = |planner: Planner| {
        let planner = planner.with(UpdateNorms);
        outcome(&planner.plan(&case.params).unwrap(), &case, &cpu())
    };
    let rule = Adam::default().into();
    let fused = run(Planner::new(rule).limits(limits));
    assert!(fused == run(Planner::new(rule).naive()));
}
